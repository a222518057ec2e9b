"""Threads with separate batches on one model: each request gets its own rows and no others.

`--requests 200000` counts wrong answers of so many.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import math
import random
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from ferrohook._core import frames
from support.internals import instrumented
from support.modules import LAYERS, Chain
from support.threads import in_threads, repeating

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 4
ROWS = 12
MOST = 6
"""Requests of a batch."""
PLANS = 30


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="ferrohook")


def fail(*_call: Any) -> None:
    msg = "on purpose"
    raise RuntimeError(msg)


def hook_of(number: int) -> Any:
    """Adds the plan's number: natively, in Python, to the input; or fails."""
    vector = torch.full((2,), float(number))
    hooks: tuple[Any, ...] = (
        fh.Add(vector),
        lambda _module, _args, output: output + vector,
        fh.ForwardPreHook(lambda x: x + vector),
        fh.Add(vector),
        fail,
    )
    return hooks[number % len(hooks)]


def fails(number: int) -> bool:
    return hook_of(number) is fail


def plan_of(number: int) -> fh.Plan:
    return fh.Plan(fh.on(f"layers.{number % LAYERS}", hook_of(number)), fh.keep("layers.*"))


def expected_of(number: int, rows: Tensor) -> list[Tensor]:
    """Outputs of the layers at a request's rows."""
    added = 0 if fails(number) else number
    return [
        rows[:, None].expand(-1, 2) * 1000.0
        + (layer + 1)
        + (added if layer >= number % LAYERS else 0)
        for layer in range(LAYERS)
    ]


class Step:
    """A batch of requests with random plans and rows, some rows padding."""

    def __init__(self, prepared: list[fh.typing.Prepared], dice: random.Random) -> None:
        count = dice.randint(1, MOST)
        order = [*range(ROWS)]
        if dice.random() < 0.5:
            dice.shuffle(order)
        cuts = sorted(dice.sample(range(ROWS + 1), count + 1))
        self.numbers = [dice.randrange(PLANS) for _ in range(count)]
        self.requests = [prepared[number].open() for number in self.numbers]
        self.rows = [order[start:end] for start, end in itertools.pairwise(cuts)]

    def run(self, call: Callable[[Tensor], Tensor]) -> int:
        """Calls the model, and counts the requests that got something wrong."""
        x = torch.arange(ROWS)[:, None].expand(-1, 2) * 1000.0
        with fh.batch(dict(zip(self.requests, self.rows, strict=True))):
            y = call(x)
        wrong = 0
        nobodys = torch.ones(ROWS, dtype=torch.bool)
        for request, number, rows in zip(self.requests, self.numbers, self.rows, strict=True):
            place = torch.tensor(rows)
            nobodys[place] = False
            wrong += not self.is_right(request, number, place, y[place])
            request.close()
        unhooked = x[nobodys] + LAYERS
        return wrong + (not torch.equal(y[nobodys], unhooked))

    @staticmethod
    def is_right(request: fh.typing.Request, number: int, rows: Tensor, y: Tensor) -> bool:
        expected = expected_of(number, rows)
        if not torch.equal(y, expected[-1]):
            return False
        if fails(number):
            return isinstance(request.error, RuntimeError)
        kept = [request.acts[f"layers.{layer}"] for layer in range(LAYERS)]
        return request.error is None and all(map(torch.equal, kept, expected))


TURN = 4_000
"""Requests between two starts of the threads, which have a time limit."""


def count_wrong(
    prepared: list[fh.typing.Prepared], requests: int, call: Callable[[Tensor], Tensor]
) -> int:
    """Runs so many requests in batches of several threads, beside calls in no batch."""

    def work(turn: int, thread: int) -> int:
        dice = random.Random(f"{thread} {turn}")  # noqa: S311 (chooses plans and rows)
        wrong = done = 0
        while done < min(requests, TURN) // THREADS:
            step = Step(prepared, dice)
            wrong += step.run(call)
            done += len(step.requests)
            if dice.random() < 0.05:
                wrong += call(torch.zeros(ROWS, 2)).unique().tolist() != [LAYERS]
        return wrong

    wrong = 0
    for turn in range(math.ceil(requests / TURN)):
        wrong += sum(in_threads(THREADS, functools.partial(work, turn)))
    return wrong


@pytest.mark.usefixtures("switch_often")
@pytest.mark.timeout(3_000)
def test_batches_of_threads_are_right(request: pytest.FixtureRequest) -> None:
    model = Chain()
    prepared = [plan_of(number).prepare(model) for number in range(PLANS)]
    requests = request.config.getoption("requests") or 4_000
    assert count_wrong(prepared, requests, model) == 0
    for each in prepared:
        each.close()
    assert instrumented(model) == []
    assert frames.get() == ()


@pytest.mark.usefixtures("switch_often")
def test_plans_prepared_and_closed_beside_batches_disturb_none() -> None:
    model = Chain()
    prepared = [plan_of(number).prepare(model) for number in range(PLANS)]

    def prepare_and_close() -> None:
        with plan_of(7).prepare(model) as other, other.open():
            model(torch.zeros(ROWS, 2))

    with repeating(prepare_and_close):
        assert count_wrong(prepared, 400, model) == 0


def test_requests_of_batches_are_freed() -> None:
    model = Chain()
    prepared = [plan_of(number).prepare(model) for number in range(PLANS)]
    alive: list[weakref.ref[Any]] = []

    def work(thread: int) -> int:
        dice = random.Random(thread)  # noqa: S311 (chooses plans and rows)
        wrong = 0
        for _ in range(20):
            step = Step(prepared, dice)
            wrong += step.run(model)
            alive.extend(map(weakref.ref, step.requests))
        return wrong

    assert in_threads(THREADS, work) == [0] * THREADS
    gc.collect()
    assert [each for each in alive if each() is not None] == []


def test_a_request_is_in_one_batch_at_a_time() -> None:
    model = Chain()
    turns = 200
    with plan_of(1).prepare(model) as prepared:
        request = prepared.open()

        def work(_thread: int) -> int:
            served = 0
            for _ in range(turns):
                with contextlib.suppress(fh.HookError), fh.batch({request: slice(0, 2)}):
                    assert model(torch.zeros(ROWS, 2))[:2].tolist() == [[5.0, 5.0]] * 2
                    served += 1
            return served

        assert 0 < sum(in_threads(THREADS, work)) <= turns * THREADS
        with fh.batch({request: slice(0, 2)}):
            assert model(torch.zeros(ROWS, 2))[:2].tolist() == [[5.0, 5.0]] * 2
