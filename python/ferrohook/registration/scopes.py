"""`scope`: hooks for the calls of one context."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Self, TypeVar, cast

from ferrohook._core import Activation, Frame, frames
from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.arguments import expect

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class Scope(Frame):
    """Set of hooks that fire only for calls in the contexts that entered the scope.

    A context manager: entering adds it to the scopes of the current context (`contextvars`);
    `register` inside it registers with it; leaving removes the hooks that were registered with it,
    and no others. Scopes nest. Tasks of asyncio and `asyncio.to_thread` inherit the scopes entered
    at their creation; use `wrap` or `activate` for other threads. A scope that is dropped without
    being left stays entered as long as the context lives.

    Backward hooks fire for calls whose forward ran in the scope, whichever thread runs the
    backward. `torch.utils.checkpoint` repeats a forward during backward, on any thread. The
    repetition runs the hooks of that forward, whichever scopes are entered by then. If one of them
    was removed, or its scope was left, backward raises `HookError`; captures, native detectors and
    `ForwardHook`s, which change nothing, may be removed earlier.
    """

    _takes_hooks: ClassVar = True
    """False for one that only observes: a hook registered inside belongs to the scope around it."""

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Activates the scope in another context, such as another thread's, by `with`.

        Activates the scopes around it too. Leaving deactivates them only for that context.

        Raises:
            HookError: when entered, if the scope is not entered, or was left; when left, if that is
                in another context.
        """
        return Activation(self)

    def wrap(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Wraps `fn` for executors: the scope is active while it runs, in whichever thread.

        For a coroutine function (also as the `__call__` of an object), the scope is active while
        its coroutine runs.

        Raises:
            HookTypeError: `fn` is not callable; or it is a generator function, whose body runs
                after the call: use `activate` inside it.
            HookError: when called, if the scope is not entered.
        """
        if not callable(fn):
            msg = f"wrap needs a callable, got {type(fn).__name__}"
            raise HookTypeError(msg)
        inside: Any = fn
        while isinstance(inside, functools.partial):
            inside = inside.func
        bodies = (inside, type(inside).__call__)
        if any(map(inspect.isgeneratorfunction, bodies)) or any(
            map(inspect.isasyncgenfunction, bodies)
        ):
            msg = "a generator's body runs after the call: use activate() inside it, not wrap()"
            raise HookTypeError(msg)
        if any(map(inspect.iscoroutinefunction, bodies)):

            @functools.wraps(fn)
            async def wrapped_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self.activate():
                    return await cast("Any", fn)(*args, **kwargs)

            return cast("Callable[P, R]", wrapped_coroutine)

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.activate():
                return fn(*args, **kwargs)

        return wrapped

    def close(self) -> None:
        """Closes the scope, wherever it is entered; its hooks never fire again."""
        self._close()

    def __repr__(self) -> str:
        state = "left" if self.closed else "new" if self._entered is None else "entered"
        return f"<Scope {state}>"


def scope() -> Scope:
    """Makes a scope: hooks registered inside its `with` fire only for calls there.

    `register` inside it adds hooks to it. The keyword `scope` of `register` chooses another scope;
    `scope="global"` is for the calls of all contexts.

    Examples:
        >>> with fh.scope():
        ...     fh.register(model, "layers.3.mlp", steer)
        ...     model(ids)  # steered; other threads' calls are not
    """
    return Scope()


def scope_of(given: Any) -> Frame | None:
    """Returns the scope that the argument `scope=` names; None for the calls of all contexts.

    Raises:
        HookTypeError: it is no scope, nor the name of one.
        HookError: see `innermost`.
    """
    if given == "innermost":
        return innermost()
    if given == "global":
        return None
    expected = "scope must be 'innermost', 'global' or the result of scope()"
    expect(
        given,
        Frame,
        f"{expected}: {given!r} is none of these" if isinstance(given, str) else expected,
    )
    return cast("Frame", given)


def innermost() -> Frame | None:
    """Returns the scope for hooks that the current context entered last; None if it entered none.

    Raises:
        HookError: it was left by another context, such as the one that started this task.
    """
    entered = (each for each in reversed(frames.get()) if getattr(each, "_takes_hooks", True))
    last = next(entered, None)
    if last is None:
        return None
    if last.closed:
        msg = (
            "the scope of this context was left in another context, and its hooks were removed: "
            "pass scope='global' to register for all contexts, or pass another scope"
        )
        raise HookError(msg)
    return last
