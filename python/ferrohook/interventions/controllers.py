"""Controllers: hooks that change what passes a module."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.compiler import is_compiling

from ferrohook.errors import HookTypeError
from ferrohook.interventions.hooks import Hook, HookType, check_signature
from ferrohook.interventions.tensors import (
    apply_modification_to_output,
    extract_tensor_from_input,
    extract_tensor_from_output,
    first_tensor,
    fit,
    put_first,
)
from ferrohook.versions import version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Controller(Hook):
    """A hook that changes what passes a module.

    Subclasses say in `modify_activations` what takes the place of the activations. What comes out
    of it flows on, and autograd sees it. Nothing is written in place: a controller that writes to
    the activations is an error, and is given a copy in inference mode and in compiled regions,
    where nobody could tell. A hook that is a `Detector` too detects first.

    Args:
        hook_type: `HookType.FORWARD` to change what the module returns, `HookType.PRE_FORWARD` for
            what it takes; see `Hook`.
        hook_id: see `Hook`.
        layer_signature: see `Hook`.

    Raises:
        ValueError: an unknown `hook_type`.
        HookTypeError: an argument of the wrong type.
    """

    _controls = True

    def __init__(
        self,
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
        layer_signature: str | int | None = None,
    ) -> None:
        super().__init__(layer_signature=layer_signature, hook_type=hook_type, hook_id=hook_id)

    @abc.abstractmethod
    def modify_activations(
        self, module: nn.Module, inputs: Tensor | None, output: Tensor | None
    ) -> Tensor | None:
        """Says what takes the place of the activations, which it does not write to.

        Args:
            module: that is called.
            inputs: the tensor that it takes, see `extract_tensor_from_input`; before a forward, if
                there are no positional arguments, the first tensor among the keyword arguments.
            output: the tensor that it returned, see `extract_tensor_from_output`; before its
                forward the same as `inputs`.

        Returns:
            A tensor of the same shape, which is moved to the device and cast to the dtype of what
            it replaces; or None for the activations as they are.
        """

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self._detects:
            super()._before(module, args, kwargs)
        holder = args[0] if args else kwargs
        original = first_tensor(holder, in_dicts=holder is kwargs)
        if original is None:
            return None
        try:
            changed = self._change(module, None, original)
            if changed is None:
                return None
            holder = put_first(holder, original, fit(changed, original))
        except Exception as error:
            raise self._failed(error) from error
        return ((holder, *args[1:]), kwargs) if args else (args, holder)

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        if self._detects:
            super()._after(module, args, output)
        is_tensor = isinstance(output, Tensor)
        original = output if is_tensor else extract_tensor_from_output(output)
        if original is None:
            return None
        try:
            changed = self._change(module, args, original)
            if changed is None:
                return None
            if is_tensor:
                return fit(changed, original)
            return apply_modification_to_output(output, changed)
        except Exception as error:
            raise self._failed(error) from error

    def _change(self, module: Any, args: Any, original: Tensor) -> Tensor | None:
        """What takes the place of a tensor; None for itself. Before a forward without `args`."""
        # Where nobody could tell that it is written to, a copy is given.
        version = None if is_compiling() else version_of(original)
        given = original.clone() if version is None else original
        inputs = given if args is None else extract_tensor_from_input(args)
        changed = self.modify_activations(module, inputs, given)
        if version is not None and version_of(given) != version:
            msg = (
                "it wrote to the activations in place, which may be those of others: "
                "return a new tensor, as x * 2 and not x.mul_(2), or write to x.clone()"
            )
            raise RuntimeError(msg)
        if changed is None or changed is original:
            return None if given is original else given
        if not isinstance(changed, Tensor):
            msg = f"modify_activations returns a tensor or None, got {type(changed).__name__}"
            raise HookTypeError(msg)
        return changed


class FunctionController(Controller):
    """A controller made of a function from tensor to tensor.

    Args:
        layer_signature: the name or the index of the layer.
        function: gets the activations, and returns what takes their place: a new tensor of the
            same shape.
        hook_type: see `Controller`.
        hook_id: see `Hook`.

    Raises:
        ValueError: an unknown `hook_type`.
        HookTypeError: no `layer_signature`, a `function` that cannot be called, or an argument of
            the wrong type.

    Examples:
        >>> controller = FunctionController("layers.3.mlp", lambda x: x * 2)
        >>> Layers(model).register_hook("layers.3.mlp", controller)
    """

    def __init__(
        self,
        layer_signature: str | int,
        function: Callable[[Tensor], Tensor],
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
    ) -> None:
        check_signature(layer_signature)
        if not callable(function):
            msg = f"function is called with a tensor, got {type(function).__name__}"
            raise HookTypeError(msg)
        super().__init__(hook_type=hook_type, hook_id=hook_id, layer_signature=layer_signature)
        self.function = function

    def modify_activations(  # noqa: D102 (that of Controller)
        self,
        module: nn.Module,  # noqa: ARG002
        inputs: Tensor | None,
        output: Tensor | None,
    ) -> Tensor | None:
        target: Any = output if self._hook_type is HookType.FORWARD else inputs
        result = self.function(target)
        if not isinstance(result, Tensor):
            msg = f"function returns a tensor, got {type(result).__name__}"
            raise HookTypeError(msg)
        return result
