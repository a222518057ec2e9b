"""Transparent wrappers: modules that share their `__dict__` with the module inside."""

# Where no common subclass can be generated (another memory layout by `__slots__`, a ScriptModule,
# a module that has one of the wrapper's own names) the wrapper has its plain class and forwards
# attributes. A method of the module then runs on the module inside: `self(...)` in it runs no
# hooks, and under `torch.compile` a hook's `isinstance(module, ThatClass)` is false. `modules()`
# and `named_modules()` stay the wrapper's own, because the parent holds the wrapper.

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast

from torch import jit, nn

from ferrohook.attach.classes import common_subclass, is_generated, plain_class, writers_of_class
from ferrohook.attach.hook_info import shown_forward_hooks
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable


class TransparentWrapper(nn.Module):
    """Wrapper whose `__dict__` is the `__dict__` of the module inside.

    Its class is generated: a subclass of the wrapper's class and of the module's, so `isinstance`
    holds and methods of the module's class run with the wrapper as `self`. Methods of `nn.Module`,
    which modules override, run on the module inside.

    Subclasses store the module in a slot and call `_share`; set their `_own_names` after the class
    statement.
    """

    __slots__ = ()

    _own_names: ClassVar[frozenset[str]] = frozenset()
    """Names that the wrapper adds to the names of `nn.Module`."""

    _own_slots: ClassVar[tuple[str, ...]] = ()
    """Attributes of the wrapper that are not the module's."""

    def __new__(cls, module: object = None, *_args: Any, **_kwargs: Any) -> Self:  # noqa: D102
        return super().__new__(cast("type[Self]", class_around(cls, module)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if not is_generated(cls):
            super().__init_subclass__(**kwargs)

    @property
    def inner(self) -> Any:
        """The wrapped module.

        Raises:
            HookError: `into_inner` released it.
        """
        raise NotImplementedError

    def _share(self, module: nn.Module | None) -> None:
        """Makes the `__dict__` of a module the wrapper's; an empty one for None."""
        object.__setattr__(self, "__dict__", {} if module is None else module.__dict__)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride] (the module's, signature included)
        """The module's own `forward`; as in PyTorch, it runs no hooks."""
        return cast("Callable[..., Any]", self.inner.forward)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (set by __setattr__)
        """The class of the module inside.

        `isinstance(hooked, nn.Linear)` and `isinstance(hooked, HookedModule)` both hold. Assigning
        it (parametrize, FSDP2) changes the class of the module inside.
        """
        try:
            return self.inner.__class__
        except HookError:
            return wrapper_class(self)

    _forward_hooks: Any = property(shown_forward_hooks)

    def __prepare_scriptable__(self) -> NoReturn:
        msg = "torch.jit.script cannot compile hooks: script the module inside, hooked.inner"
        raise HookError(msg)

    def __getattr__(self, name: str) -> Any:
        # Called if neither the shared __dict__ nor nn.Module has the name.
        if name == "__signature__":  # a call in C has none
            return inspect.signature(self.inner)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own_slots:
            object.__setattr__(self, name, value)
        # `HookedModule[nn.Linear](module)` sets `__orig_class__`, which is not the module's.
        elif name != "__orig_class__":
            setattr(self.inner, name, value)
            if name == "__dict__":
                self._share(self.inner)

    def __delattr__(self, name: str) -> None:
        if name in self._own_slots:
            object.__delattr__(self, name)
        else:
            delattr(self.inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.inner)})

    def _shown(self, name: str, what: str, listed: str) -> str:
        """Formats the repr of a wrapper."""
        try:
            inner = repr(self.inner).replace("\n", "\n  ")
        except HookError:
            return f"{name}(<given back>)"
        return f"{name}(\n  (inner): {inner}\n  ({what}): {listed or 'none'}\n)"


def wrapper_class(wrapper: TransparentWrapper) -> type:
    """Returns the wrapper's own class, without the module's."""
    cls, *_ = getattr(type(wrapper), "_made_from", (type(wrapper),))
    return cast("type", cls)


def own_names(wrapper: type[TransparentWrapper]) -> frozenset[str]:
    """Returns the names that a wrapper adds; a module that has one gets no combined class."""
    names = {name for name in dir(wrapper) if not name.startswith("__")}
    return frozenset(names - {*dir(nn.Module())})


def class_around(wrapper: type[TransparentWrapper], module: object) -> type[TransparentWrapper]:
    """Returns the class for a `wrapper` around `module`: a subclass of both, if one can be made."""
    cls = type(module)
    if issubclass(cls, wrapper):
        return cls
    wrapped = issubclass(cls, TransparentWrapper)
    if not wrapped:
        cls = plain_class(cls)
    # The metaclass of ScriptModules compiles each subclass. And a method of a module that uses a
    # name of the wrapper's would find the wrapper's attribute.
    if (
        not isinstance(module, nn.Module)
        or issubclass(cls, jit.ScriptModule)
        or not (wrapped or wrapper._own_names.isdisjoint(dir(module)))
    ):
        return wrapper

    return combined_class(wrapper, cls)


def combined_class(wrapper: type[TransparentWrapper], cls: type) -> type[TransparentWrapper]:
    """Returns the subclass of a wrapper's class and a module's; the former if impossible."""

    def members() -> dict[str, Any]:
        own = writers_of_class(cls)
        # The module's finaliser would run when its wrapper goes.
        finaliser = getattr(wrapper, "__del__", lambda _self: None)
        return {
            **({"__del__": finaliser} if hasattr(cls, "__del__") else {}),
            "__module__": wrapper.__module__,
            "__doc__": wrapper.__doc__,
            **{name: _delegate(name) for name in own},
        }

    try:
        return common_subclass(wrapper.__name__, wrapper, cls, members)
    except TypeError:  # incompatible layout (__slots__) or MRO: the wrapper delegates attributes
        return wrapper


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: TransparentWrapper, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.inner, name)(*args, **kwargs)
        return self if result is self.inner else result

    method.__name__ = name
    method.__qualname__ = f"TransparentWrapper.{name}"
    method.__doc__ = f"`{name}` of the module inside."
    return method


# Modules override methods of nn.Module (an LSTM `_apply`, a quantised module `state_dict`): these
# run on the module inside. Not methods that yield the module: a parent's tree has the wrapper.
_NOT_DELEGATED = {"modules", "named_modules", "_call_impl", "_wrapped_call_impl"}
for _name in [name for name, value in vars(nn.Module).items() if callable(value)]:
    if not _name.startswith("__") and _name not in _NOT_DELEGATED | {*vars(TransparentWrapper)}:
        setattr(TransparentWrapper, _name, _delegate(_name))
