"""Sources: collectors of the tensors that pass some layers, batch by batch, for `collect`."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ferrohook.activations import capture
from ferrohook.tensors import tensors_by_path

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ferrohook.scopes import Scope
    from ferrohook.selection import Selector
    from ferrohook.stores import Store


class Source(ABC):
    """Collects what passes some layers of a model, batch by batch."""

    @abstractmethod
    def attach(self, scope: Scope) -> None:
        """Sees the calls in a scope from now on, until that is left."""

    def detach(self) -> None:  # noqa: B027 (most have nothing to do)
        """Undoes of it what leaving the scope does not."""

    @abstractmethod
    def take(self) -> dict[str, dict[str, Tensor]]:
        """The tensors since the last time, by layer and name; nobody else writes to them."""

    @abstractmethod
    def silent(self) -> list[str]:
        """The layers that never ran."""


class Collectable:
    """Base of the objects that `collect` takes beside selectors, such as detectors."""


@functools.singledispatch
def source_of(collectable: Collectable, model: nn.Module, store: Store) -> Source:
    """The source of a `Collectable`. Whoever derives a class from it registers how it is made.

    Args:
        collectable: the object.
        model: the one that is run.
        store: where `collect` puts the tensors.
    """
    msg = f"no source is registered for {type(collectable).__name__}"
    raise NotImplementedError(msg)


class CapturedOutputs(Source):
    """Captures what layers return."""

    def __init__(self, model: nn.Module, what: Selector) -> None:
        # Of its own memory: the rest of the forward may compute in place.
        self._session = capture(model, what, keep="all", copy="clone", device="cpu").session
        self._ran: set[str] = set()

    def attach(self, scope: Scope) -> None:
        """Captures the calls in a scope."""
        self._activations, _ = self._session.begin(scope)

    def take(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each output by their paths in it."""
        taken = {
            layer: {
                ".".join([f"output#{number}" if number else "output", *map(str, path)]): tensor
                for number, output in enumerate(calls)
                for path, tensor in tensors_by_path(output)
            }
            for layer, calls in self._activations.items()
        }
        self._session.clear()
        self._ran |= {*taken}
        return taken

    def silent(self) -> list[str]:
        """The layers that never ran."""
        # The capture itself forgets with each batch what compiled modules have run.
        return [name for name in self._session.silent() if name not in self._ran]
