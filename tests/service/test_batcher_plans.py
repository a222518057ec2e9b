"""`Batcher`: requests that share a forward, each under its own plan."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from ferrohook.detectors import CallCounter
from ferrohook.service import Batcher, PreparedPlans, deadline
from support.limits import LIMIT
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future


class Model(nn.Module):
    """Two layers that keep their input, and one whose output has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.second = nn.Identity()
        self.constant = nn.Identity()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.second(self.first(x)) + 0 * self.constant(torch.zeros(1, 7)).sum()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def plans(model: Model) -> Iterator[PreparedPlans]:
    plans = PreparedPlans(model, max_bytes=1000)
    yield plans
    plans.close()


def batcher_of(model: Model, *, max_wait: float = LIMIT, **options: Any) -> Batcher[Tensor, Any]:
    def split(output: Tensor, rows: Any) -> list[Any]:
        return output[rows].tolist()

    return Batcher(model, torch.cat, split, max_wait=max_wait, **options)


@pytest.fixture
def send_all(model: Model, plans: PreparedPlans) -> Callable[..., list[Any]]:
    """Sends requests that share a forward if they may; returns answers and exceptions."""

    def send_all(*requests: Any, rows: int = 1) -> list[Any]:
        batcher = Batcher(
            model,
            torch.cat,
            lambda output, rows: output if output is fh.STOPPED else output[rows].tolist(),
            max_requests=len(requests),
            max_wait=LIMIT,
        )
        with batcher:
            futures: list[Future[Any]] = []
            for number, request in enumerate(requests):
                opened = plans.prepare(request).open if isinstance(request, fh.Plan) else request
                x = torch.full((rows, 1), float(10 * number))
                futures.append(batcher.submit(x, opened, rows=rows))
            return [future.exception(LIMIT) or future.result() for future in futures]

    return send_all


def add(number: float, **options: Any) -> fh.Plan:
    return fh.Plan(fh.on("first", fh.Add(torch.tensor([float(number)])), **options))


KEEP = fh.Plan(fh.keep("second"))


@pytest.mark.parametrize("rows", [1, 3])
def test_each_request_has_its_own_hooks_and_captures(
    model: Model, send_all: Any, rows: int
) -> None:
    answers = send_all(None, add(1) + KEEP, KEEP, add(3), rows=rows)
    assert [each.value for each in answers] == [[[v]] * rows for v in (0.0, 11.0, 20.0, 33.0)]
    assert [each.shared for each in answers] == [4] * 4
    assert answers[0].request is None
    assert answers[1].request.acts["second"].tolist() == [[11.0]] * rows
    assert answers[2].request.acts["second"].tolist() == [[20.0]] * rows
    assert all(each.request.closed for each in answers[1:])
    assert model.forwards == 1


def test_rows_of_another_dimension(model: Model, plans: PreparedPlans) -> None:
    with Batcher(
        model,
        partial(torch.cat, dim=1),
        lambda output, rows: output[:, rows].flatten().tolist(),
        dim=1,
        max_requests=3,
        max_wait=LIMIT,
    ) as batcher:
        futures = [
            batcher.submit(torch.zeros(1, tokens, 1), plans.prepare(plan).open, rows=tokens)
            for tokens, plan in ((2, add(1)), (1, KEEP), (3, add(2) + KEEP))
        ]
        answers = [future.result(LIMIT) for future in futures]
    assert [each.value for each in answers] == [[1.0, 1.0], [0.0], [2.0, 2.0, 2.0]]
    assert [each.shared for each in answers] == [3, 3, 3]
    assert answers[2].request is not None
    assert answers[2].request.acts["second"].tolist() == [[[2.0]] * 3]


