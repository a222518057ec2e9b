"""Weak references: methods of objects that may go, values of modules that may go."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

V = TypeVar("V")


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a method as long as its object lives, and then does nothing."""
    name, reference = method.__name__, weakref.ref(method.__self__)  # type: ignore[attr-defined]

    def call(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        return None if found is None else getattr(found, name)(*args, **kwargs)

    return call


class PerModule(Generic[V]):
    """Values of modules, by identity. A value is dropped when its module is collected.

    It reads no attribute of a module, which may answer for all names by `__getattr__`. Each method
    is one operation of a dict, so threads may call them at once.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[nn.Module], V]] = {}

    def _entry(self, module: nn.Module, value: V) -> tuple[weakref.ref[nn.Module], V]:
        # A native callback, which no signal handler interrupts. It runs before another module can
        # have this id.
        return weakref.ref(module, functools.partial(self._entries.pop, id(module))), value

    def get(self, module: nn.Module) -> V | None:
        """Returns the value of a module; None if it has none."""
        _, value = self._entries.get(id(module), (None, None))
        return value

    def __getitem__(self, module: nn.Module) -> V:
        return self._entries[id(module)][1]

    def __setitem__(self, module: nn.Module, value: V) -> None:
        self._entries[id(module)] = self._entry(module, value)

    def setdefault(self, module: nn.Module, value: V) -> V:
        """Returns the value of a module, which becomes `value` if it has none."""
        return self._entries.setdefault(id(module), self._entry(module, value))[1]
