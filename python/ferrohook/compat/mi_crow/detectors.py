"""`Detector`: a hook that collects a module's activations."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ferrohook.compat.mi_crow.context_dict import (
    EMPTY,
    Activations,
    Contents,
    ContextDict,
    TensorDict,
)
from ferrohook.compat.mi_crow.hooks import Hook, HookType, check_signature
from ferrohook.compat.mi_crow.tensors import extract_tensor_from_output, first_tensor
from ferrohook.data import Store
from ferrohook.data.sources import Collectable
from ferrohook.errors import HookError
from ferrohook.util.arguments import check_copy, expect
from ferrohook.util.tensors import version_of

if TYPE_CHECKING:
    from torch import nn


class Detector(Hook, Collectable):
    """A hook that collects a module's activations, and changes nothing.

    Subclasses implement `process_activations`, which writes to `metadata` and `tensor_metadata`.
    Both have separate contents in each context (`contextvars`): threads that share a detector see
    only their own activations.

    By default it runs after the controllers of its layer and sees their results.

    Args:
        hook_type: see `Hook`.
        hook_id: see `Hook`.
        store: `save` puts collected tensors there; `ferrohook.collect` does so for all batches.
        layer_signature: see `Hook`.

    Raises:
        ValueError: an unknown `hook_type`.
        HookTypeError: an argument has the wrong type.
    """

    _detects = True
    _hook_fn: ClassVar[Any] = None  # its `_run_before` and `_run_after` do without
    # After controllers, also of negative priority; before captures.
    _priority = -(2**31)
    # Names of the tensors that the class itself collects.
    _collected: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
        store: Store | None = None,
        layer_signature: str | int | None = None,
    ) -> None:
        super().__init__(layer_signature=layer_signature, hook_type=hook_type, hook_id=hook_id)
        expect(store, Store | None, "store must be a ferrohook.data.Store or None")
        self.store = store
        self._contents = Contents()

    @property
    def metadata(self) -> ContextDict[Any]:
        """Collected values of this context, except tensors."""
        return ContextDict(self._contents)

    @metadata.setter
    def metadata(self, content: Mapping[str, Any]) -> None:
        self.metadata.replace(dict(content))

    @property
    def tensor_metadata(self) -> TensorDict:
        """Collected tensors of this context."""
        return TensorDict(self._contents)

    @tensor_metadata.setter
    def tensor_metadata(self, content: Mapping[str, Tensor]) -> None:
        self.tensor_metadata.replace(dict(content))

    @abc.abstractmethod
    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002 (mi_crow's name)
        """Collects from one call of the module.

        Args:
            module: the module that is called.
            input: tuple of its positional arguments; in a pre-forward hook, followed by the dict
                of keyword arguments, if there are any.
            output: its output, None in a pre-forward hook.
        """

    def clear_captured(self) -> None:
        """Removes the collected tensors and metadata of this context.

        `LayerActivationDetector` and the model detectors remove only their own tensors and shapes,
        and leave the values that a subclass collected.
        """
        if self._collected:
            self._contents.collect(self._collected, {})
        else:
            self._contents.replace(EMPTY)

    def save(self, run: str, batch: int) -> None:
        """Puts the tensors of this context into the store.

        The batch stays open for other puts; `store.complete(run, batch)` ends it.

        Args:
            run: name of the run.
            batch: index of the batch in the run.

        Raises:
            HookError: the detector has no store, or is registered on no layer.
            StoreError: the store is closed, read only or failed to write.
        """
        layer = self.layer
        if self.store is None or layer is None:
            missing = "has no store" if self.store is None else "is not registered on a layer"
            msg = f"{self} {missing}: save needs both"
            raise HookError(msg)
        self.store.put(run, batch, layer, dict(self.tensor_metadata))

    def _collect(self, **values: Any) -> None:
        """Replaces the collected tensors by copies of the values that are tensors."""
        tensors = {
            name: self._copy(value) for name, value in values.items() if isinstance(value, Tensor)
        }
        self._contents.collect(self._collected, tensors)

    def _copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # Copies on the CPU too: later operations may write in place.
        source = tensor.detach() if tensor.requires_grad else tensor
        cast = source if dtype is None else source.to(dtype)
        if source.is_cuda:
            return self._contents.copies.start(cast, clone=cast is source)
        return source.clone() if cast is source else cast

    def _run_before(self, module: Any, args: Any, kwargs: Any) -> Any:
        self.process_activations(module, (*args, kwargs) if kwargs else args, None)
        return super()._run_before(module, args, kwargs) if self._controls else None

    def _run_after(self, module: Any, args: Any, output: Any) -> Any:
        self.process_activations(module, args, output)
        return super()._run_after(module, args, output) if self._controls else None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"store": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.store = self.store
        return copied

    def __repr__(self) -> str:
        tensors, values = len(self.tensor_metadata), len(self.metadata)
        counts = f", tensors={tensors}, values={values}" if tensors or values else ""
        return f"{super().__repr__()[:-1]}{counts}>"


class LayerActivationDetector(Detector):
    """Collects a layer's last output: the tensor that `extract_tensor_from_output` finds.

    By default the tensor is a detached copy on the CPU, safe from later writes in place. As a
    pre-forward hook it collects the layer's input.

    Args:
        layer_signature: name or index of the layer.
        hook_id: see `Hook`.
        target_dtype: dtype that the tensor is cast to.
        store: see `Detector`.
        copy: `clone` copies; `checked` keeps the detached tensor itself, on its device, and reading
            it raises `StaleActivationError` after a write in place; `ref` keeps it unchecked. See
            `ferrohook.capture`.

    Raises:
        HookTypeError: no `layer_signature`, or an argument has the wrong type.
        ValueError: an unknown `copy`.
    """

    _collected: ClassVar = ("activations",)

    def __init__(
        self,
        layer_signature: str | int,
        hook_id: str | None = None,
        target_dtype: torch.dtype | None = None,
        store: Store | None = None,
        *,
        copy: Literal["checked", "clone", "ref"] = "clone",
    ) -> None:
        check_signature(layer_signature)
        check_copy(copy)
        expect(target_dtype, torch.dtype | None, "target_dtype must be a torch.dtype or None")
        super().__init__(hook_id=hook_id, store=store, layer_signature=layer_signature)
        self.target_dtype = target_dtype
        self._copies = copy

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002, ARG002, D102 (Detector's)
        tensor: Tensor | None
        if isinstance(output, Tensor):
            tensor = output  # what most layers return
        elif self._hook_type is HookType.FORWARD:
            tensor = extract_tensor_from_output(output)
        else:
            tensor = first_tensor(input[0], in_dicts=True) if input else None
        if tensor is None:
            self.clear_captured()
            return
        if self._copies == "clone" or is_compiling():  # compiled regions reuse buffers
            activations: Activations = self._copy(tensor, self.target_dtype), None
        else:
            activations = self._reference(tensor)
        if self._contents.extended:
            kept, version = activations
            versions = {} if version is None else {"activations": version}
            self._contents.collect(self._collected, {"activations": kept}, versions)
        else:
            self._contents.replace(activations)

    def _reference(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Returns the detached tensor, and its version if it is to be checked."""
        source = tensor.detach() if tensor.requires_grad else tensor
        dtype = self.target_dtype
        if dtype is not None and dtype != source.dtype:
            return source.to(dtype), None
        if self._copies == "ref":
            return source, None
        version = version_of(source)
        return (source.clone() if version is None else source), version

    def get_captured(self) -> Tensor | None:
        """Returns the activations of the last call in this context, or None."""
        return self.tensor_metadata.get("activations")


