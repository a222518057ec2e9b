"""`register`: a hook on modules of a model, by name."""

from __future__ import annotations

import copyreg
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ferrohook._core import (
    AttachmentContext,
    HookHandle,
    NativeDetector,
    Registry,
    TypedHook,
)
from ferrohook.attach.hook_info import state_of
from ferrohook.attach.instrument import attach
from ferrohook.attach.never_fired import SCOPE_IN_THREADS, explain, never_fired
from ferrohook.dictionaries.features import ONLY_IN_PLANS, Feature
from ferrohook.effects.routing import Replay, Route
from ferrohook.errors import HookTypeError, NeverFiredWarning, SelectionError
from ferrohook.names.places import hooks_at, modules_of
from ferrohook.quantity import hooked_places_of
from ferrohook.registration.scopes import scope_of
from ferrohook.tokens.positions import EVERYWHERE, check_at
from ferrohook.tokens.routes import check_route
from ferrohook.tokens.tracking import (
    Tracker,
    check_takes_at,
    masked,
    stacks_to_track,
    track,
    with_tokens_ahead,
)
from ferrohook.util.texts import counted, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from ferrohook.effects.intervention import Intervention
    from ferrohook.effects.typed import OnError, Phase
    from ferrohook.names.select import Selector
    from ferrohook.registration.scopes import Scope
    from ferrohook.tokens.positions import At
    from ferrohook.tokens.stacks import TokenStack

Hook: TypeAlias = "Callable[..., Any] | TypedHook | NativeDetector | Intervention"
"""Hook: a callable of PyTorch's contract, a typed hook, a detector or an intervention."""


class HandleGroup(AttachmentContext):
    """Handles of one hook on many modules; each method acts on all of them.

    Iterating yields the `HookHandle`s, in the order of the modules. As a context manager it removes
    the hooks at exit, and warns with `NeverFiredWarning` of modules that never ran inside.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: dict[str, HookHandle] = {}
        self._scoped = False

    def _adopt(self, modules: Iterable[nn.Module], handles: Mapping[str, HookHandle]) -> None:
        """Takes ownership of hooks and of their modules' instrumentation."""
        self._handles.update(handles)
        self.attachment.adopt([*modules], [*handles.values()])

    @property
    def names(self) -> list[str]:
        """The modules' names."""
        return list(self._handles)

    @property
    def calls(self) -> int:
        """Total number of finished calls of the hooks, see `HookHandle.calls`."""
        return sum(handle.calls for handle in self)

    @property
    def priority(self) -> int | None:
        """Priority of the hooks: higher fires first. It can be set; None if they have several."""
        several = {handle.priority for handle in self}
        return several.pop() if len(several) == 1 else None

    @priority.setter
    def priority(self, priority: int) -> None:
        for handle in self:
            handle.priority = priority

    @property
    def enabled(self) -> bool:
        """True if all of the hooks fire when their turn comes."""
        return all(handle.enabled for handle in self)

    @property
    def last_error(self) -> str | None:
        """Error that disabled one of the hooks by its `on_error`, as text; None if none did."""
        return next((handle.failure for handle in self if handle.failure), None)

    @property
    def removed(self) -> bool:
        """True once all of the hooks are removed."""
        return all(handle.removed for handle in self)

    def remove(self, *, wait: bool = False, timeout: float | None = None) -> None:
        """Removes the hooks, and restores modules that were instrumented for them.

        A removed hook never starts again; a call of it in another thread runs to its end.

        Args:
            wait: return only when no thread is still inside any of the hooks.
            timeout: seconds to wait at most, for each hook.

        Raises:
            HookError: `wait=True` from inside one of the hooks; all are removed.
            TimeoutError: a thread was still inside one of the hooks; all are removed.
            HookTypeError: an option has the wrong type; none is removed.
            ValueError: a `timeout` below 0 or without `wait`; none is removed.
        """
        # Validates the options: a removed handle waits for no thread.
        HookHandle._removed("forward").remove(wait=wait, timeout=timeout)
        # Removes all hooks before waiting for the first.
        self.attachment.release()
        for handle in self:
            handle.remove(wait=wait, timeout=timeout)

    def disable(self) -> None:
        """Skips the hooks until `enable`; their places in the order stay."""
        for handle in self:
            handle.disable()

    def enable(self) -> None:
        """Makes the hooks fire again, at their places in the order."""
        for handle in self:
            handle.enable()

    def __iter__(self) -> Iterator[HookHandle]:
        return iter(self._handles.values())

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, name: str) -> HookHandle:
        try:
            return self._handles[name]
        except KeyError:
            msg = f"{name!r} has no hook in this group, only {', '.join(map(repr, self._handles))}"
            raise SelectionError(msg) from None

    def _leaving(self, fine: bool) -> None:  # noqa: FBT001 (called from Rust)
        if fine and (silent := self._silent()):
            # If none ran, the calls may have been made in other threads.
            elsewhere = self._scoped and silent == self.names
            text = self._warning_text(silent, SCOPE_IN_THREADS if elsewhere else "")
            warnings.warn(text, NeverFiredWarning, stacklevel=2)

    def _silent(self) -> list[str]:
        """Returns the names of the modules that never ran."""
        return never_fired(self._handles.items())

    def _warning_text(self, silent: list[str], in_threads: str = "") -> str:
        phase = self._handles[silent[0]].phase
        if phase.startswith("forward"):
            return explain(self._model, silent, in_threads=in_threads)
        names = ", ".join(map(shown, silent))
        return f"no gradient reached {names} in this context: the {phase} hook never fired"

    def __reduce__(self) -> Any:
        # The handles of a copy are removed, so the copy gets an empty attachment.
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        state = "removed" if self.removed else "registered"
        disabled = [state_of(each) for each in self if not (each.enabled or each.removed)]
        if disabled:  # the first by its error, if an error disabled any
            state += f", {len(disabled)} {max(disabled, key=len)}"
        return f"<HandleGroup of {counted(len(self), 'hook')}, {state}, calls={self.calls}>"


