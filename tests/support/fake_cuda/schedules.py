"""Schedules: how far the streams of the emulated GPU run ahead of the host's waits."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.fake_cuda.streams import Stream

SCHEDULES = ("eager", "lazy", "random:1", "random:2", "random:3")
"""Names of the schedules that a test runs under."""


class Schedule:
    """Picks the stream that runs its next work, each time that work is enqueued.

    Args:
        name: `eager` (all work at once), `lazy` (none before the host waits for it), or `random`
            with a seed after a colon.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        kind, _, seed = name.partition(":")
        if kind not in {"eager", "lazy", "random"}:
            msg = f"schedules are eager, lazy and random:SEED, got {name!r}"
            raise ValueError(msg)
        self._kind = kind
        self._random = random.Random(int(seed or 0))  # noqa: S311 (no secret)

    def pick(self, ready: Sequence[Stream]) -> Stream | None:
        """Returns one of the streams whose next work may run, or None to run no more now."""
        if not ready or self._kind == "lazy":
            return None
        if self._kind == "eager":
            return ready[0]
        return self._random.choice(ready) if self._random.random() < 0.6 else None
