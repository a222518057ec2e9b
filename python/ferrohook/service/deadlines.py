"""Time limits of forwards."""

# A late forward is left by a hook (`check_deadline`), not by abandoning its thread, which would go
# on using a core.

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

TOO_LATE: Final = "the time for this call is over"

_deadline: ContextVar[float] = ContextVar("ferrohook_deadline", default=float("inf"))


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Sets a time limit for the calls of this context, see `check_deadline`.

    Of nested deadlines the earliest applies.

    Raises:
        ValueError: `seconds` is negative or NaN.
    """
    if not seconds >= 0:
        msg = f"a deadline is at least 0 seconds from now, got {seconds}"
        raise ValueError(msg)
    token = _deadline.set(min(_deadline.get(), monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def current_deadline() -> float:
    """Returns the end of this context's deadline, as `time.monotonic` tells it; inf without one."""
    return _deadline.get()


def check_deadline(_module: object, _args: object) -> None:
    """A `forward_pre` hook that ends calls whose `deadline` has passed.

    Register it on the modules that may end a forward: on every layer, say.

    Raises:
        TimeoutError: the deadline has passed.

    Examples:
        >>> fh.register(model, "layers.*", check_deadline, phase="forward_pre")
        >>> with deadline(2.0):
        ...     model(ids)
    """
    if monotonic() > _deadline.get():
        raise TimeoutError(TOO_LATE)
