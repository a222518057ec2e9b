"""Aggregation of a gate's readings over tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch

from ferrohook.util.arguments import at_least, expect

if TYPE_CHECKING:
    from torch import Tensor

By: TypeAlias = 'Literal["max", "min", "mean", "last"]'
"""How readings become one value."""
Over: TypeAlias = 'Literal["token", "prompt", "so_far"] | Window | Ema'
"""Which readings the value at a token is made of."""

_BY: Final = ("max", "min", "mean", "last")
_OVER: Final = ("token", "prompt", "so_far")


@dataclasses.dataclass(frozen=True)
class Window:
    """The last readings, see `window`."""

    size: int

    def __repr__(self) -> str:
        return f"window({self.size})"


@dataclasses.dataclass(frozen=True)
class Ema:
    """Exponential moving average, see `ema`."""

    decay: float

    def __repr__(self) -> str:
        return f"ema({self.decay})"


def window(size: int) -> Window:
    """Returns the `over` of a gate for its last readings, this token's included.

    A window that is not full is unknown.

    Args:
        size: number of readings.

    Raises:
        HookTypeError: it is no int.
        ValueError: it is below 1.
    """
    return Window(at_least(1, "size", size))


def ema(decay: float) -> Ema:
    """Returns the `over` of a gate for an exponential moving average of its readings.

    The first reading, then `decay * average + (1 - decay) * reading` with each further one.

    Args:
        decay: weight of what came before, from 0 up to but not including 1.

    Raises:
        HookTypeError: it is no number.
        ValueError: it is out of range.
    """
    expect(decay, int | float, "decay must be a number")
    if not 0 <= decay < 1:
        msg = f"decay must be at least 0 and below 1, got {decay}"
        raise ValueError(msg)
    return Ema(float(decay))


def check_over(over: Any, by: Any) -> None:
    """Validates an aggregation.

    Raises:
        HookTypeError, ValueError: it is none.
    """
    if not isinstance(over, Window | Ema) and over not in _OVER:
        names = ", ".join(map(repr, _OVER))
        msg = f"over must be one of {names}, window(n) or ema(decay), got {over!r}"
        raise ValueError(msg)
    if by not in _BY:
        msg = f"by must be one of {', '.join(map(repr, _BY))}, got {by!r}"
        raise ValueError(msg)


def aggregated(
    over: Over, by: By, readings: Tensor, counts: list[int], averages: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns values of a gate, and the moving averages of an `Ema` for the next call.

    Args:
        over: see `Over`.
        by: see `By`.
        readings: in order of position: float32, (readings,).
        counts: for each value the number of readings up to its token: at least 1, and the size of a
            window. With "prompt", the readings of the prompt only.
        averages: moving averages after the first readings, as an earlier call returned them.

    Returns:
        the values, float32, (values,), and the averages.
    """
    last = torch.tensor(counts, device=readings.device) - 1
    # The repeat of a checkpointed forward finds readings of later tokens too.
    readings = readings[: max(counts)]
    if isinstance(over, Ema):
        averages = _moving(over.decay, readings, averages)
        return averages[last], averages
    if over == "token" or by == "last":
        return readings[last], None
    if isinstance(over, Window):
        windows = readings.unfold(0, over.size, 1)
        return _reduced(by, windows)[last - (over.size - 1)], None
    return _cumulative(by, readings)[last], None


def _reduced(by: By, windows: Tensor) -> Tensor:
    if by == "max":
        return windows.amax(-1)
    return windows.amin(-1) if by == "min" else windows.mean(-1)


def _cumulative(by: By, readings: Tensor) -> Tensor:
    """Returns the value after each reading."""
    if by == "max":
        return readings.cummax(0).values
    if by == "min":
        return readings.cummin(0).values
    # In float64, so that the sums of a long text do not depend on how it was cut into calls.
    count = torch.arange(1, len(readings) + 1, device=readings.device)
    return (readings.to(torch.float64).cumsum(0) / count).to(readings.dtype)


def _moving(decay: float, readings: Tensor, known: Tensor | None) -> Tensor:
    """Returns the moving average after each reading; `known`: after the first of them."""
    known = readings[:1] if known is None else known
    averages = [known[-1]]
    for reading in readings[len(known) :].unbind():
        averages.append(decay * averages[-1] + (1 - decay) * reading)
    return torch.cat((known, torch.stack(averages[1:]))) if averages[1:] else known