class ModelInputDetector(Detector):
    """Collects a model's input ids and a mask of the tokens that are not padding or special.

    Arguments are found by name, passed by position, by keyword or in a dict. `tensor_metadata` has
    copies on the CPU: `input_ids` and `attention_mask`.

    Args:
        layer_signature: see `Hook`; None and `""` are the model itself.
        hook_id: see `Hook`.
        save_input_ids: collect the ids.
        save_attention_mask: collect a mask that is True for each token that is attended to and not
            special. A call with a KV cache has the mask of its own tokens.
        special_token_ids: ids of special tokens; None for the `special_token_ids` of `context`, if
            it has any.
        store: see `Detector`.

    Raises:
        HookTypeError: an argument has the wrong type.
    """

    _types: ClassVar = (HookType.PRE_FORWARD,)
    _default_layer: ClassVar = ""
    _collected: ClassVar = ("input_ids", "attention_mask")

    def __init__(  # noqa: PLR0913, PLR0917 (mi_crow's, and the store)
        self,
        layer_signature: str | int | None = None,
        hook_id: str | None = None,
        save_input_ids: bool = True,  # noqa: FBT001, FBT002 (mi_crow's)
        save_attention_mask: bool = False,  # noqa: FBT001, FBT002 (mi_crow's)
        special_token_ids: Iterable[int] | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(HookType.PRE_FORWARD, hook_id, store, layer_signature)
        self.save_input_ids = save_input_ids
        self.save_attention_mask = save_attention_mask
        self.special_token_ids = None if special_token_ids is None else {*special_token_ids}

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002, ARG002, D102 (Detector's)
        named: dict[str, Any] = {}
        # The last element may be the dict of keyword arguments.
        positional = input[:-1] if input and isinstance(input[-1], Mapping) else input
        if positional:
            named |= zip(inspect.signature(module.forward).parameters, positional, strict=False)
        for each in input:
            if isinstance(each, Mapping):
                named |= each
        ids = named.get("input_ids", input[0] if input else None)
        self._collect_inputs(ids, named.get("attention_mask"))

    def set_inputs_from_encodings(
        self,
        encodings: Mapping[str, Tensor],
        module: nn.Module | None = None,  # noqa: ARG002 (mi_crow's)
    ) -> None:
        """Collects a tokenizer's result as if the model had been called with it.

        Args:
            encodings: mapping with `input_ids` and, optionally, `attention_mask`.
            module: unused.

        Raises:
            HookTypeError: `encodings` is no mapping.
            ValueError: the mask has another shape than the ids.
        """
        expect(encodings, Mapping, "encodings must be a mapping with 'input_ids'")
        self._collect_inputs(encodings.get("input_ids"), encodings.get("attention_mask"))

    def _collect_inputs(self, ids: Any, mask: Any) -> None:
        if not isinstance(ids, Tensor):
            self.clear_captured()
            return
        self._collect(
            input_ids=ids if self.save_input_ids else None,
            attention_mask=self._token_mask(ids, mask) if self.save_attention_mask else None,
        )

    def _token_mask(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        special = self.special_token_ids
        if special is None:
            special = getattr(self.context, "special_token_ids", None)
        regular = torch.isin(
            ids, torch.tensor([*(special or ())], dtype=ids.dtype, device=ids.device)
        )
        regular.logical_not_()
        if mask is None:
            return regular
        if mask.ndim == ids.ndim > 0:
            # With a KV cache it covers the cached tokens too, which come first.
            mask = mask[..., mask.shape[-1] - ids.shape[-1] :]
        if mask.shape not in (ids.shape, (1, *ids.shape[1:])):
            msg = (
                f"attention_mask has the shape {tuple(mask.shape)}, input_ids "
                f"{tuple(ids.shape)}: pass a mask of the shape of the ids, or set "
                "save_attention_mask=False"
            )
            raise ValueError(msg)
        return regular & mask.bool()

    def get_captured_input_ids(self) -> Tensor | None:
        """Returns the ids of the last call in this context, or None."""
        return self.tensor_metadata.get("input_ids")

    def get_captured_attention_mask(self) -> Tensor | None:
        """Returns the mask of the last call in this context, or None."""
        return self.tensor_metadata.get("attention_mask")


class ModelOutputDetector(Detector):
    """Collects a model's output: `output_logits`, `output_hidden_state` in `tensor_metadata`.

    The logits are the output's `logits`, or else the output itself or its first element, if that
    is a tensor; the hidden state is its `last_hidden_state`. Both are detached copies on the CPU.

    Args:
        layer_signature: see `Hook`; None and `""` are the model itself.
        hook_id: see `Hook`.
        save_output_logits: collect the logits.
        save_output_hidden_state: collect the hidden state.
        store: see `Detector`.

    Raises:
        HookTypeError: an argument has the wrong type.
    """

    _types: ClassVar = (HookType.FORWARD,)
    _default_layer: ClassVar = ""
    _collected: ClassVar = ("output_logits", "output_hidden_state")

    def __init__(
        self,
        layer_signature: str | int | None = None,
        hook_id: str | None = None,
        save_output_logits: bool = True,  # noqa: FBT001, FBT002 (mi_crow's)
        save_output_hidden_state: bool = False,  # noqa: FBT001, FBT002 (mi_crow's)
        store: Store | None = None,
    ) -> None:
        super().__init__(HookType.FORWARD, hook_id, store, layer_signature)
        self.save_output_logits = save_output_logits
        self.save_output_hidden_state = save_output_hidden_state

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002, ARG002, D102 (Detector's)
        logits = getattr(output, "logits", None)
        if logits is None:
            logits = output[0] if isinstance(output, tuple | list) and output else output
        state = getattr(output, "last_hidden_state", None)
        self._collect(
            output_logits=logits if self.save_output_logits else None,
            output_hidden_state=state if self.save_output_hidden_state else None,
        )

    def get_captured_output_logits(self) -> Tensor | None:
        """Returns the logits of the last call in this context, or None."""
        return self.tensor_metadata.get("output_logits")

    def get_captured_output_hidden_state(self) -> Tensor | None:
        """Returns the hidden state of the last call in this context, or None."""
        return self.tensor_metadata.get("output_hidden_state")
