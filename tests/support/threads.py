"""Threads that start together and end within a time limit."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

THREADS = 8


class Together(Generic[T]):
    """Threads that start at one barrier, one for each target."""

    def __init__(self, *targets: Callable[[], T]) -> None:
        self._barrier = threading.Barrier(len(targets))
        self._returned: dict[int, T] = {}
        self._raised: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=indexed, daemon=True)
            for indexed in enumerate(targets)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, target: Callable[[], T]) -> None:
        try:
            self._barrier.wait(LIMIT)
            self._returned[index] = target()
        except BaseException as error:  # noqa: BLE001 (join raises it)
            self._raised.append(error)

    def join(self) -> list[T]:
        """Waits for the threads; raises the first exception, or returns the targets' results."""
        deadline = time.monotonic() + LIMIT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._raised:
            raise self._raised[0]
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        assert not stuck, f"still running after {LIMIT} s: {stuck}"
        return [self._returned[index] for index in range(len(self._threads))]


def run_together(*targets: Callable[[], T]) -> list[T]:
    """Results of the targets, each run in its own thread."""
    return Together(*targets).join()


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Results of `work(number)` for each number below `count`, each run in its own thread."""
    return run_together(*(functools.partial(work, number) for number in range(count)))


def in_thread(target: Callable[[], T]) -> T:
    """Result of `target`, run in another thread."""
    return run_together(target)[0]


@contextlib.contextmanager
def repeating(act: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Threads that repeat `act` until the block ends."""
    left = threading.Event()

    def repeat() -> None:
        while not left.is_set():
            act()

    together = Together(*[repeat] * threads)
    try:
        yield
    finally:
        left.set()
        together.join()


def wait(event: threading.Event) -> None:
    assert event.wait(LIMIT), f"nothing happened for {LIMIT} s"


class Blocking:
    """A hook that blocks from `entered` until `release`, then appends to `left`."""

    def __init__(self, threads: int = 1) -> None:
        self.entered = threading.Barrier(threads + 1)
        self.release = threading.Event()
        self.left: list[None] = []

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.entered.wait(LIMIT)
        wait(self.release)
        self.left.append(None)
