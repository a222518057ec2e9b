"""Aggregation of a gate's readings over tokens."""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch

from ferrohook.util.arguments import at_least, expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

By: TypeAlias = 'Literal["max", "min", "mean", "last"]'
"""Reduction of readings to one value."""
Over: TypeAlias = 'Literal["token", "prompt", "so_far"] | Window | Ema'
"""Readings that make up the value at a token."""

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


def recorded(
    over: Over, by: By, readings: Sequence[float], graph: Tensor, counts: Sequence[int]
) -> Tensor:
    """Returns the values of `GateAggregation` from readings with a gradient.

    Args:
        over: see `Over`.
        by: see `By`.
        readings: in order of position.
        graph: the readings with their gradient, float32, (readings,).
        counts: for each value the number of readings up to its token; all values are known.

    Returns:
        float32, (values,).
    """
    last = torch.tensor(counts, device=graph.device) - 1
    if over == "token" or (by == "last" and not isinstance(over, Ema)):
        return graph[last]
    if isinstance(over, Ema):
        averages = [graph[0]]
        for reading in graph[1:].unbind():
            averages.append(over.decay * averages[-1] + (1 - over.decay) * reading)
        return torch.stack(averages)[last]
    if by == "mean":
        sums = graph.to(torch.float64).cumsum(0)
        sizes = last + 1
        if isinstance(over, Window):
            sums = sums - torch.cat((sums.new_zeros(over.size), sums[: -over.size]))
            sizes = torch.full_like(sizes, over.size)
        return (sums[last] / sizes).to(graph.dtype)
    chosen = max if by == "max" else min
    if isinstance(over, Window):
        spans = (range(count - over.size, count) for count in counts)
        places = [chosen(span, key=readings.__getitem__) for span in spans]
    else:
        span = range(len(readings))
        extremes = [*accumulate(span, lambda *pair: chosen(pair, key=readings.__getitem__))]
        places = [extremes[count - 1] for count in counts]
    return graph[torch.tensor(places, device=graph.device)]
