"""Worker of an engine that is made of the steps that a test asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrohook.engines import Capabilities
from ferrohook.engines.planned import EnginePlans
from ferrohook.engines.requests import EngineRequest
from ferrohook.engines.worker import EngineWorker

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn


class Worker(EngineWorker):
    """Worker of an engine that settles one step after the other."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Capabilities("made", "1.0", ("1.0",), (), {}))
        self.plans = EnginePlans(model)

    def take(self, name: str, plan: Any, prompt: int = 4, **options: Any) -> EngineRequest:
        """Admits a request."""
        made = EngineRequest(name, self.plans.serve(plan), prompt, **options)
        self.requests[name] = made
        return made

    def step(
        self, *rows: tuple[str | None, int, int], padding: int = 0
    ) -> AbstractContextManager[None]:
        """Enters a step of requests: their names, first positions and numbers of rows."""
        counts = [count for _, _, count in rows]
        self.settle([name for name, *_ in rows], counts, [position for _, position, _ in rows])
        return self.running(sum(counts) + padding)
