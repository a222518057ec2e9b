"""Weak references: methods of objects that may go, values of objects that may go."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

V = TypeVar("V")


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a method as long as its object lives, and then does nothing."""
    name, reference = method.__name__, weakref.ref(method.__self__)  # type: ignore[attr-defined]

    def call(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        return None if found is None else getattr(found, name)(*args, **kwargs)

    return call


class PerObject(Generic[V]):
    """Values of objects, by identity. A value is dropped when its object is collected.

    It reads no attribute of an object: a module may answer for all names by `__getattr__`. Each
    method is one operation of a dict, so threads may call them at once.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def _entry(self, of: Any, value: V) -> tuple[weakref.ref[Any], V]:
        # A native callback, which no signal handler interrupts. It runs before another object can
        # have this id.
        return weakref.ref(of, functools.partial(self._entries.pop, id(of))), value

    def get(self, of: Any) -> V | None:
        """Returns the value of an object; None if it has none."""
        _, value = self._entries.get(id(of), (None, None))
        return value

    def __getitem__(self, of: Any) -> V:
        return self._entries[id(of)][1]

    def __setitem__(self, of: Any, value: V) -> None:
        self._entries[id(of)] = self._entry(of, value)

    def setdefault(self, of: Any, value: V) -> V:
        """Returns the value of an object, which becomes `value` if it has none."""
        return self._entries.setdefault(id(of), self._entry(of, value))[1]