def test_counts_are_of_the_request(model: Model, plans: PreparedPlans, send_all: Any) -> None:
    prepared, groups = plans.prepare(fh.Plan()), []

    def opened() -> fh.typing.Request:
        request = prepared.open()
        groups.append(fh.register(model, ["first", "second"], CallCounter(), scope=request))
        return request

    answers = send_all(opened, add(1))
    assert [each.shared for each in answers] == [2, 2]
    (group,) = groups
    assert [group[name].calls for name in group.names] == [1, 1]


def python_hook(_module: object, *others: Tensor) -> Tensor:
    return others[-1] * 2


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        (fh.on("first", python_hook), [[20.0]]),
        (fh.on("first", fh.ForwardHook(lambda _input, _output: None)), [[10.0]]),
        (fh.on("first", python_hook, phase="backward_pre"), [[10.0]]),
        (fh.keep("first", grads=True), [[10.0]]),
        (fh.keep("first", stop=True), fh.STOPPED),
    ],
    ids=["function", "typed", "backward", "grads", "stop"],
)
@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
def test_plans_that_may_hold_others_up_get_a_forward_of_their_own(
    model: Model, send_all: Any, entry: Any, value: Any
) -> None:
    answers = send_all(add(1), fh.Plan(entry), add(2))
    assert [each.shared for each in answers] == [2, 1, 2]
    assert [each.value for each in answers] == [[[1.0]], value, [[22.0]]]
    assert model.forwards == 2


