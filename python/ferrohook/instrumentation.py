"""`instrument`: gives the modules of a model the Rust dispatcher, in place and reversibly."""

from __future__ import annotations

import copy
import functools
import threading
import types
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import jit, nn

from ferrohook._core import Dispatcher, HookedBase, HookHandle, Registry
from ferrohook.classes import common_subclass, plain_class
from ferrohook.errors import HookError, NotInstrumentedWarning
from ferrohook.module import keeps_state_in_torch_hooks
from ferrohook.selection import select as _select
from ferrohook.traced import trace_as, traced_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrohook.selection import Selector

_KEY = Dispatcher.KEY
_CALL, _CALL_IMPL = Dispatcher.methods(nn.Module)
trace_as(_CALL, traced_dispatch)
trace_as(_CALL_IMPL, traced_dispatch)
# `object`'s own: `__class__` of an instrumented module says the plain class.
_CLASS = vars(object)["__class__"]
# One thread at a time changes classes. A finaliser may come in between, so each step stands alone.
_LOCK = threading.RLock()


class Instrumented(nn.Module):
    """What the class of an instrumented module has beside that of the plain module."""

    # Nothing of its own, and nn.Module's layout: a module's class can be changed to one with this.
    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_made_from" not in vars(cls):
            super().__init_subclass__(**kwargs)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (set below)
        """The plain class, as if the module was not instrumented.

        What changes a module's class (parametrize, FSDP2) changes the plain one.
        """
        return plain_class(type(self))

    @__class__.setter
    def __class__(self, plain: type) -> None:
        _CLASS.__set__(self, _instrumented_class(plain))

    def compile(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102 (that of nn.Module)
        # The module without its own hooks, which run around what was compiled.
        call_impl = types.MethodType(nn.Module._call_impl, self)
        self._compiled_call_impl = torch.compile(call_impl, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as the plain class; hooks are run-time state.
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = (_plain(each) for each in reduced)
        return function, tuple(_plain(each) for each in arguments), *map(_without_dispatcher, rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(super(), "__deepcopy__", None)
        if own is not None:
            return own(memo)
        return copy._reconstruct(self, memo, *super().__reduce_ex__(4))  # type: ignore[attr-defined]

    def __copy__(self) -> Any:
        own = getattr(super(), "__copy__", None)
        copied = own() if own else copy._reconstruct(self, None, *super().__reduce_ex__(4))  # type: ignore[attr-defined]
        registry = find_registry(copied)
        if registry is not None:
            # Both share the hooks, as copies of a plain module share its hook dicts.
            vars(copied)[_KEY] = Dispatcher(registry)
            vars(copied)[_KEY].hold()
        return copied


def _registering(name: str, phase: str) -> Callable[..., HookHandle]:
    @functools.wraps(getattr(HookedBase, name))
    def register(self: nn.Module, hook: Any, *args: Any, **options: Any) -> HookHandle:
        if keeps_state_in_torch_hooks(hook):
            plain = getattr(nn.Module, name)
            return cast("HookHandle", plain(self, hook, *args, **options))
        registry = find_registry(self)
        if registry is None:  # restored by another thread meanwhile
            return cast("HookHandle", getattr(nn.Module, name)(self, hook, *args, **options))
        # PyTorch takes `prepend` by position in the methods for backward hooks.
        return registry.register(
            phase, hook, **dict(zip(("prepend",), args, strict=False)), **options
        )

    return register


for _name, _phase in {
    "register_forward_pre_hook": "forward_pre",
    "register_forward_hook": "forward",
    "register_full_backward_pre_hook": "backward_pre",
    "register_full_backward_hook": "backward",
    "register_backward_hook": "backward",
}.items():
    setattr(Instrumented, _name, _registering(_name, _phase))


def find_registry(module: nn.Module) -> Registry | None:
    """The hooks of a wrapper or of an instrumented module; None for a plain one."""
    if issubclass(type(module), HookedBase):
        return cast("HookedBase", module)._registry
    dispatcher = vars(module).get(_KEY)
    return None if dispatcher is None else dispatcher.registry


def registry_of(module: nn.Module) -> Registry:
    """The hooks of a module that is held.

    Raises:
        HookError: another thread gave it back.
    """
    registry = find_registry(module)
    if registry is None:
        msg = f"this {type(module).__name__} is no longer instrumented: its hooks were removed"
        raise HookError(msg)
    return registry


def _instrumented_class(plain: type[nn.Module]) -> type:
    namespace = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_call_impl": _CALL_IMPL,
    }
    # A `__call__` of the class's own comes to `_call_impl` in the end, where PyTorch's hooks are.
    if plain.__call__ is nn.Module.__call__:
        namespace["__call__"] = _CALL
    return common_subclass(plain.__name__, Instrumented, plain, namespace)


def _plain(value: Any) -> Any:
    return plain_class(value) if isinstance(value, type) else value


def _without_dispatcher(state: Any) -> Any:
    if isinstance(state, dict) and _KEY in state:
        return {key: value for key, value in state.items() if key != _KEY}
    if isinstance(state, tuple):  # with slots
        return tuple(map(_without_dispatcher, state))
    return state


def hold(module: nn.Module) -> None:
    """Instrument one module, once more.

    Raises:
        HookError: that is impossible; the module is as it was.
    """
    cls = type(module)
    if issubclass(cls, HookedBase):
        return  # it has hooks of its own
    if isinstance(module, jit.ScriptModule):
        msg = "TorchScript runs it outside of Python"
        raise HookError(msg)
    if plain_class(cls)._call_impl is not nn.Module._call_impl:
        msg = "its class overrides _call_impl"
        raise HookError(msg)
    dispatcher = Dispatcher(Registry())
    with _LOCK:
        dispatcher = vars(module).setdefault(_KEY, dispatcher)
        try:
            if not issubclass(type(module), Instrumented):
                _CLASS.__set__(module, _instrumented_class(type(module)))
        except TypeError as error:
            del vars(module)[_KEY]
            msg = f"its class cannot be changed: {error}"
            raise HookError(msg) from error
        dispatcher.hold()


def release(module: nn.Module) -> None:
    """Undo one `hold`; the last one gives the module back as it was and removes its hooks."""
    if issubclass(type(module), HookedBase):
        return
    with _LOCK:
        dispatcher = vars(module).get(_KEY)
        if dispatcher is None or dispatcher.release():
            return
        if issubclass(type(module), Instrumented):
            _CLASS.__set__(module, plain_class(type(module)))
        vars(module).pop(_KEY, None)
    dispatcher.registry.clear()


def hold_all(modules: dict[str, nn.Module], *, skip: bool = False) -> list[nn.Module]:
    """Instrument these modules, or none of them.

    Args:
        modules: by name.
        skip: leave those out that cannot be instrumented, with a warning, unless none can.

    Returns:
        Those that were.

    Raises:
        HookError: which could not be instrumented, and why.
    """
    held: list[nn.Module] = []
    refused: dict[str, HookError] = {}
    for name, module in modules.items():
        try:
            hold(module)
        except HookError as error:
            refused[name] = error
        else:
            held.append(module)
    if refused:
        reasons = "; ".join(
            f"{name or 'the model itself'} ({type(modules[name]).__name__}): {error}"
            for name, error in refused.items()
        )
        if not (skip and held):
            for module in held:
                release(module)
            msg = f"cannot be instrumented: {reasons}"
            raise HookError(msg) from next(iter(refused.values()))
        warnings.warn(f"left as they are: {reasons}", NotInstrumentedWarning, stacklevel=3)
    return held


class Instrumentation:
    """What one call of `instrument` did, to be undone.

    A context manager: leaving it restores.
    """

    def __init__(self, model: nn.Module, held: Iterable[nn.Module]) -> None:
        self._key = id(model)
        # The models are not kept alive, and an id is not taken for that of a later model.
        self._model = weakref.ref(model, functools.partial(_forget, self._key))
        self._held = [weakref.ref(module) for module in held]
        _DONE.setdefault(self._key, []).append(self)

    def restore(self) -> None:
        """Undo it, once; modules that nothing else instruments lose their hooks."""
        with _LOCK:
            held, self._held = self._held, []
            done = _DONE.get(self._key, [])
            if self in done:
                done.remove(self)
            if not done:
                _DONE.pop(self._key, None)
        for reference in held:
            module = reference()
            if module is not None:
                release(module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()


# By the id of the model, the latest last.
_DONE: dict[int, list[Instrumentation]] = {}


def _forget(key: int, _model: object) -> None:
    _DONE.pop(key, None)


def instrument(model: nn.Module, select: Selector = None) -> Instrumentation:
    """Gives modules of a model the Rust dispatcher, in place and reversibly.

    An instrumented module keeps its identity, `isinstance`, name, repr, `state_dict` and
    attributes, and is saved as what it was. Its `register_*` methods are PyTorch's contract on the
    Rust registry, with `priority`, `on_error` and `scope` beside it. Hooks in torch's own dicts,
    those from before and those put there behind its back, go on working; of each phase they run
    first. `torch.nn.utils` finds its hooks in torch's dicts.

    Calls count: a module is given back when each `instrument` was undone.

    Args:
        model: any module.
        select: which of its modules, see `select`; None for all, itself included. Modules that
            cannot be instrumented (TorchScript) are then left as they are, with a
            `NotInstrumentedWarning`.

    Returns:
        A context manager that restores; see also `restore`.

    Raises:
        SelectionError: `select` matches nothing.
        HookError: a module that was asked for cannot be instrumented; none was.

    Examples:
        >>> with fh.instrument(model):
        ...     handle = model.layers[3].mlp.register_forward_hook(steer)
        ...     model(ids)
    """
    return Instrumentation(model, hold_all(_select(model, select), skip=select is None))


def restore(model: nn.Module) -> None:
    """Undoes the latest `instrument(model)` that was not undone.

    Raises:
        HookError: there is none.
    """
    done = _DONE.get(id(model))
    if not done:
        msg = f"restore undoes instrument, and this {type(model).__name__} was not instrumented"
        raise HookError(msg)
    done[-1].restore()
