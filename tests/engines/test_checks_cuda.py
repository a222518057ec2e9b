"""Checks of an engine's steps whose outcome a GPU still computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.engines.worker import WrittenRows
from support.gpu import waits
from support.made_engine import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WIDTH = 8
STEPS = 6
PROMPT = 4
BAD = PROMPT + 3
"""Position from which the rows of one request are NaN."""

pytestmark = pytest.mark.cuda


class Model(nn.Module):
    """Keeps what its first layer returned, as attention keeps keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.written = self.first(x)
        return self.last(self.written)


class Engine:
    """Steps of one row for each request, which write to slots of their own."""

    def __init__(self, *hides: Any) -> None:
        self.model = Model().requires_grad_(requires_grad=False).cuda()
        self.worker = Worker(self.model)
        steers = fh.on("first", fh.Add(torch.ones(WIDTH)))
        spoils = fh.on("first", fh.Scale(3e38), at=slice(BAD, None))
        self.worker.take("good", fh.Plan(steers))
        self.worker.take("bad", fh.Plan(spoils, *hides))
        self.written = torch.zeros(STEPS, 2, WIDTH).cuda()

    def step(self, number: int) -> tuple[Tensor, Callable[[], dict[str, str]] | None]:
        """Runs a step; returns its hidden states, and what waits for its outcome."""
        x = torch.full((2, WIDTH), 5.0).pin_memory().to("cuda", non_blocking=True)
        places = torch.arange(2 * number, 2 * number + 2).pin_memory().to("cuda", non_blocking=True)
        with self.worker.step(("good", PROMPT + number, 1), ("bad", PROMPT + number, 1)):
            hidden = self.model(x)
            self.written[number] = self.model.written
            cache = self.written.flatten(0, 1)
            self.worker.check_rows(
                hidden, lambda rows: [WrittenRows(cache, places[rows])], later=True
            )
        return hidden, self.worker.sent_checks()


@pytest.mark.parametrize("hides", [(), (fh.on("last", fh.Zero()),)], ids=["shown", "hidden"])
def test_steps_wait_for_no_outcome(hides: Any) -> None:
    engine = Engine(*hides)
    engine.step(0)
    engine.worker.read_checks(wait=True)
    with waits() as found:
        steps = [engine.step(number) for number in range(1, STEPS)]
    assert found == []
    for number, (hidden, outcome) in enumerate(steps, 1):
        assert outcome is not None
        assert [*outcome()] == (["bad"] if PROMPT + number >= BAD else [])
        assert hidden.isfinite().all()

    assert engine.worker.failures() == {}
    engine.worker.read_checks(wait=True)
    failures = engine.worker.failures()
    assert [*failures] == ["bad"]
    assert failures == steps[-1][1]()
    assert engine.written.isfinite().all()
    assert (engine.written[:, 1].any(1).tolist()) == [True] * 3 + [False] * 3
    assert engine.written[:, 0].any(1).all()


def test_blocks_are_clean_before_they_have_another_owner() -> None:
    """The outcome of the step is not known by then."""
    engine = Engine()
    engine.step(BAD - PROMPT)
    with waits() as found:
        engine.worker.release({"good"})
    engine.written[BAD - PROMPT, 1] += 1  # of the next owner
    assert found == []
    engine.worker.read_checks(wait=True)
    assert [*engine.worker.failures()] == ["bad"]
    assert engine.written[BAD - PROMPT, 1].tolist() == [1] * WIDTH
    assert engine.written[BAD - PROMPT, 0].all()
