"""`instrument`: installs the Rust dispatcher in modules of a model, in place and reversibly."""

# `type(module)` becomes a subclass of the module's class with the same layout, generated once for
# each class (`classes.py`). `__class__` names the plain class, and assigning it (parametrize,
# FSDP2) changes the plain one underneath. Calls of `instrument`, `register` and `capture` are
# counted; the last to leave gives the module back. docs/decisions.md says why the class changes,
# and not `nn.Module.__call__`.

from __future__ import annotations

import contextlib
import contextvars
import copy
import copyreg
import functools
import inspect
import sys
import types
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import fx, jit, nn
from torch.utils.hooks import RemovableHandle

import ferrohook.attach.checkpointing as _checkpointing  # noqa: F401 (replaces torch's functions)
from ferrohook._core import (
    Attachment,
    AttachmentContext,
    CallCache,
    Dispatcher,
    HookedBase,
    HookHandle,
    Registry,
    assign_class,
    keeps_state_in_torch_hooks,
    put_on,
    release_copy,
    take_off,
)
from ferrohook.attach.attention import KEY as _POINTS
from ferrohook.attach.attention import hold, is_point
from ferrohook.attach.classes import common_subclass, is_generated, plain_class, writers_of_class
from ferrohook.attach.hook_info import find_registry, shown_forward_hooks
from ferrohook.attach.swapping import carry
from ferrohook.attach.traced import trace_as, traced_dispatch
from ferrohook.errors import HookError, NotInstrumentedWarning, ReplacedWarning
from ferrohook.names.select import select as _select

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ferrohook.attach.attention import AttentionPoint
    from ferrohook.attach.swapping import PutOn
    from ferrohook.effects.typed import Phase
    from ferrohook.names.select import Selector

_KEY = Dispatcher.KEY
_CALL, _CALL_IMPL = Dispatcher.methods(nn.Module)
trace_as(_CALL, traced_dispatch(_CALL))
trace_as(_CALL_IMPL, traced_dispatch(_CALL_IMPL))
# `object`'s descriptor: `__class__` of an instrumented module returns the plain class.
_CLASS = vars(object)["__class__"]
# For code that pickles a module's `__dict__` directly.
copyreg.pickle(Dispatcher, lambda _: (type(None), ()))  # type: ignore[arg-type, return-value]


def _set_forward_hooks(module: nn.Module, hooks: Any) -> None:
    if _KEY not in vars(module):
        # Runs in `nn.Module.__init__` of an instance made by `type(module)(...)`.
        _CLASS.__set__(module, plain_class(type(module)))
    vars(module)["_forward_hooks"] = hooks


