"""Classes made for one module: subclasses of what it gets and of the class that it has."""

from __future__ import annotations

import sys
import weakref
from abc import ABCMeta
from typing import TYPE_CHECKING, Any, Generic, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_DYNAMO = "torch._dynamo"

# Keys are the ids of the two bases, which live as long as the class that is the value.
_MADE: weakref.WeakValueDictionary[tuple[int, int], type] = weakref.WeakValueDictionary()


def common_subclass(
    name: str,
    base: type,
    plain: type,
    members: Callable[[], dict[str, Any]],
    *,
    in_place: bool = False,
) -> type:
    """The subclass of `base` and `plain`: one and the same for as long as it is used.

    Args:
        name: of the class.
        base: what the module gets; it comes first. Its `__init_subclass__` should keep the classes
            made here, which have a `_made_from`, from that of `plain`: they are none of the
            subclasses that a module's class counts or checks. Its metaclass does not hear of them
            either.
        plain: the class that the module has.
        members: makes what the class has beside what its bases have.
        in_place: instances of `plain` have their class changed to this one, which equals `plain`.
            Where their layout demands that, `base` comes last.

    Raises:
        TypeError: Python cannot derive one class from both.
    """
    key = id(base), id(plain)
    made = _MADE.get(key)
    if made is None:
        namespace = {"__slots__": (), "_made_from": (base, plain), **members()}
        # A metaclass of the user's keeps its own notion of equality.
        metaclass = EqualToPlain if in_place and type(plain) is type else type(plain)
        made = _make(metaclass, name, (base, plain), namespace)
        # `class Mine(ABC, nn.Module)` has another layout than what begins with an nn.Module.
        if in_place and _layout(made) is not _layout(plain) and _hears_of_no_subclasses(plain):
            made = _make(metaclass, name, (plain, base), namespace)
        made = _MADE.setdefault(key, made)
    return made


def _make(metaclass: Any, name: str, bases: tuple[type, type], namespace: dict[str, Any]) -> Any:
    # Past the `__new__` and `__init__` of a metaclass of the user's.
    make = ABCMeta.__new__ if issubclass(metaclass, ABCMeta) else type.__new__
    return make(metaclass, name, bases, dict(namespace))


class EqualToPlain(type):
    """Metaclass of classes that equal the plain class they were made from, as dict keys too.

    Libraries keep rules by exact type (captum's DeepLift and LRP, torch's quantisation): what
    `rules[type(module)]` finds is what it finds for the plain module. `type(module) is cls` sees
    the difference still.
    """

    def __eq__(cls, other: object) -> Any:
        # A subclass of a made class is a class of its own. And Dynamo follows `super()` by looking
        # for a class in an MRO by equality, where both stand.
        _, plain = vars(cls).get("_made_from", (None, cls))
        if plain is cls or sys._getframe(1).f_globals.get("__name__", "").startswith(_DYNAMO):
            return NotImplemented
        return cls is other or plain == other

    def __hash__(cls) -> int:
        _, plain = vars(cls).get("_made_from", (None, cls))
        return super().__hash__() if plain is cls else hash(plain)


def _layout(cls: type) -> type:
    """The class that gave the instances of `cls` their layout in memory."""
    sizes = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")
    base = cls.__base__
    if base is not None and all(getattr(cls, size) == getattr(base, size) for size in sizes):
        return _layout(base)
    return cls


def _hears_of_no_subclasses(cls: type) -> bool:
    heard = next(base for base in cls.__mro__ if "__init_subclass__" in vars(base))
    return heard in {object, Generic, Protocol}


def plain_class(cls: type) -> Any:
    """The class that a module had before one was made for it; `cls` itself for others."""
    _, plain = getattr(cls, "_made_from", (None, cls))
    return plain
