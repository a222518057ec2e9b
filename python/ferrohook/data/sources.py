"""Sources of `collect`: each yields the tensors of some layers, batch by batch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ferrohook.captures.capture import CaptureSession
from ferrohook.captures.recorders import options_of
from ferrohook.errors import HookError
from ferrohook.quantity import places_of
from ferrohook.tokens.tracking import with_tokens_ahead
from ferrohook.util.tensors import tensors_by_path

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ferrohook.data import Store
    from ferrohook.names.select import Selector
    from ferrohook.registration.scopes import Scope


class Source(ABC):
    """Collector of the tensors of some layers of a model, batch by batch."""

    @abstractmethod
    def attach(self, scope: Scope) -> None:
        """Collects from calls in a scope, until the scope is left."""

    def detach(self) -> None:  # noqa: B027 (most have nothing to do)
        """Undoes the parts of `attach` that leaving the scope does not undo."""

    @abstractmethod
    def take(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors since the last `take`, by layer and name; the caller owns them."""

    @abstractmethod
    def contents(self) -> list[str]:
        """Describes the tensors that it yields, with the options that they depend on."""

    @abstractmethod
    def silent(self) -> list[str]:
        """Returns the layers that never ran."""


class Collectable:
    """Base of objects that `collect` accepts besides selectors, such as detectors."""


@functools.singledispatch
def source_of(collectable: Collectable, model: nn.Module, store: Store) -> Source:
    """Makes the source of a `Collectable`; each subclass registers its own implementation.

    Args:
        collectable: the object.
        model: the model that `collect` runs.
        store: the store that `collect` writes to.
    """
    msg = f"no source is registered for {type(collectable).__name__}"
    raise NotImplementedError(msg)


class CapturedOutputs(Source):
    """Source of the outputs or inputs of layers.

    Args:
        model: the model.
        what: the layers.
        inputs: as an option of `capture`.
        output_index: as an option of `capture`.
        rows_are_tokens: True if tensors start with (batch, tokens), as a mask does: a pattern
            then has its queries before its heads.
        options: other options of `capture`.
    """

    def __init__(
        self,
        model: nn.Module,
        what: Selector,
        *,
        inputs: bool,
        output_index: object,
        rows_are_tokens: bool,
        **options: Any,
    ) -> None:
        places = places_of(model, what, inputs=inputs, output_index=output_index)
        if rows_are_tokens:
            places = {name: with_tokens_ahead(place) for name, place in places.items()}
        # Clones, as the rest of the forward may write in place.
        fixed: Any = {"calls": "all", "copy": "clone", "device": "cpu"}
        own = options_of(inputs=inputs, output_index=output_index, **options, **fixed)
        self._session = CaptureSession(model, places, own, at=None)
        self._value = "input" if inputs else "output"
        self._ran: set[str] = set()

    def attach(self, scope: Scope) -> None:
        """Captures the calls in a scope."""
        self._activations = self._session.begin(scope)

    def take(
        self, mask: Tensor | None = None, shape: torch.Size | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of each value by their paths in it, cut to the rows of a mask.

        Args:
            mask: 0 at rows to leave out.
            shape: texts and tokens that each tensor begins with, before its width.

        Raises:
            HookError: a tensor has other rows.
        """
        own = self._value
        taken: dict[str, dict[str, Tensor]] = {}
        for layer, calls in self._activations.items():
            leaves = [
                (".".join([f"{own}#{number}" if number else own, *map(str, path)]), tensor)
                for number, value in enumerate(calls)
                for path, tensor in tensors_by_path(value)
            ]
            tensors = taken[layer] = dict(leaves)
            if len(tensors) < len(leaves):
                msg = f"two tensors of layer {layer!r} have one path, joined by dots: rename a key"
                raise HookError(msg)
            for name, tensor in tensors.items():
                subject = f"{name!r} of layer {layer!r}"
                if shape is not None:
                    _check_rows(tensor, shape, subject)
                if mask is not None:
                    tensors[name] = _masked(tensor, mask, subject)
        self._session.clear()
        self._ran |= {*taken}
        return taken

    def contents(self) -> list[str]:
        """Returns the names of the layers."""
        return self._session.names

    def silent(self) -> list[str]:
        """Returns the layers that never ran."""
        # `clear` drops the session's record of compiled modules that ran; `_ran` has it.
        return [name for name in self._session.silent() if name not in self._ran]


def _check_rows(tensor: Tensor, shape: torch.Size, subject: str) -> None:
    if tensor.dim() <= len(shape) or tensor.shape[: len(shape)] != shape:
        msg = (
            f"{subject} has shape {tuple(tensor.shape)}, without a row for each of the tokens, "
            f"whose shape is {tuple(shape)}: collect it in a run without tokens, or collect a part "
            "of it with output_index"
        )
        raise HookError(msg)


def _masked(tensor: Tensor, mask: Tensor, subject: str) -> Tensor:
    if tensor.shape[: mask.dim()] != mask.shape:
        msg = (
            f"{subject} has shape {tuple(tensor.shape)}, which does not start with the shape of "
            f"the mask, {tuple(mask.shape)}: select other modules, or a part of the value with "
            "output_index"
        )
        raise HookError(msg)
    return tensor[mask]
