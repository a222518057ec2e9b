"""Time limits of forwards."""

# A late forward is left by a hook (`check_deadline`), not by abandoning its thread, which would go
# on using a core.

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from contextvars import ContextVar
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from ferrohook.errors import NeverFiredWarning
from ferrohook.registration.register import register
from ferrohook.registration.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class DeadlineExceededError(TimeoutError):
    """A call was ended by its `deadline`."""


@dataclasses.dataclass(eq=False)
class _Limit:
    """A deadline, as early as the one around it."""

    end: float
    seconds: float
    """Seconds that the call had, from the start of the deadline that applies."""
    around: _Limit | None
    asked: bool = False
    """True once something has asked for it, which then keeps it."""


_limit: ContextVar[_Limit | None] = ContextVar("ferrohook_deadline", default=None)


@contextlib.contextmanager
def deadline(seconds: float, model: nn.Module | None = None) -> Iterator[None]:
    """Sets a time limit for the calls of this context, see `check_deadline`.

    Of nested deadlines the earliest applies. It also applies to requests that a `Batcher` gets
    inside. Warns with `NeverFiredWarning`, when the block ends, if nothing inside checked the
    limit.

    Args:
        seconds: time limit, from now on.
        model: check at each module of this model, with hooks that exist only during the block; a
            service registers `check_deadline` once instead.

    Raises:
        ValueError: `seconds` is negative or NaN.
        TimeoutError: at a module, if the time is over; or at the end of the block, if nothing
            inside checked the limit.
    """
    with limited(seconds) as limit, contextlib.ExitStack() as stack:
        if model is not None:
            checks = stack.enter_context(_Checks())
            register(model, None, check_deadline, phase="forward_pre", scope=checks)
        yield
    if limit.asked:
        return
    msg = (
        f"nothing checked the deadline of {limit.seconds} s: pass the model, as in "
        "deadline(5.0, model), or register check_deadline on modules, as in "
        'fh.register(model, "layers.*", check_deadline, phase="forward_pre")'
    )
    if monotonic() > limit.end:
        msg = f"{too_late(limit.seconds)}, and {msg}"
        raise DeadlineExceededError(msg)
    warnings.warn(msg, NeverFiredWarning, stacklevel=3)


class _Checks(Scope):
    """Scope of the checks of a deadline; other hooks in the block belong to the scope around it."""

    _takes_hooks = False


def too_late(seconds: float) -> str:
    """Returns the text of the error that a call had no more time than this."""
    return f"deadline exceeded: this call had {seconds} s"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[_Limit]:
    """Sets a time limit, as `deadline`, for a caller that looks at the end itself."""
    if not seconds >= 0:
        msg = f"a deadline must be at least 0 seconds from now, got {seconds}"
        raise ValueError(msg)
    around = _limit.get()
    end = monotonic() + seconds
    if around is not None and around.end < end:
        end, seconds = around.end, around.seconds
    limit = _Limit(end, float(seconds), around)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


def current_deadline() -> tuple[float, float]:
    """Returns the end of this context's deadline, by `time.monotonic`, and its seconds.

    Both are inf without one.
    """
    innermost = each = _limit.get()
    while each is not None:
        each.asked = True
        each = each.around
    return (inf, inf) if innermost is None else (innermost.end, innermost.seconds)


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
    end, seconds = current_deadline()
    if monotonic() > end:
        raise DeadlineExceededError(too_late(seconds))
