"""Generated classes: common subclasses of a base of ours and a module's plain class."""

from __future__ import annotations

import copyreg
import sys
from abc import ABCMeta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

from torch import fx

from ferrohook._core import generated_class

if TYPE_CHECKING:
    from collections.abc import Callable

_DYNAMO = "torch._dynamo"
_namespace = vars(type)["__dict__"].__get__
# A graph is compiled for the class that a module has while hooks are open, and again if that class
# was collected in between. Classes that cannot be imported again may go, with their generated ones.
_KEPT: list[type] = []


def common_subclass(
    name: str,
    base: type,
    plain: type,
    members: Callable[[], dict[str, Any]],
    *,
    in_place: bool = False,
) -> type:
    """Returns the subclass of `base` and `plain`, the same object while anything refers to it.

    For a `plain` that can be imported, the same until the process ends.

    It equals `plain`, unless that has a metaclass.

    Args:
        name: name of the class.
        base: class that comes first. A generated class has a `_made_from`. The `__init_subclass__`
            of `base` must not call the one of `plain` for it, as modules' classes count or check
            their subclasses. The `__new__` and `__init__` of the metaclass are not called either.
        plain: the module's own class.
        members: makes the namespace of the class.
        in_place: make a class that instances of `plain` can be assigned. Puts `base` last if their
            memory layout requires it.

    Raises:
        TypeError: Python cannot derive one class from both.
    """
    made = generated_class(base, plain)
    if made is None:
        namespace = {"__slots__": (), "_made_from": (base, plain), **members()}
        metaclass = type(plain)
        if metaclass is type:
            metaclass = StandsForPlain if in_place else EqualToPlain
        elif not issubclass(metaclass, WritesToPlain):
            metaclass = _writing_to_plain(metaclass)
            # The table never lets a metaclass go, so it gets none whose classes may go.
            if stays(plain):
                copyreg.pickle(cast("Any", metaclass), _reduced)
        made = _make_class(metaclass, name, (base, plain), namespace)
        # `class Mine(ABC, nn.Module)` has another layout than a class with an nn.Module first.
        if (
            in_place
            and _solid_base(made) is not _solid_base(plain)
            and _has_default_init_subclass(plain)
        ):
            made = _make_class(metaclass, name, (plain, base), namespace)
        made = cast("type", generated_class(base, plain, made))
        if stays(plain):
            _KEPT.append(made)
    return made


def stays(plain: type) -> bool:
    """Returns True if a class can be imported, as pickle does: it outlives every instance."""
    found: Any = sys.modules.get(plain.__module__)
    for name in plain.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is plain


def _make_class(
    metaclass: Any, name: str, bases: tuple[type, type], namespace: dict[str, Any]
) -> Any:
    # Bypasses the `__new__` and `__init__` of a custom metaclass.
    make = ABCMeta.__new__ if issubclass(metaclass, ABCMeta) else type.__new__
    return make(metaclass, name, bases, dict(namespace))


class WritesToPlain(type):
    """Metaclass of generated classes whose attributes are written to their plain class.

    Writes of a module to `type(self)` are for all modules of its class. Special methods stay the
    generated class's own.
    """

    def __init_subclass__(cls) -> None:
        """Shadows the `__init_subclass__` of a custom metaclass, see `_writing_to_plain`."""

    # A patch finds the value that it replaces in the `__dict__` of a class. To undo it, it writes
    # this value to the class, or deletes a name that was not there. Dynamo gets the real namespace,
    # which its guards read; it evaluates their sources in a scope without `__name__`.
    @property  # type: ignore[misc]
    def __dict__(cls) -> Any:  # type: ignore[override]
        own, plain = _namespace(cls), _plain_if_made(cls)
        caller = _module_of_caller()
        if plain is cls or not caller or caller.startswith(_DYNAMO):
            return own
        # Copies, as another thread may write to the classes meanwhile.
        return MappingProxyType(
            {name: value for name, value in own.copy().items() if name.startswith("__")}
            | {name: it for name, it in vars(plain).copy().items() if not name.startswith("__")}
        )

    def __setattr__(cls, name: str, value: Any) -> None:
        plain = _plain_if_made(cls)
        # `ABCMeta.__new__` writes `_abc_impl`.
        if plain is cls or name.startswith("__") or name == "_abc_impl":
            super().__setattr__(name, value)
        else:
            setattr(plain, name, value)

    def __delattr__(cls, name: str) -> None:
        plain = _plain_if_made(cls)
        if plain is cls or (name.startswith("__") and name in _namespace(cls)):
            super().__delattr__(name)
        else:
            delattr(plain, name)


