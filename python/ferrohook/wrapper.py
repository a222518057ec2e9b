"""Transparent wrappers: modules that share everything with the module inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast

from torch import jit, nn

from ferrohook.classes import common_subclass, plain_class
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable


class TransparentWrapper(nn.Module):
    """A wrapper whose `__dict__` is that of the module inside.

    Its class is made for the occasion: a subclass of the wrapper's class and of the module's, so
    that `isinstance` holds and methods of the module's class run with the wrapper as `self`.
    Methods of `nn.Module`, which modules override, run on the module inside.

    Subclasses keep the module in a slot and call `_share`; their `_own_names` are set behind them.
    """

    __slots__ = ()

    _own_names: ClassVar[frozenset[str]] = frozenset()
    """The names that a wrapper has beside those of `nn.Module`."""

    _own_slots: ClassVar[tuple[str, ...]] = ()
    """The attributes that are the wrapper's, and not the module's."""

    def __new__(cls, module: object = None, *_args: Any, **_kwargs: Any) -> Self:  # noqa: D102
        return super().__new__(cast("type[Self]", class_around(cls, module)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_made_from" not in vars(cls):
            super().__init_subclass__(**kwargs)

    @property
    def inner(self) -> Any:
        """The wrapped module.

        Raises:
            HookError: it was given back by `into_inner`.
        """
        raise NotImplementedError

    def _share(self, module: nn.Module | None) -> None:
        """Takes over the `__dict__` of a module; none is left with None."""
        object.__setattr__(self, "__dict__", {} if module is None else module.__dict__)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride] (the module's, signature included)
        """The module's own `forward`: runs no hooks, as PyTorch's users expect."""
        return cast("Callable[..., Any]", self.inner.forward)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (set by __setattr__)
        """The class of the module inside.

        `isinstance(hooked, nn.Linear)` holds beside `isinstance(hooked, HookedModule)`, and what
        changes a module's class (parametrize, FSDP2) changes that of the module inside.
        """
        try:
            return self.inner.__class__
        except HookError:
            return wrapper_class(self)

    def __prepare_scriptable__(self) -> NoReturn:
        msg = "torch.jit.script cannot compile hooks: script the module inside, hooked.inner"
        raise HookError(msg)

    def __getattr__(self, name: str) -> Any:
        # Reached when neither the shared __dict__ nor nn.Module knows the name.
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own_slots:
            object.__setattr__(self, name, value)
        # What `HookedModule[nn.Linear](module)` leaves is nothing that the module should keep.
        elif name != "__orig_class__":
            setattr(self.inner, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._own_slots:
            object.__delattr__(self, name)
        else:
            delattr(self.inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.inner)})

    def _shown(self, name: str, what: str, listed: str) -> str:
        """The `repr` of a wrapper."""
        try:
            inner = repr(self.inner).replace("\n", "\n  ")
        except HookError:
            return f"{name}(<given back>)"
        return f"{name}(\n  (inner): {inner}\n  ({what}): {listed or 'none'}\n)"


def wrapper_class(wrapper: TransparentWrapper) -> type:
    """The class of a wrapper without that of the module inside."""
    cls, *_ = getattr(type(wrapper), "_made_from", (type(wrapper),))
    return cast("type", cls)


def own_names(wrapper: type[TransparentWrapper]) -> frozenset[str]:
    """The names that modules are not to have whose class is combined with a wrapper's."""
    names = {name for name in dir(wrapper) if not name.startswith("__")}
    return frozenset(names - {*dir(nn.Module)})


def class_around(wrapper: type[TransparentWrapper], module: object) -> type[TransparentWrapper]:
    """The class of a `wrapper` around `module`: where possible a subclass of both classes."""
    cls = type(module)
    if issubclass(cls, wrapper):
        return cls
    wrapped = issubclass(cls, TransparentWrapper)
    if not wrapped:
        cls = plain_class(cls)
    # The metaclass of ScriptModules compiles whatever is derived from them. And methods of a module
    # with names that are the wrapper's too would find the wrapper's.
    if (
        not isinstance(module, nn.Module)
        or issubclass(cls, jit.ScriptModule)
        or not (wrapped or wrapper._own_names.isdisjoint(dir(module)))
    ):
        return wrapper

    def members() -> dict[str, Any]:
        return {"__module__": wrapper.__module__, "__doc__": wrapper.__doc__}

    try:
        return common_subclass(wrapper.__name__, wrapper, cls, members)
    except TypeError:  # another layout (__slots__) or order of bases: attributes are passed on
        return wrapper


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: TransparentWrapper, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.inner, name)(*args, **kwargs)
        return self if result is self.inner else result

    method.__name__ = name
    method.__qualname__ = f"TransparentWrapper.{name}"
    method.__doc__ = f"`{name}` of the module inside."
    return method


# Modules override methods of nn.Module (an LSTM `_apply`, a quantised module `state_dict`): all but
# those that yield the module itself run on the module inside. Parents find the wrapper in the tree.
_OWN = {"modules", "named_modules", "_call_impl", "_wrapped_call_impl"}
for _name in [name for name, value in vars(nn.Module).items() if callable(value)]:
    if not _name.startswith("__") and _name not in _OWN | {*vars(TransparentWrapper)}:
        setattr(TransparentWrapper, _name, _delegate(_name))
