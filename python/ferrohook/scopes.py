"""`scope`: hooks for the calls of one context."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from ferrohook._core import ScopeBase, active_scopes
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextvars import Token

P = ParamSpec("P")
R = TypeVar("R")


class Scope(ScopeBase):
    """Hooks that fire only for calls made in the contexts that entered the scope.

    A context manager: entering it makes it one of the scopes of the current context
    (`contextvars`), and leaving it removes the hooks that were registered with it, and no others.
    Scopes nest. Tasks of asyncio and `asyncio.to_thread` inherit the scopes that were entered when
    they were made; other threads get them by `wrap` or `activate`.
    """

    def __init__(self) -> None:
        self._entered: tuple[Token[tuple[ScopeBase, ...]], tuple[ScopeBase, ...]] | None = None

    def __enter__(self) -> Self:
        if self._entered is not None or self.closed:
            msg = "a scope is entered once: use activate() for other threads, scope() for another"
            raise HookError(msg)
        scopes: tuple[ScopeBase, ...] = (*active_scopes.get(), self)
        self._entered = active_scopes.set(scopes), scopes
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.closed or self._entered is None:
            msg = "this scope is not entered, or was left before"
            raise HookError(msg)
        token, scopes = self._entered
        if active_scopes.get() is not scopes:
            msg = (
                "a scope is left where it was entered (the same thread and task), "
                "after the scopes that were entered inside it"
            )
            raise HookError(msg)
        self._close()
        active_scopes.reset(token)

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Makes another context, such as that of another thread, one of the scope too.

        The scopes around this one come along. Leaving ends that for the context alone.

        Raises:
            HookError: the scope was not entered, or left.
        """
        if self.closed or self._entered is None:
            msg = "only a scope that is entered can be activated elsewhere"
            raise HookError(msg)
        active = active_scopes.get()
        _, scopes = self._entered
        token = active_scopes.set((*active, *(each for each in scopes if each not in active)))
        try:
            yield
        finally:
            active_scopes.reset(token)

    def wrap(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn`, for executors: whichever thread calls it, the scope is active meanwhile.

        Raises:
            HookError: when called, if the scope is not entered.
        """

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
