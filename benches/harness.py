"""What a row of the benchmarks is, and how it is measured.

A ratio is only worth something if both of its sides saw the same machine. So each row measures
ours, then the other, then ours again, many times in turn; every such pair gives one ratio, and
the row is their median. The absolute times depend on what else runs; the ratios hardly do.
"""

from __future__ import annotations

import gc
import statistics
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Sampler: TypeAlias = "Callable[[float], float]"
"""Measures one side for about so many seconds and returns the figure, in the row's unit."""


class WrongResultError(Exception):
    """What is to be timed does not do what PyTorch does."""


@dataclass(frozen=True)
class Contest:
    """The two sides of a row, checked and ready to be measured."""

    ours: Sampler
    other: Sampler


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        name: what is measured: ours / other.
        bar: what the ratio should keep to.
        setup: checks the result, then returns what to measure.
        unit: of the figures of both sides.
        at_least: the bar is a lower one.
        absolute: the bar is for our figure itself; the other is shown to compare.
        repeats: at most so many, where each takes long.
        turns: so many times as many, where each is as much shorter.
        needs: the module that the other side is, where that is neither PyTorch nor ourselves.
    """

    name: str
    bar: float
    setup: Callable[[], Contest]
    unit: str = "ns"
    at_least: bool = False
    absolute: bool = False
    repeats: int | None = None
    turns: int = 1
    needs: str | None = None

    @property
    def bar_text(self) -> str:
        """The bar with its direction and, where it has one, its unit."""
        unit = f" {self.unit}" if self.absolute else ""
        return f"{'≥' if self.at_least else '≤'} {self.bar:g}{unit}"


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    repeats: int
    seconds: float


FULL = Effort(repeats=21, seconds=0.03)
QUICK = Effort(repeats=5, seconds=0.005)


@dataclass(frozen=True)
class Measured:
    """A row with what came out: a pair (ours, other) for each repeat."""

    row: Row
    pairs: list[tuple[float, float]]

    @property
    def values(self) -> list[float]:
        """What is held against the bar, for each repeat."""
        if self.row.absolute:
            return [ours for ours, _ in self.pairs]
        return [ours / other for ours, other in self.pairs]

    @property
    def value(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of the values."""
        if len(self.pairs) == 1:
            return self.value, self.value
        deciles = statistics.quantiles(self.values, n=10, method="inclusive")
        return deciles[0], deciles[-1]

    @property
    def ours(self) -> float:
        """Our median figure."""
        return statistics.median(ours for ours, _ in self.pairs)

    @property
    def other(self) -> float:
        """The other side's median figure."""
        return statistics.median(other for _, other in self.pairs)

    @property
    def ok(self) -> bool:
        """Whether the median keeps to the bar."""
        return self.value >= self.row.bar if self.row.at_least else self.value <= self.row.bar


def measure(row: Row, effort: Effort) -> Measured:
    """Checks and measures one row.

    Raises:
        WrongResultError: ours does not do what PyTorch does.
    """
    contest = row.setup()
    repeats = min(effort.repeats, row.repeats or effort.repeats)
    pairs = []
    seconds = effort.seconds / row.turns
    for _ in range(repeats * row.turns):
        ours = contest.ours(seconds)
        pairs.append((ours, contest.other(seconds)))
    return Measured(row, pairs)


def timed(loop: Callable[[int], object], per: int = 1) -> Sampler:
    """Samples the nanoseconds that one iteration of `loop` takes.

    Args:
        loop: runs as many iterations as it is told.
        per: how many parts one iteration has, if the time of a part is wanted.
    """
    count = 0

    def sample(seconds: float) -> float:
        nonlocal count
        with no_garbage_collection():
            count = count or _calibrate(loop, seconds)
            return _seconds(loop, count) / count / per * 1e9

    return sample


def expect(condition: bool, what: str) -> None:  # noqa: FBT001  (reads as a sentence)
    """Refuses to time something that is wrong.

    Raises:
        WrongResultError: `condition` is false; `what` says what should have held.
    """
    if not condition:
        raise WrongResultError(what)


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute on this thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps the collector, which runs when it pleases, out of what is timed."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _calibrate(loop: Callable[[int], object], seconds: float) -> int:
    """How many iterations take about so many seconds; warms the loop up too."""
    count = 1
    # Until it is far enough from the clock's resolution to extrapolate.
    while (taken := _seconds(loop, count)) < seconds / 10:
        count *= 2
    return max(1, round(count * seconds / taken))


def _seconds(loop: Callable[[int], object], count: int) -> float:
    # This thread's own time: what other processes do in the meantime does not count. The loops
    # compute and never wait, so nothing of theirs is missed.
    start = thread_time()
    loop(count)
    return thread_time() - start
