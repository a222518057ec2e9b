"""Faults of ferrohook in an engine's step: raised in any call of ours there."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

NOWHERE = "no call"
PACKAGE = str(Path(fh.__file__).parent)


class FaultError(Exception):
    """Raised in a call of a function of ferrohook, as if that had a fault."""


GUARDS = {"running", "_serving", "failing", "_Failing.__enter__", "_Failing.__exit__", "fail"}
"""Functions that guard the steps of each engine, or that run after a fault."""


class Injector:
    """Counts the calls in a thread, as its profiler, and raises in one of them.

    Args:
        unguarded: further functions that put the guards around the rest, or that run after a fault.
        at: number of the call; None for none.
    """

    def __init__(self, unguarded: set[str], at: int | None = None) -> None:
        self._unguarded = GUARDS | unguarded
        self._at = at
        self.calls: list[str] = []
        """Functions that were called."""
        self.where = NOWHERE

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        # Exceptions of a dropped generator, a finaliser or a weak reference's callback reach no
        # caller. The model's own code asks modules for their class.
        above = [code.co_name]
        while caller and caller.f_code.co_filename.startswith(PACKAGE):
            above.append(caller.f_code.co_name)
            caller = caller.f_back
        unguarded = not self._unguarded.isdisjoint({code.co_name, code.co_qualname})
        if above[0][0] == "<" or unguarded or above[1:2] == ["replaced"]:
            return
        if (
            "__del__" in above
            or above[-1] == "__class__"
            or (caller and caller.f_code.co_filename == weakref.__file__)
        ):
            return
        self.calls.append(code.co_qualname)
        if len(self.calls) - 1 == self._at:
            self.where = code.co_qualname
            raise FaultError(self.where)

    def draw(self, number: int) -> list[int]:
        """Draws calls of different functions, as far as there are so many, in random order."""
        rng = random.Random(len(self.calls))  # noqa: S311 (tests)
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self.calls):
            places.setdefault(name, []).append(place)
        names = rng.sample([*places], len(places))
        return [
            rng.choice(places[name]) for name in itertools.islice(itertools.cycle(names), number)
        ]

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Counts and raises in this thread."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