def test_a_failing_hook_fails_its_request_alone(
    model: Model, send_all: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    wrong = fh.Plan(fh.on("first", fh.Add(torch.ones(2))))
    ignored = fh.Plan(fh.on("first", fh.Add(torch.ones(2)), on_error="ignore"))
    answers = send_all(add(1), wrong, ignored)
    assert isinstance(answers[1], fh.HookTypeError)
    assert "has a width of 2" in str(answers[1])
    assert [each.value for each in (answers[0], answers[2])] == [[[1.0]], [[20.0]]]
    assert [each.shared for each in (answers[0], answers[2])] == [3, 3]
    assert model.forwards == 1


class Skipping(Model):
    """Does not call its second layer."""

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.first(x)


@pytest.mark.parametrize(
    "silent",
    [
        fh.Plan(fh.keep(["first", "second"])),
        fh.Plan(fh.on(["first", "second"], fh.Scale(2))),
        fh.Plan(fh.keep("first"), fh.on("second", fh.Scale(2))),
    ],
    ids=["capture", "hook", "both"],
)
@pytest.mark.parametrize("model", [Skipping()])
def test_modules_that_never_ran_are_warned_of(model: Model, send_all: Any, silent: fh.Plan) -> None:
    with pytest.warns(fh.errors.NeverFiredWarning, match="'second'"):
        answers = send_all(add(1), silent)
    assert [each.shared for each in answers] == [2, 2]


def test_what_has_no_rows_is_captured_in_a_forward_of_its_own(model: Model, send_all: Any) -> None:
    answers = send_all(add(1), fh.Plan(fh.keep(["constant", "second"])), KEEP)
    assert [each.shared for each in answers] == [3, 1, 3]
    acts = answers[1].request.acts
    assert (acts["constant"].shape, acts["second"].tolist()) == ((1, 7), [[10.0]])
    assert model.forwards == 2


def test_a_budget_is_that_of_the_request(send_all: Any) -> None:
    answers = send_all(KEEP, fh.Plan(fh.keep("second", max_bytes=3)), KEEP)
    assert isinstance(answers[1], fh.errors.CaptureBudgetError)
    assert [each.value for each in (answers[0], answers[2])] == [[[0.0]], [[20.0]]]
    assert [each.shared for each in (answers[0], answers[2])] == [3, 3]


def test_a_repeated_request_is_opened_again(model: Model, send_all: Any) -> None:
    def fail_together(_module: object, args: tuple[Tensor, ...]) -> None:
        if len(args[0]) > 1:
            msg = "together"
            raise ArithmeticError(msg)

    every = fh.Plan(fh.keep("second", calls="all"))
    with fh.register(model, "constant", fail_together, phase="forward_pre"):
        assert [each.shared for each in send_all(every, add(1))] == [2, 2]
    with fh.register(model, "", fail_together, phase="forward_pre"):
        answers = send_all(every, add(1))
    assert [each.shared for each in answers] == [1, 1]
    assert [each.value for each in answers] == [[[0.0]], [[11.0]]]
    assert len(answers[0].request.acts["second"]) == 1


def test_a_request_that_cannot_be_opened_fails_alone(model: Model, send_all: Any) -> None:
    closed = add(1).prepare(model)
    closed.close()
    answers = send_all(add(1), closed.open, add(2))
    assert [each.value for each in (answers[0], answers[2])] == [[[1.0]], [[22.0]]]
    assert model.forwards <= 3


def test_the_deadline_of_one_request_passes_in_the_forward(
    model: Model, plans: PreparedPlans
) -> None:
    begun = threading.Event()
    moment = 0.0

    def late(*_args: object) -> None:
        begun.set()
        while time.monotonic() <= moment:
            time.sleep(0.01)

    opened = plans.prepare(add(1)).open
    batcher = batcher_of(model, max_requests=2)
    with batcher, fh.register(model, "first", late, phase="forward_pre"):
        with deadline(1.0):
            moment = time.monotonic() + 1.0
            first = batcher.submit(torch.zeros(1, 1), opened)
        with deadline(LIMIT):
            second = batcher.submit(torch.zeros(1, 1), opened)
        with pytest.raises(TimeoutError):
            first.result(LIMIT)
        assert second.result(LIMIT).value == [[1.0]]
        assert begun.is_set()
        assert batcher.snapshot()["hooks_failed"] == 0


@pytest.mark.parametrize("alone", [False, True])
def test_an_answered_request_is_freed_without_a_collection(
    model: Model, plans: PreparedPlans, *, alone: bool
) -> None:
    prepared, items, requests = plans.prepare(add(1) + KEEP), [], []

    def opened() -> fh.typing.Request:
        request = prepared.open()
        requests.append(weakref.ref(request))
        return request

    batcher = batcher_of(model, max_requests=2)
    gc.collect()
    gc.disable()
    try:
        with batcher:
            futures = []
            for _ in range(2):
                x = torch.zeros(1, 1)
                items.append(weakref.ref(x))
                futures.append(batcher.submit(x, opened, alone=alone))
            del x
            assert [future.result(LIMIT).value for future in futures] == [[[1.0]]] * 2
            futures.clear()
        assert [ref() for ref in (*items, *requests)] == [None] * 4
    finally:
        gc.enable()


def test_threads_with_plans_of_their_own(model: Model, plans: PreparedPlans) -> None:
    batcher = batcher_of(model, max_requests=4, max_wait=0.0005, workers=2)

    def work(thread: int) -> int:
        shared = 0
        for turn in range(150):
            number, value = (thread * turn) % 5, float(turn)
            plan = (None, add(number) + KEEP, KEEP)[turn % 3]
            opened = None if plan is None else plans.prepare(plan).open
            x = torch.full((1 + turn % 2, 1), value)
            answer = batcher.submit(x, opened, rows=len(x), client=thread).result(LIMIT)
            expected = [[value + (number if turn % 3 == 1 else 0)]] * len(x)
            assert answer.value == expected
            if plan is not None:
                assert answer.request.acts["second"].tolist() == expected
            shared += answer.shared > 1
        return shared

    with batcher:
        shared = in_threads(4, partial(work))
    assert sum(shared) > 0


def test_a_plan_is_prepared_while_its_request_waits(model: Model) -> None:
    batcher = batcher_of(model, max_requests=2)
    with batcher:
        futures = [batcher.submit(torch.zeros(1, 1), add(n).prepare(model).open) for n in (1, 2)]
        assert [future.result(LIMIT).value for future in futures] == [[[1.0]], [[2.0]]]
