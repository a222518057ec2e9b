"""`Source`: collects tensors of layers batch by batch, for `collect`."""

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
    """Collects tensors of some layers of a model, batch by batch."""

    @abstractmethod
    def attach(self, scope: Scope) -> None:
        """Starts collecting from calls in a scope, until the scope is left."""

    def detach(self) -> None:  # noqa: B027 (optional: most sources need none)
        """Undoes the part of `attach` that leaving the scope does not."""

    @abstractmethod
    def take(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors since the last call, by layer and name, owned by the caller."""

    @abstractmethod
    def silent(self) -> list[str]:
        """Lists the layers that never ran."""


class Collectable:
    """Base class of objects that `collect` takes beside selectors, such as detectors."""


@functools.singledispatch
def source_of(collectable: Collectable, model: nn.Module, store: Store) -> Source:
    """Creates the source of a `Collectable`; each subclass registers an implementation.

    Args:
        collectable: the object.
        model: the model that is run.
        store: the store that `collect` puts tensors into.
    """
    msg = f"no source is registered for {type(collectable).__name__}"
    raise NotImplementedError(msg)


class CapturedOutputs(Source):
    """Captures the outputs of layers."""

    def __init__(self, model: nn.Module, selector: Selector) -> None:
        # Cloned: the rest of the forward may write in place.
        captured = capture(model, selector, keep="all", copy="clone", device="cpu")
        self._session = captured.tag.session
        self._ran: set[str] = set()

    def attach(self, scope: Scope) -> None:
        """Captures the calls in a scope."""
        self._activations, _ = self._session.begin(scope)

    def take(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of each output by their paths in it."""
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
        """Lists the layers that never ran."""
        # Clearing the session resets the runs of compiled modules.
        return [name for name in self._session.silent() if name not in self._ran]