class Instrumented(nn.Module):
    """Mixin of the class of an instrumented module.

    Another thread may restore the module while a method runs, so none uses `super()`.
    """

    # Has nn.Module's memory layout, which assigning to a module's `__class__` requires.
    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if not is_generated(cls):
            super().__init_subclass__(**kwargs)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (set below)
        """The plain class, as if the module were not instrumented.

        Assigning it (parametrize, FSDP2) replaces the plain class and keeps the instrumentation.
        """
        return plain_class(type(self))

    @__class__.setter
    def __class__(self, plain: type) -> None:
        _assign_class(self, plain_class(plain))

    _forward_hooks: Any = property(
        shown_forward_hooks, _set_forward_hooks, lambda self: vars(self).pop("_forward_hooks")
    )

    def compile(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102 (nn.Module's docstring)
        # Compiles the module without the hooks of its registry, which run around the compiled call.
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
        reduced = _reduce(self, protocol)
        return reduced if isinstance(reduced, str) else _without_dispatcher(reduced)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(plain_class(type(self)), "__deepcopy__", None)
        return _copy_hooks(self, own(self, memo) if own else _reconstruct(self, memo), memo)

    def __copy__(self) -> Any:
        own = getattr(plain_class(type(self)), "__copy__", None)
        return _copy_hooks(self, own(self) if own else _reconstruct(self, None), None)


def _reduce(module: nn.Module, protocol: int) -> Any:
    """Reduces a module to one of its plain class (see `pickle`), dispatcher included."""
    reduced = plain_class(type(module)).__reduce_ex__(module, protocol)
    if isinstance(reduced, str):
        return reduced
    function, arguments, *rest = map(_plain, reduced)
    return function, tuple(map(_plain, arguments)), *rest


def _reconstruct(module: nn.Module, memo: dict[int, Any] | None) -> Any:
    reduced = _reduce(module, 4)
    if isinstance(reduced, str):
        return module
    return copy._reconstruct(module, memo, *reduced)  # type: ignore[attr-defined]


def _copy_hooks(original: nn.Module, copied: Any, memo: dict[int, Any] | None) -> Any:
    """Copies a module's hooks to a copy of it; without a memo, the copy shares them."""
    dispatcher: Dispatcher | None = vars(original).get(_KEY)
    if copied is original or not isinstance(copied, nn.Module):
        return copied
    vars(copied).pop(_POINTS, None)
    if dispatcher is None or not (
        # Instrumentation only for a scope, a capture or a recording is not copied.
        dispatcher.explicit or contextvars.Context().run(dispatcher.registry.list)
    ):
        vars(copied).pop(_KEY, None)
        _assign_class(copied, plain_class(type(copied)))
        return copied
    # A deep copy of the `__dict__` has put the dispatcher's copy into the memo.
    duplicate = copy.copy(dispatcher) if memo is None else copy.deepcopy(dispatcher, memo)
    vars(copied)[_KEY] = duplicate
    _assign_class(copied, plain_class(type(copied)))
    return copied


def _assign_class(module: nn.Module, plain: type[nn.Module]) -> None:
    """Changes the plain class of a module, instrumented or not."""
    if not assign_class(module, plain, None):
        assign_class(module, plain, _instrumented_class(plain))


_PHASES: dict[str, Phase] = {
    "register_forward_pre_hook": "forward_pre",
    "register_forward_hook": "forward",
    "register_full_backward_pre_hook": "backward_pre",
    "register_full_backward_hook": "backward",
    "register_backward_hook": "backward",
}


def _register_method(name: str, phase: Phase) -> Callable[..., HookHandle]:
    @functools.wraps(getattr(HookedBase, name))
    def register(self: nn.Module, hook: Any, *args: Any, **options: Any) -> HookHandle:
        dispatcher: Dispatcher | None = vars(self).get(_KEY)
        # A module that is instrumented only for a hook or a capture will be restored: hooks of
        # this method must outlive that, so they go into torch's dicts.
        if dispatcher is None or not dispatcher.explicit or keeps_state_in_torch_hooks(hook):
            return cast("HookHandle", getattr(nn.Module, name)(self, hook, *args, **options))
        handle = dispatcher.registry.register(phase, hook, *args, **options)
        if vars(self).get(_KEY) is not dispatcher:
            handle.remove()  # another thread restored the module and removed the other hooks
        return handle

    return register


for _name, _phase in _PHASES.items():
    setattr(Instrumented, _name, _register_method(_name, _phase))


def registry_of(module: nn.Module) -> Registry:
    """Returns the registry of a wrapper or an instrumented module.

    Raises:
        HookError: another thread restored the module.
    """
    registry = find_registry(module)
    if registry is None:
        msg = f"this {type(module).__name__} is no longer instrumented: its hooks were removed"
        raise HookError(msg)
    return registry


def _instrumented_class(plain: type[nn.Module]) -> Any:
    if plain._call_impl is not nn.Module._call_impl:
        msg = "its class overrides _call_impl"
        raise HookError(msg)
    members = functools.partial(_class_members, plain)
    try:
        return common_subclass(plain.__name__, Instrumented, plain, members, in_place=True)
    except TypeError as error:
        msg = f"its class cannot be changed: {error}"
        raise HookError(msg) from error


def _class_members(plain: type[nn.Module]) -> dict[str, Any]:
    mixin = vars(Instrumented)
    namespace = {name: value for name, value in mixin.items() if name not in _NOT_COPIED}
    namespace |= {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        # torch.jit.script compiles all properties but these.
        "__jit_unused_properties__": [
            *getattr(plain, "__jit_unused_properties__", ()),
            "_forward_hooks",
        ],
        "_call_impl": _CALL_IMPL,
        "_call_cache": CallCache(),
    }
    # A `__call__` or method that the class overrides stays; the former ends in `_call_impl`.
    if plain.__call__ is nn.Module.__call__:
        namespace["__call__"] = _CALL
    for name in (*_PHASES, "compile"):
        if getattr(plain, name) is not getattr(nn.Module, name):
            namespace[name] = inspect.getattr_static(plain, name)
    if issubclass(plain, fx.GraphModule):
        namespace |= {name: _on_plain_class(name) for name in writers_of_class(plain)}
        namespace["__new__"] = _new_graph_module
    return namespace


_NOT_COPIED = {"__slots__", "__init_subclass__", "__dict__", "__weakref__", "__annotations__"}


def _on_plain_class(name: str) -> Callable[..., Any]:
    """Makes a method that writes to the plain class, as the original writes to `type(self)`."""

    def method(self: Any, *args: Any) -> Any:
        plain = object.__new__(plain_class(type(self)))
        object.__setattr__(plain, "__dict__", vars(self))
        return getattr(plain, name)(*args)

    return method


def _new_graph_module(cls: type, *_args: Any, **_kwargs: Any) -> Any:
    # GraphModule derives a class for each instance: from the plain class, not from this one.
    plain = plain_class(cls)
    return plain.__new__(plain)


def _plain(value: Any) -> Any:
    return plain_class(value) if isinstance(value, type) else value


def _without_dispatcher(state: Any) -> Any:
    if isinstance(state, dict) and _KEY in state:
        return {key: value for key, value in state.items() if key not in {_KEY, _POINTS}}
    if type(state) is tuple:  # the state of a class with slots, or the arguments of a constructor
        return tuple(map(_without_dispatcher, state))
    return state


def make_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that `module` has while it is instrumented.

    Raises:
        HookError: the module cannot be instrumented.
    """
    if isinstance(module, jit.ScriptModule):
        msg = "TorchScript runs it outside of Python"
        raise HookError(msg)
    return cast("type[nn.Module]", _instrumented_class(plain_class(type(module))))


def _keep_class(kept: Collection[nn.Module], module: nn.Module) -> Any:
    """Returns the class that `module` gets, as `make_class`; the id of a hook if it keeps its own.

    Raises:
        HookError: the module cannot be instrumented.
    """
    made = make_class(module)
    if module not in kept:
        return made
    return RemovableHandle(module._forward_pre_hooks).id


@carry
def _carry_dispatcher(module: nn.Module) -> tuple[nn.Module, PutOn]:
    """Makes the replacement of an instrumented module take over its hooks and attachments."""
    keeps_class = plain_class(type(module)) is type(module)
    dispatcher = take_off(module)

    def put(module: nn.Module) -> nn.Module:
        if dispatcher is not None:
            made = functools.partial(_keep_class, {module}) if keeps_class else make_class
            try:
                put_on(module, dispatcher, made)
            except HookError as error:
                msg = f"the hooks of a module that quantisation replaced will not fire: {error}"
                warnings.warn(msg, ReplacedWarning, stacklevel=5)
        return module

    return module, put


def attach(
    modules: dict[str, nn.Module],
    attachment: Attachment,
    *,
    skip: bool = False,
    explicit: bool = False,
    kept: Collection[nn.Module] = (),
) -> None:
    """Instruments modules, all of them or none, until an attachment is released.

    Args:
        modules: modules by name. Wrappers are skipped: they have registries already.
        attachment: owner of the instrumentation; released on failure.
        skip: skip modules that cannot be instrumented, with a warning, unless none can.
        explicit: true for a call of `instrument`, false for a hook or a capture.
        kept: modules that keep their class.

    Raises:
        HookError: a module cannot be instrumented; names each such module and the reason.
    """
    names = [*modules]
    try:
        made = functools.partial(_keep_class, kept) if kept else make_class
        found = attachment.instrument([*modules.values()], made, explicit)
        refused = {names[place]: error for place, error in found}
        if refused:
            reasons = "; ".join(
                f"{name or 'the model itself'} ({type(modules[name]).__name__}): {error}"
                for name, error in refused.items()
            )
            if not (skip and len(refused) < len(modules)):
                msg = f"cannot be instrumented: {reasons}"
                raise HookError(msg) from next(iter(refused.values()))  # noqa: TRY301
            warnings.warn(f"not instrumented: {reasons}", NotInstrumentedWarning, stacklevel=3)
        _attach_points(modules, attachment)
    except BaseException:  # a warning may be raised as an error
        attachment.release()
        raise


def _attach_points(modules: dict[str, nn.Module], attachment: Attachment) -> None:
    """Makes tensors pass the points among modules that an attachment instruments.

    Raises:
        HookError: an attention module cannot be instrumented.
    """
    points = [cast("AttentionPoint", each) for each in filter(is_point, modules.values())]
    if not points:
        return
    owners = {id(each.points): each.points.module for each in points}
    for _, error in attachment.instrument([*owners.values()], make_class, explicit=False):
        raise error
    for point in points:
        hold(point)


class Instrumentation(AttachmentContext):
    """Result of one call of `instrument`; undoes it.

    A context manager: leaving it restores the modules.
    """

    def _track(self, model: nn.Module) -> None:
        """Makes this findable by `restore(model)`."""
        # A weak reference keeps no model alive, and drops the entry before the id is reused.
        forget = functools.partial(_forget, _INSTRUMENTATIONS, id(model))
        self._model = weakref.ref(model, forget)
        # Each step is atomic, as a lock would be held while a finaliser runs.
        tracked = _INSTRUMENTATIONS.setdefault(id(model), [])
        for each in [each for each in tracked if each.attachment.released]:
            with contextlib.suppress(ValueError):  # another thread removed it
                tracked.remove(each)
        tracked.append(self)

    def restore(self) -> None:
        """Restores the modules, once; modules that nothing else instruments lose their hooks."""
        self.attachment.release()

    def __repr__(self) -> str:
        model = self._model() if "_model" in vars(self) else None
        title = "a model that is gone" if model is None else model._get_name()
        return (
            f"<Instrumentation of {title}, {'restored' if self.attachment.released else 'active'}>"
        )

    def __reduce__(self) -> Any:
        # A copy instruments nothing.
        return type(self), ()


# By the id of the model, the latest last; some may be released already.
_INSTRUMENTATIONS: dict[int, list[Instrumentation]] = {}


# The dict is an argument: globals may be gone at interpreter exit.
def _forget(tracked: dict[int, list[Instrumentation]], key: int, _model: object) -> None:
    tracked.pop(key, None)


def instrument(
    model: nn.Module, select: Selector = None, *, keep_class: Selector | Literal[False] = False
) -> Instrumentation:
    """Installs the Rust dispatcher in modules of a model, in place and reversibly.

    An instrumented module has the same identity, `isinstance`, name, repr, `state_dict` and
    attributes, and is saved as the plain module. Its `register_*` methods follow PyTorch's
    contract on the Rust registry, with `priority`, `on_error` and `scope` as extra keywords. Hooks
    in torch's own dicts still run, first in each phase, whenever they were added. Hooks of
    `torch.nn.utils` are registered in torch's dicts.

    Calls are counted: a module is restored when the last `instrument` of it is undone.

    Args:
        model: any module.
        select: modules to instrument, see `select`; None for all, the model included. With None,
            modules that cannot be instrumented (TorchScript) are skipped with a
            `NotInstrumentedWarning`.
        keep_class: modules among them that keep their class, see `select`: for code that asks
            `type(module) is ...`. Their calls go through `nn.Module.__call__`, at its cost; they
            break a graph, and one that was compiled before does not see them; copies have no hooks;
            calls after `module.compile()` raise if they have hooks to run. Without the GIL it is
            refused.

    Returns:
        A context manager that restores; see also `restore`.

    Raises:
        SelectionError: `select` or `keep_class` matches nothing.
        HookError: a selected module cannot be instrumented, one of `keep_class` is compiled or has
            another class already, or there is no GIL for `keep_class`. Then no module was
            instrumented.

    Examples:
        >>> with fh.instrument(model):
        ...     handle = model.layers[3].mlp.register_forward_hook(steer)
        ...     model(ids)
    """
    modules = _select(model, select)
    kept = {} if keep_class is False else _select(model, keep_class)
    if kept and not getattr(sys, "_is_gil_enabled", lambda: True)():
        msg = (
            "keep_class writes to torch's own entries of a module, which other threads read while "
            "they call it: without the GIL such a call fails. Leave keep_class out, or start "
            "Python with PYTHON_GIL=1"
        )
        raise HookError(msg)
    for name, module in kept.items():
        if plain_class(type(module)) is not type(module):
            msg = f"{name!r} is already instrumented with another class: restore it first"
            raise HookError(msg)
        if find_registry(module) is None and module._compiled_call_impl is not None:
            msg = (
                f"{name!r} was compiled with its compile() method, which uses the slot that "
                "keep_class needs"
            )
            raise HookError(msg)
    instrumentation = Instrumentation()
    try:
        attach(
            modules | kept,
            instrumentation.attachment,
            skip=select is None,
            explicit=True,
            kept={*kept.values()},
        )
        instrumentation._track(model)
    except BaseException:
        instrumentation.attachment.release()
        raise
    return instrumentation


def restore(model: nn.Module) -> None:
    """Undoes the latest `instrument(model)` that is still active.

    A deep copy of an instrumented model counts as instrumented once.

    Hooks that were registered without `instrument` stay: `clear` removes them.

    Raises:
        HookError: the model is not instrumented.
    """
    latest_first = reversed([*_INSTRUMENTATIONS.get(id(model), ())])
    if any(each.attachment.release() for each in latest_first):
        return
    # The list makes `any` release every module, not only the first.
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    if not any([*map(release_copy, modules)]):
        msg = f"this {type(model).__name__} is not instrumented: call instrument before restore"
        registries = filter(None, map(find_registry, modules))
        if count := sum(len(registry.global_hooks()) for registry in registries):
            msg += (
                f". It has {count} global hook{'s'[: count != 1]}: "
                "fh.hooks(model) lists them with their lines, fh.clear(model) removes them"
            )
        raise HookError(msg)


def _warm_up() -> None:
    """Hooks and calls a module, so that a fork finds the values of the process made.

    The extension makes each at its first use, and lets go of the GIL meanwhile. The child of a fork
    at that moment would wait for ever.
    """
    module, attachment = nn.Identity(), Attachment()
    try:
        attachment.instrument([module], make_class, explicit=True)
        attachment.register([module], "forward", lambda *_: None, names=[""])
        module(None)
    finally:
        attachment.release()


_warm_up()
