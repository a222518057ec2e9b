"""`instrument`: gives the modules of a model the Rust dispatcher, in place and reversibly."""

from __future__ import annotations

import contextvars
import copy
import copyreg
import functools
import inspect
import sys
import threading
import types
import warnings
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, jit, nn
from torch.nn.modules import transformer

from ferrohook._core import (
    Attachment,
    AttachmentContext,
    CallCache,
    Dispatcher,
    HookedBase,
    HookHandle,
    Registry,
    assign_class,
    release_copy,
)
from ferrohook.classes import common_subclass, plain_class
from ferrohook.errors import HookError, NotInstrumentedWarning
from ferrohook.module import keeps_state_in_torch_hooks
from ferrohook.selection import select as _select
from ferrohook.traced import trace_as, traced_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.selection import Selector

_KEY = Dispatcher.KEY
_CALL, _CALL_IMPL = Dispatcher.methods(nn.Module)
trace_as(_CALL, traced_dispatch)
trace_as(_CALL_IMPL, traced_dispatch)
# `object`'s own: `__class__` of an instrumented module says the plain class.
_CLASS = vars(object)["__class__"]
# Where somebody saves a module's `__dict__` by himself.
copyreg.pickle(Dispatcher, lambda _: (type(None), ()))  # type: ignore[arg-type, return-value]


