"""`scope`: hooks for the calls of one context."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast

from ferrohook._core import Frame, frames
from ferrohook.errors import HookError, HookTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")


class Scope(Frame):
    """Hooks that fire only for calls made in the contexts that entered the scope.

    A context manager: entering it makes it one of the scopes of the current context
    (`contextvars`), and leaving it removes the hooks that were registered with it, and no others.
    Scopes nest. Tasks of asyncio and `asyncio.to_thread` inherit the scopes that were entered when
    they were made; other threads get them by `wrap` or `activate`. A scope that is dropped without
    being left stays entered for as long as the context lives.

    Backward hooks fire for the calls that were recorded in the scope, wherever the backward runs.
    What `torch.utils.checkpoint` calls again in a backward on another thread (with GPUs: always) is
    outside, and needs `context_fn=lambda: (contextlib.nullcontext(), s.activate())`.
    """

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Makes another context, such as that of another thread, one of the scope too.

        The scopes around this one come along. Leaving ends that for the context alone.

        Raises:
            HookError: the scope was not entered, or left; or the context is another one at the end.
        """
        scopes = self._entered
        if scopes is None:
            msg = "only a scope that is entered can be activated elsewhere"
            raise HookError(msg)
        active = frames.get()
        token = frames.set((*active, *(each for each in scopes if each not in active)))
        try:
            yield
        finally:
            try:
                frames.reset(token)
            except ValueError as error:
                msg = "what was activated ends in the same thread and task"
                raise HookError(msg) from error

    def wrap(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn`, for executors: whichever thread calls it, the scope is active meanwhile.

        A coroutine function becomes one that has the scope active while its coroutine runs.

        Raises:
            HookTypeError: `fn` cannot be called, or is a generator function, whose body runs when
                the call is over: activate the scope inside it.
            HookError: when called, if the scope is not entered.
        """
        if not callable(fn):
            msg = f"wrap takes a callable, got {type(fn).__name__}"
            raise HookTypeError(msg)
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            msg = "a generator's body runs after the call: use activate() inside it, not wrap()"
            raise HookTypeError(msg)
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def wrapped_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self.activate():
                    return await fn(*args, **kwargs)

            return cast("Callable[P, R]", wrapped_coroutine)

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.activate():
                return fn(*args, **kwargs)

        return wrapped

    def __repr__(self) -> str:
        state = "left" if self.closed else "new" if self._entered is None else "entered"
        return f"<Scope {state}>"


def scope() -> Scope:
    """A scope, to be entered by `with`.

    Hooks are registered with it by the keyword `scope`, before it is entered or after.

    Examples:
        >>> with fh.scope() as s:
        ...     handles = fh.register(model, "layers.3.mlp", steer, scope=s)
        ...     model(ids)  # steered; other threads' calls are not
    """
    return Scope()
