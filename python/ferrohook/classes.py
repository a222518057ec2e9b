"""Classes made for one module: subclasses of what it gets and of the class that it has."""

from __future__ import annotations

import weakref
from abc import ABCMeta
from typing import Any

# Keys are the ids of the two bases, which live as long as the class that is the value.
_MADE: weakref.WeakValueDictionary[tuple[int, int], type] = weakref.WeakValueDictionary()


def common_subclass(name: str, base: type, plain: type, namespace: dict[str, Any]) -> type:
    """The subclass of `base` and `plain`: one and the same for as long as it is used.

    Args:
        name: of the class.
        base: what the module gets; it comes first. Its `__init_subclass__` should keep the classes
            made here, which have a `_made_from`, from that of `plain`: they are none of the
            subclasses that a module's class counts or checks. Its metaclass does not hear of them
            either.
        plain: the class that the module has.
        namespace: of the class.

    Raises:
        TypeError: Python cannot derive one class from both.
    """
    key = id(base), id(plain)
    made = _MADE.get(key)
    if made is None:
        namespace = {"__slots__": (), "_made_from": (base, plain), **namespace}
        # Past the `__new__` and `__init__` of a metaclass of the user's.
        metaclass: Any = type(plain)
        make = ABCMeta.__new__ if issubclass(metaclass, ABCMeta) else type.__new__
        made = _MADE.setdefault(key, make(metaclass, name, (base, plain), namespace))
    return made


def plain_class(cls: type) -> Any:
    """The class that a module had before one was made for it; `cls` itself for others."""
    _, plain = getattr(cls, "_made_from", (None, cls))
    return plain