def warnings_of(groups: Iterable[HandleGroup]) -> list[str]:
    """Returns a warning for each group with modules that never ran."""
    return [group._warning_text(silent) for group in groups if (silent := group._silent())]


def add_hooks(
    group: HandleGroup, modules: Mapping[str, nn.Module], phase: Phase, hook: Any, **options: Any
) -> None:
    """Registers a hook on modules that the group's attachment instruments."""
    handles = group.attachment.register(
        [*modules.values()], phase, hook, names=[*modules], **options
    )
    group._handles.update(zip(modules, handles, strict=True))


def register(  # noqa: PLR0913 (the options of the methods of nn.Module, and ours)
    model: nn.Module,
    what: Selector,
    hook: Hook,
    *,
    at: At = None,
    phase: Phase | None = None,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    priority: int = 0,
    on_error: OnError = "raise",
    scope: Scope | Literal["innermost", "global"] = "innermost",
) -> HandleGroup:
    """Registers one hook on modules of a model, by name.

    Modules are instrumented until the hook is removed or the scope is left. A hook on a
    `HookedModule` inside the model is registered with the wrapper.

    Args:
        model: any module.
        what: modules to hook, see `select`; containers (ModuleList) are left out. Or names of
            quantities, as `"@attn_out.3"`, see `quantities`; a plain callable there is called as
            `hook(module, args, value)`, and its result replaces the quantity.
        hook: a plain callable with PyTorch's contract for the phase, a typed hook, a native
            detector, or an intervention.
        at: positions of tokens that the hook changes, see `At`; None for all. With it, the hook is
            an intervention or a forward hook of PyTorch's contract that returns a tensor. Under
            `torch.compile` it breaks the graph. In a batch with positions use a plan's `on`.
        phase: `forward_pre`, `forward`, `backward_pre` or `backward`; None for the phase of a typed
            hook, and for `forward` otherwise.
        prepend: put the hook ahead of all others of its priority, instead of after them.
        with_kwargs: pass the keyword arguments too.
        always_call: run a forward hook also when the call fails.
        priority: higher fires first.
        on_error: response to the hook's exception: `raise`, `disable` or `ignore`.
        scope: fire only in the contexts that entered this scope, until it is left: by default the
            one that this context entered last, if any, requests and batches included. Captures,
            which only observe, are left out. "global" for the calls of all contexts.

    Returns:
        The handles of the hook, as a group.

    Raises:
        SelectionError: `what` matches no module, or only containers, which are never called.
        HookTypeError: `hook` is not callable, cannot be called with the arguments of the phase, or
            is a typed hook of another phase; or an option has the wrong type.
        HookError: a module cannot be instrumented, or the scope was left; or `at` where no tokens
            run, as in a model of images.
        ValueError: an unknown phase, `on_error` or `at`.
    """
    check_at(at)
    if phase is None:
        phase = hook.phase if isinstance(hook, TypedHook) else "forward"
    places = hooked_places_of(model, what, phase)
    stacks: dict[str, TokenStack | None] = {}
    positions = at
    if isinstance(hook, Route | Replay):
        refused = {"phase": phase, "with_kwargs": with_kwargs, "always_call": always_call}
        check_route(hook, at, refused)
        positions = EVERYWHERE if at is None else at
    tracker = None if positions is None else Tracker(positions)
    if tracker is not None:
        check_takes_at(hook, phase, with_kwargs=with_kwargs, always_call=always_call)
        places = {name: with_tokens_ahead(place) for name, place in places.items()}
        stacks = stacks_to_track(model, places.values())
    if isinstance(hook, Feature) and hook.dictionary.transcoder:
        raise HookTypeError(ONLY_IN_PLANS)
    # Validates the hook itself: a place may take another form of it.
    Registry().register(phase, hook, with_kwargs=with_kwargs)
    frame = scope_of(scope)
    group = HandleGroup(model)
    group._scoped = frame is not None
    if frame is not None:
        group.attachment.release_with(frame)
    try:
        modules = modules_of(places.values())
        tracked = {path: model.get_submodule(path) for path in stacks}
        attach(modules | tracked, group.attachment)
        options = {
            "prepend": prepend,
            "with_kwargs": with_kwargs,
            "always_call": always_call,
            "priority": priority,
            "on_error": on_error,
            "scope": frame,
        }
        for each in hooks_at(places, hook, phase, at):
            form = each.hook if tracker is None else masked(each.hook, 0, tracker)
            add_hooks(group, each.modules, each.phase, form, **options | each.options)
        track(group.attachment, tracked, stacks, scope=frame, tracker=tracker)
        if frame is None:
            group.attachment.release_when_unused([*modules.values()])
    except BaseException:
        group.attachment.release()
        raise
    return group
