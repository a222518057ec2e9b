"""Captures still on the GPU; the first reader waits for them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook._core import Collector

_FINISH: weakref.WeakKeyDictionary[Collector, Callable[[], None]] = weakref.WeakKeyDictionary()


def await_with(collector: Collector, finish: Callable[[], None]) -> None:
    """Lets readers of a collector call `finish` first, which waits until it has its values."""
    _FINISH[collector] = finish
    collector.await_values()


def finish(collector: Collector) -> None:
    """Waits until a collector has all values of the calls so far."""
    if _FINISH and (waits := _FINISH.get(collector)) is not None:
        waits()
