"""`register` and `run`: hooks on modules of a model, by name."""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ferrohook._core import AttachmentContext, Frame, HookHandle, NativeDetector, TypedHook
from ferrohook.activations import ActivationCache
from ferrohook.activations import capture as _capture
from ferrohook.arguments import expect_module
from ferrohook.errors import HookTypeError, NeverFiredWarning, SelectionError
from ferrohook.instrumentation import attach
from ferrohook.never_fired import explain
from ferrohook.scopes import Scope
from ferrohook.selection import select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from ferrohook.selection import Selector


class HandleGroup(AttachmentContext):
    """The handles of one hook on many modules: acts on all of them.

    Iterating yields the `HookHandle`s, in the order of the modules. As a context manager it removes
    the hooks at exit, and warns with `NeverFiredWarning` of modules that never ran meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: dict[str, HookHandle] = {}

    def _register(
        self, modules: Mapping[str, nn.Module], phase: str, hook: Any, **options: Any
    ) -> None:
        handles = self.attachment.register([*modules.values()], phase, hook, **options)
        self._handles.update(zip(modules, handles, strict=True))

    def _adopt(self, modules: Iterable[nn.Module], handles: Mapping[str, HookHandle]) -> None:
        """Takes over modules that are instrumented for hooks, and these hooks."""
        self._handles.update(handles)
        self.attachment.adopt([*modules], [*handles.values()])

    @property
    def names(self) -> list[str]:
        """The modules' names."""
        return list(self._handles)

    @property
    def calls(self) -> int:
        """How often the hooks were called and have returned or raised, all together."""
        return sum(handle.calls for handle in self)

    @property
    def removed(self) -> bool:
        """Whether all of them were removed."""
        return all(handle.removed for handle in self)

    def remove(self, *, wait: bool = False, timeout: float | None = None) -> None:
        """Removes the hooks; modules that were instrumented for them are given back.

        Args:
            wait: return only when no thread is still inside any of them.
            timeout: how many seconds to wait at most for each.

        Raises:
            HookError: `wait=True` from inside one of the hooks; all are removed.
            TimeoutError: a thread was still inside one; all are removed.
            HookTypeError: an option of the wrong type; none is removed.
            ValueError: a `timeout` below 0 or without `wait`; none is removed.
        """
        # Refuses what they would refuse, and waits for nobody.
        HookHandle._removed("forward").remove(wait=wait, timeout=timeout)
        # All of them before waiting for the first.
        self.attachment.release()
        for handle in self:
            handle.remove(wait=wait, timeout=timeout)

    def disable(self) -> None:
        """Keeps the hooks and their places, and skips them until `enable`."""
        for handle in self:
            handle.disable()

    def enable(self) -> None:
        """Lets the hooks fire again, at their old places."""
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
            warnings.warn(self._told(silent), NeverFiredWarning, stacklevel=2)

    def _silent(self) -> list[str]:
        """The names of the modules that never ran."""
        # A hook that was disabled or removed says nothing of its module.
        return [
            name
            for name, handle in self._handles.items()
            if not handle.calls and handle.enabled and not handle.removed
        ]

    def _told(self, silent: list[str]) -> str:
        phase = self._handles[silent[0]].phase
        if phase.startswith("forward"):
            return explain(self._model, silent)
        names = ", ".join(map(repr, silent))
        return f"no gradient reached {names} in this context: the {phase} hook never fired"

    def __reduce__(self) -> Any:
        # The handles of a copy are removed ones, and it holds nothing.
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        state = "removed" if self.removed else "registered"
        return f"<HandleGroup of {len(self)} hooks, {state}, calls={self.calls}>"


def register(  # noqa: PLR0913 (the options of the methods of nn.Module, and ours)
    model: nn.Module,
    what: Selector,
    hook: Callable[..., Any] | TypedHook | NativeDetector,
    *,
    phase: str | None = None,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    priority: int = 0,
    on_error: str = "raise",
    timed: bool = False,
    scope: Scope | None = None,
) -> HandleGroup:
    """Registers one hook on modules of a model, by name.

    Modules that are not instrumented are, for as long as the hook is registered: until it is
    removed, or the scope is left. A hook on a `HookedModule` inside the model is registered with
    the wrapper.

    Args:
        model: any module.
        what: which of its modules, see `select`.
        hook: a plain callable with PyTorch's contract for the phase, a typed hook, or a native
            detector.
        phase: `forward_pre`, `forward`, `backward_pre` or `backward`; None for that of a typed
            hook, and `forward` for others.
        prepend: ahead of all others of its priority, instead of behind them.
        with_kwargs: pass the keyword arguments too.
        always_call: run a forward hook also when the call fails.
        priority: higher fires first.
        on_error: what a call does about the hook's exception: `raise`, `disable` or `ignore`.
        timed: count the time spent in the hook, for `summary`.
        scope: the hook fires only in the contexts that entered this scope, until it is left.

    Returns:
        A handle for all of them.

    Raises:
        SelectionError: `what` matches no module.
        HookTypeError: not a callable, a typed hook of another phase, or an option of the wrong
            type.
        HookError: a module cannot be instrumented, or the scope was left.
        ValueError: an unknown phase or `on_error`.
    """
    modules = select(model, what)
    if phase is None:
        phase = hook.phase if isinstance(hook, TypedHook) else "forward"
    group = HandleGroup(model)
    if isinstance(scope, Frame):  # anything else is refused by registering
        group.attachment.release_with(scope)
    try:
        attach(modules, group.attachment)
        group._register(
            modules,
            phase,
            hook,
            prepend=prepend,
            with_kwargs=with_kwargs,
            always_call=always_call,
            priority=priority,
            on_error=on_error,
            timed=timed,
            scope=scope,
        )
    except BaseException:
        group.attachment.release()
        raise
    return group


def run(
    model: nn.Module,
    *args: Any,
    hooks: Mapping[Any, Callable[..., Any] | TypedHook | NativeDetector] | None = None,
    capture: Selector = None,
    **kwargs: Any,
) -> Any:
    """Calls a model once, with hooks and a capture for this call alone.

    Args:
        model: any module.
        *args: for the model.
        hooks: from what `select` takes to the hook: a forward hook of PyTorch's contract, or a
            typed hook of any phase.
        capture: which modules' outputs to keep, see `select`; None for none.
        **kwargs: for the model.

    Warns with `NeverFiredWarning` of modules that never ran.

    Returns:
        The model's output; with `capture` a tuple of it and the `ActivationCache`.

    Raises:
        SelectionError: something matches no module.
        HookTypeError: a hook is neither a callable nor a typed hook.

    Examples:
        >>> output, acts = fh.run(model, ids, hooks={"layers.3": steer}, capture="layers.*")
    """
    expect_module(model, "run calls")
    if not isinstance(hooks, Mapping | None):
        msg = f"hooks is a dict from what to select to the hook, got {type(hooks).__name__}"
        raise HookTypeError(msg)
    session = None if capture is None else _capture(model, capture).tag.session
    with Scope() as own:
        groups = [register(model, what, hook, scope=own) for what, hook in (hooks or {}).items()]
        acts = None if session is None else ActivationCache(*session.begin(own))
        output = model(*args, **kwargs)
        told = [group._told(silent) for group in groups if (silent := group._silent())]
    if session is not None and (silent := session.silent()):
        told.append(explain(model, silent))
    for text in told:
        warnings.warn(text, NeverFiredWarning, stacklevel=2)
    return output if acts is None else (output, acts)
