"""Groups of alternately measured sides, and the ratios of their medians.

A ratio only tells something if both of its sides saw the same machine. So one process measures
the sides of a group in turn, many times over. A side has one figure, its median, wherever it is
shown; absolute times depend on the machine's load, their ratios hardly do.
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
    from collections.abc import Callable, Iterator, Mapping, Sequence

Sampler: TypeAlias = "Callable[[float], float]"
"""Measures one side for about so many seconds and returns the figure, in the group's unit."""

Samples: TypeAlias = "dict[str, list[float]]"
"""Figures by side; figures of one index were measured one after the other."""


class WrongResultError(Exception):
    """A side computes another result than the one that it is compared with."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A ratio of two sides.

    Attributes:
        name: the side that is judged.
        over: the side that it is divided by.
        bar: limit that the ratio should keep to.
        at_least: the bar is a lower limit.
        absolute: the bar limits the figure of `name`, not the ratio.
    """

    name: str
    over: str
    bar: float
    at_least: bool = False
    absolute: bool = False

    def __str__(self) -> str:
        return f"{self.name} / {self.over}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Sides that one process measures alternately.

    Attributes:
        name: its title.
        setup: checks the results of all sides, then returns a sampler for each.
        rows: the ratios shown.
        unit: of all figures.
        repeats: upper limit where a sample takes long.
        turns: multiplies the repeats and divides the time of each.
        needs: module of another project that the group compares with.
    """

    name: str
    setup: Callable[[], Mapping[str, Sampler]]
    rows: Sequence[Row]
    unit: str = "ns"
    repeats: int | None = None
    turns: int = 1
    needs: str | None = None

    @property
    def sides(self) -> list[str]:
        """All sides that a row names, each once."""
        return list(dict.fromkeys(side for row in self.rows for side in (row.over, row.name)))


@dataclass(frozen=True)
class Effort:
    """Number of samples and seconds per sample."""

    repeats: int
    seconds: float


FULL = Effort(repeats=21, seconds=0.03)
QUICK = Effort(repeats=5, seconds=0.005)


def measure(group: Group, effort: Effort, samplers: Mapping[str, Sampler]) -> Samples:
    """Samples all sides alternately."""
    repeats = min(effort.repeats, group.repeats or effort.repeats) * group.turns
    seconds = effort.seconds / group.turns
    samples: Samples = {side: [] for side in samplers}
    for _ in range(repeats):
        for side, sample in samplers.items():
            samples[side].append(sample(seconds))
    return samples


@dataclass(frozen=True)
class Ratio:
    """The figures of one side, `names`, relative to another's."""

    names: list[float]
    overs: list[float]

    @property
    def figure(self) -> float:
        """The median of `name`."""
        return statistics.median(self.names)

    @property
    def base(self) -> float:
        """The median of `over`."""
        return statistics.median(self.overs)

    @property
    def value(self) -> float:
        """The ratio of both medians."""
        return self.figure / self.base

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of the ratios of single samples."""
        pairs = zip(self.names, self.overs, strict=True)
        ratios = [name / over for name, over in pairs if over]
        if len(ratios) < 2:  # noqa: PLR2004 (as few as quantiles take)
            return self.value, self.value
        deciles = statistics.quantiles(ratios, n=10, method="inclusive")
        return deciles[0], deciles[-1]


def timed(loop: Callable[[int], object], per: int = 1, *, nanoseconds: float = 1.0) -> Sampler:
    """Samples the time of one iteration of `loop`.

    Args:
        loop: runs so many iterations.
        per: parts of an iteration, if the time of a part is wanted.
        nanoseconds: of one unit.
    """
    count = 0

    def sample(seconds: float) -> float:
        nonlocal count
        with no_garbage_collection():
            count = count or _calibrate(loop, seconds)
            return _seconds(loop, count) / count / per * 1e9 / nanoseconds

    return sample


def expect(condition: bool, what: str) -> None:  # noqa: FBT001  (reads as a sentence)
    """Refuses to measure a wrong result.

    Raises:
        WrongResultError: `condition` is false; `what` names the right result.
    """
    if not condition:
        raise WrongResultError(what)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to the calling thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects garbage before and not while the body is timed."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _calibrate(loop: Callable[[int], object], seconds: float) -> int:
    """Iterations that take about so many seconds; warms the loop up too."""
    count = 1
    # Far enough from the clock's resolution to extrapolate.
    while (taken := _seconds(loop, count)) < seconds / 10:
        count *= 2
    return max(1, round(count * seconds / taken))


def _seconds(loop: Callable[[int], object], count: int) -> float:
    # CPU time of this thread: other processes do not count. The loops never wait.
    start = thread_time()
    loop(count)
    return thread_time() - start