class Instrumented(nn.Module):
    """What the class of an instrumented module has beside that of the plain module.

    Another thread may give the module back while a method runs, so none uses `super()`.
    """

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
        _assign_class(self, plain_class(plain))

    @property
    def _forward_hooks(self) -> Any:
        """The module's own torch hooks.

        TransformerEncoderLayer's fast path calls no submodules. It is taken where none has
        torch hooks, and ours must keep it from being taken too.
        """
        hooks = vars(self)["_forward_hooks"]
        if (
            not torch.compiler.is_compiling()
            and sys._getframe(1).f_globals is vars(transformer)
            and _has_forward_hooks(self)
        ):
            return {**hooks, None: None}
        return hooks

    @_forward_hooks.setter
    def _forward_hooks(self, hooks: Any) -> None:
        if _KEY not in vars(self):
            # `nn.Module.__init__` of what somebody makes by `type(module)(...)`.
            _CLASS.__set__(self, plain_class(type(self)))
        vars(self)["_forward_hooks"] = hooks

    @_forward_hooks.deleter
    def _forward_hooks(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        del vars(self)["_forward_hooks"]

    def compile(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102 (that of nn.Module)
        # The module without its own hooks, which run around what was compiled.
        call_impl = types.MethodType(nn.Module._call_impl, self)
        self._compiled_call_impl = torch.compile(call_impl, *args, **kwargs)

    def __prepare_scriptable__(self) -> Any:
        registry = find_registry(self)
        if registry is not None and registry.list():
            msg = "torch.jit.script cannot compile hooks: remove them or restore the model first"
            raise HookError(msg)
        own = getattr(plain_class(type(self)), "__prepare_scriptable__", None)
        return self if own is None else own(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as the plain class; hooks are run-time state.
        reduced = _reduced(self, protocol)
        return reduced if isinstance(reduced, str) else _without_dispatcher(reduced)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(plain_class(type(self)), "__deepcopy__", None)
        return _as_copy(self, own(self, memo) if own else _reconstruct(self, memo), memo)

    def __copy__(self) -> Any:
        own = getattr(plain_class(type(self)), "__copy__", None)
        return _as_copy(self, own(self) if own else _reconstruct(self, None), None)


def _reduced(module: nn.Module, protocol: int) -> Any:
    """What the module is made of, dispatcher included, for one of its plain class."""
    reduced = plain_class(type(module)).__reduce_ex__(module, protocol)
    if isinstance(reduced, str):
        return reduced
    function, arguments, *rest = map(_plain, reduced)
    return function, tuple(map(_plain, arguments)), *rest


def _reconstruct(module: nn.Module, memo: dict[int, Any] | None) -> Any:
    reduced = _reduced(module, 4)
    if isinstance(reduced, str):
        return module
    return copy._reconstruct(module, memo, *reduced)  # type: ignore[attr-defined]


def _as_copy(original: nn.Module, copied: Any, memo: dict[int, Any] | None) -> Any:
    """Gives a copy of a module the hooks: copies of them, or (no memo) the hooks themselves."""
    dispatcher: Dispatcher | None = vars(original).get(_KEY)
    if copied is original or not isinstance(copied, nn.Module):
        return copied
    if dispatcher is None or not (
        # What a scope, a capture or recording wants of a module, it does not want of a copy.
        dispatcher.explicit or contextvars.Context().run(dispatcher.registry.list)
    ):
        vars(copied).pop(_KEY, None)
        _assign_class(copied, plain_class(type(copied)))
        return copied
    # From the memo, where the copy's `__dict__` was copied deeply.
    duplicate = copy.copy(dispatcher) if memo is None else copy.deepcopy(dispatcher, memo)
    vars(copied)[_KEY] = duplicate
    _assign_class(copied, plain_class(type(copied)))
    return copied


def _assign_class(module: nn.Module, plain: type[nn.Module]) -> None:
    """Gives a module another class, or what is made of it for instrumented modules."""
    if not assign_class(module, plain, None):
        assign_class(module, plain, _instrumented_class(plain))


_PHASES = {
    "register_forward_pre_hook": "forward_pre",
    "register_forward_hook": "forward",
    "register_full_backward_pre_hook": "backward_pre",
    "register_full_backward_hook": "backward",
    "register_backward_hook": "backward",
}


def _registering(name: str, phase: str) -> Callable[..., HookHandle]:
    @functools.wraps(getattr(HookedBase, name))
    def register(self: nn.Module, hook: Any, *args: Any, **options: Any) -> HookHandle:
        dispatcher: Dispatcher | None = vars(self).get(_KEY)
        # Instrumented for a hook or a capture alone, what PyTorch's method registers is to outlast
        # that.
        if dispatcher is None or not dispatcher.explicit or keeps_state_in_torch_hooks(hook):
            return cast("HookHandle", getattr(nn.Module, name)(self, hook, *args, **options))
        # PyTorch takes `prepend` by position in the methods for backward hooks.
        positional = dict(zip(("prepend",), args, strict=False))
        handle = dispatcher.registry.register(phase, hook, **positional, **options)
        if vars(self).get(_KEY) is not dispatcher:
            handle.remove()  # with the others, by another thread that restored meanwhile
        return handle

    return register


for _name, _phase in _PHASES.items():
    setattr(Instrumented, _name, _registering(_name, _phase))


def find_registry(module: nn.Module) -> Registry | None:
    """The hooks of a wrapper or of an instrumented module; None for a plain one."""
    if issubclass(type(module), HookedBase):
        return cast("HookedBase", module)._registry
    dispatcher = vars(module).get(_KEY)
    return None if dispatcher is None else dispatcher.registry


def registry_of(module: nn.Module) -> Registry:
    """The hooks of a module that is instrumented or wrapped.

    Raises:
        HookError: another thread gave it back.
    """
    registry = find_registry(module)
    if registry is None:
        msg = f"this {type(module).__name__} is no longer instrumented: its hooks were removed"
        raise HookError(msg)
    return registry


def _has_forward_hooks(module: nn.Module) -> bool:
    registry = find_registry(module)
    return registry is not None and bool(registry.hooked)


def _instrumented_class(plain: type[nn.Module]) -> Any:
    if plain._call_impl is not nn.Module._call_impl:
        msg = "its class overrides _call_impl"
        raise HookError(msg)
    members = functools.partial(_members, plain)
    try:
        return common_subclass(plain.__name__, Instrumented, plain, members, in_place=True)
    except TypeError as error:
        msg = f"its class cannot be changed: {error}"
        raise HookError(msg) from error


def _members(plain: type[nn.Module]) -> dict[str, Any]:
    namespace = {name: value for name, value in vars(Instrumented).items() if name not in _KEEP}
    namespace |= {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        # torch.jit.script compiles the others.
        "__jit_unused_properties__": [
            *getattr(plain, "__jit_unused_properties__", ()),
            "_forward_hooks",
        ],
        "_call_impl": _CALL_IMPL,
        "_call_cache": CallCache(),
    }
    # A `__call__` of the class's own comes to `_call_impl` in the end, where PyTorch's hooks are.
    if plain.__call__ is nn.Module.__call__:
        namespace["__call__"] = _CALL
    for name in (*_PHASES, "compile"):  # likewise
        if getattr(plain, name) is not getattr(nn.Module, name):
            namespace[name] = inspect.getattr_static(plain, name)
    if issubclass(plain, fx.GraphModule):
        for name in ("recompile", "_real_recompile"):
            if hasattr(plain, name):
                namespace[name] = _on_plain_class(name)
        namespace["__new__"] = _new_graph_module
    return namespace


_KEEP = {"__slots__", "__init_subclass__", "__dict__", "__weakref__", "__annotations__"}


def _on_plain_class(name: str) -> Callable[..., Any]:
    """A method that changes `type(self)`, which is to be the plain class."""

    def method(self: Any, *args: Any) -> Any:
        twin = object.__new__(plain_class(type(self)))
        object.__setattr__(twin, "__dict__", vars(self))
        return getattr(twin, name)(*args)

    return method


def _new_graph_module(cls: type, *_args: Any, **_kwargs: Any) -> Any:
    # Each gets a class of its own, derived from this one if that were not known for plain.
    plain = plain_class(cls)
    return plain.__new__(plain)


def _plain(value: Any) -> Any:
    return plain_class(value) if isinstance(value, type) else value


def _without_dispatcher(state: Any) -> Any:
    if isinstance(state, dict) and _KEY in state:
        return {key: value for key, value in state.items() if key != _KEY}
    if type(state) is tuple:  # with slots, or arguments
        return tuple(map(_without_dispatcher, state))
    return state


def make_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` once it is instrumented.

    Raises:
        HookError: it cannot be.
    """
    if isinstance(module, jit.ScriptModule):
        msg = "TorchScript runs it outside of Python"
        raise HookError(msg)
    return cast("type[nn.Module]", _instrumented_class(plain_class(type(module))))


def attach(
    modules: dict[str, nn.Module],
    attachment: Attachment,
    *,
    skip: bool = False,
    explicit: bool = False,
) -> None:
    """Instruments modules, all of them or none, until an attachment is released.

    Args:
        modules: by name. Those that have their hooks elsewhere (wrappers) are left out.
        attachment: what they are added to; released where this fails.
        skip: leave out those that cannot be instrumented, with a warning, unless none can.
        explicit: by a call of `instrument`, and not only for a hook or a capture.

    Raises:
        HookError: which could not be instrumented, and why.
    """
    names = [*modules]
    try:
        found = attachment.instrument([*modules.values()], make_class, explicit)
        refused = {names[place]: error for place, error in found}
        if refused:
            reasons = "; ".join(
                f"{name or 'the model itself'} ({type(modules[name]).__name__}): {error}"
                for name, error in refused.items()
            )
            if not (skip and len(refused) < len(modules)):
                msg = f"cannot be instrumented: {reasons}"
                raise HookError(msg) from next(iter(refused.values()))  # noqa: TRY301
            warnings.warn(f"left as they are: {reasons}", NotInstrumentedWarning, stacklevel=3)
    except BaseException:  # the warning may be one too
        attachment.release()
        raise


class Instrumentation(AttachmentContext):
    """What one call of `instrument` did, to be undone.

    A context manager: leaving it restores.
    """

    def _done_to(self, model: nn.Module) -> None:
        """Lets `restore(model)` find it."""
        # The models are not kept alive, and an id is not taken for that of a later model.
        self._model = weakref.ref(model, functools.partial(_forget, _DONE, id(model)))
        with _LOCK:
            before = [each for each in _DONE.get(id(model), ()) if not each.attachment.released]
            _DONE[id(model)] = [*before, self]

    def restore(self) -> None:
        """Undo it, once; modules that nothing else instruments lose their hooks."""
        self.attachment.release()

    def __reduce__(self) -> Any:
        # What was done was not done to a copy.
        return type(self), ()


# By the id of the model, the latest last; some may be undone since.
_LOCK = threading.RLock()
_DONE: dict[int, list[Instrumentation]] = {}


# Given the dict: at the interpreter's end the module has no variables any more.
def _forget(done: dict[int, list[Instrumentation]], key: int, _model: object) -> None:
    done.pop(key, None)


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
    modules = _select(model, select)
    done = Instrumentation()
    try:
        attach(modules, done.attachment, skip=select is None, explicit=True)
        done._done_to(model)
    except BaseException:
        done.attachment.release()
        raise
    return done


def restore(model: nn.Module) -> None:
    """Undoes the latest `instrument(model)` that was not undone.

    A deep copy of an instrumented model is instrumented too, once.

    Raises:
        HookError: there is none.
    """
    latest_first = reversed(_DONE.get(id(model), []))
    if any(done.attachment.release() for done in latest_first):
        return
    # All of them, not the first.
    if not (isinstance(model, nn.Module) and any([*map(release_copy, model.modules())])):
        msg = f"restore undoes instrument, and this {type(model).__name__} was not instrumented"
        raise HookError(msg)
