"""Time limits of forwards."""

# A late forward is left by a hook (`check_deadline`), not by abandoning its thread, which would go
# on using a core.

from __future__ import annotations

import contextlib
import dataclasses
from contextvars import ContextVar
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

TOO_LATE: Final = "the time for this call is over"


@dataclasses.dataclass(eq=False)
class _Limit:
    """A deadline, as early as the one around it."""

    end: float
    around: _Limit | None
    asked: bool = False
    """True once something has asked for it, which then keeps it."""


_limit: ContextVar[_Limit | None] = ContextVar("ferrohook_deadline", default=None)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Sets a time limit for the calls of this context, see `check_deadline`.

    Of nested deadlines the earliest applies. Requests that a `Batcher` gets inside have it too.

    Raises:
        ValueError: `seconds` is negative or NaN.
        TimeoutError: at the end of the block, if it took longer and neither `check_deadline` nor a
            `Batcher` asked for the limit: then nothing could end a call.
    """
    with limited(seconds) as limit:
        yield
    if not limit.asked and monotonic() > limit.end:
        msg = (
            f"{TOO_LATE}, and nothing could end it earlier: register check_deadline on the modules "
            'that may, as in fh.register(model, "layers.*", check_deadline, phase="forward_pre")'
        )
        raise TimeoutError(msg)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[_Limit]:
    """Sets a time limit, as `deadline`, for a caller that looks at the end itself."""
    if not seconds >= 0:
        msg = f"a deadline is at least 0 seconds from now, got {seconds}"
        raise ValueError(msg)
    around = _limit.get()
    end = monotonic() + seconds
    limit = _Limit(end if around is None else min(around.end, end), around)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


def current_deadline() -> float:
    """Returns the end of this context's deadline, as `time.monotonic` tells it; inf without one."""
    innermost = each = _limit.get()
    while each is not None:
        each.asked = True
        each = each.around
    return inf if innermost is None else innermost.end


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
    if monotonic() > current_deadline():
        raise TimeoutError(TOO_LATE)