def _writing_to_plain(metaclass: type) -> Any:
    """Derives the metaclass of generated classes from the one of their plain classes."""
    bases = (WritesToPlain, metaclass)
    subclasses: list[type] = type.__subclasses__(metaclass)
    known = [each for each in subclasses if each.__bases__ == bases]
    return known[0] if known else type(metaclass.__name__, bases, {})


class EqualToPlain(WritesToPlain):
    """Metaclass of generated classes that equal their plain class and have its hash.

    Libraries look up rules by exact type (captum's DeepLift and LRP, torch's quantisation):
    `rules[type(module)]` finds the plain module's rule. `type(module) is cls` still differs.
    """

    def __eq__(cls, other: object) -> Any:
        # A subclass of a generated class equals only itself. And Dynamo resolves `super()` by
        # equality in an MRO, which has both classes.
        plain = _plain_if_made(cls)
        if plain is cls or _module_of_caller().startswith(_DYNAMO):
            return NotImplemented
        return cls is other or plain == other

    def __hash__(cls) -> int:
        plain = _plain_if_made(cls)
        return super().__hash__() if plain is cls else hash(plain)


class StandsForPlain(EqualToPlain):
    """Metaclass of generated classes that instances of their plain class are assigned.

    Instances and subclasses of the plain class also count as the generated class's: an unpickled
    module is of its plain class.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        plain = _plain_if_made(cls)
        return type.__instancecheck__(cls if plain is cls else plain, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        plain = _plain_if_made(cls)
        return type.__subclasscheck__(cls if plain is cls else plain, subclass)


def _reduced(cls: type) -> Any:
    """Has a generated class pickled as its plain class, which loads without ferrohook."""
    plain = _plain_if_made(cls)
    return cls.__qualname__ if plain is cls else (cast, (None, plain))


copyreg.pickle(cast("Any", EqualToPlain), _reduced)
copyreg.pickle(cast("Any", StandsForPlain), _reduced)


def _solid_base(cls: type) -> type:
    """Returns the base that sets the memory layout of `cls` (CPython's solid base)."""
    sizes = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")
    base = cls.__base__
    if base is not None and all(getattr(cls, size) == getattr(base, size) for size in sizes):
        return _solid_base(base)
    return cls


def _has_default_init_subclass(cls: type) -> bool:
    definer = next(base for base in cls.__mro__ if "__init_subclass__" in vars(base))
    return definer in {object, Generic, Protocol}


def writers_of_class(cls: type) -> list[str]:
    """Lists the methods of a class that write to `type(self)`."""
    names = ("recompile", "_real_recompile") if issubclass(cls, fx.GraphModule) else ()
    return [name for name in names if hasattr(cls, name)]


def is_generated(cls: type) -> bool:
    """Returns True for a generated class, False for its subclasses."""
    return "_made_from" in _namespace(cls)


def _plain_if_made(cls: type) -> Any:
    """Returns the plain class of a generated one; a subclass of a generated class for itself."""
    _, plain = _namespace(cls).get("_made_from", (None, cls))
    return plain


def _module_of_caller() -> str:
    """Returns the name of the module whose function calls the method that calls this."""
    caller = sys._getframe(1).f_back
    return "" if caller is None else caller.f_globals.get("__name__", "")


def plain_class(cls: type) -> Any:
    """Returns the plain class of a generated one; `cls` itself for any other class."""
    _, plain = getattr(cls, "_made_from", (None, cls))
    return plain
