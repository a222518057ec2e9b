"""Requests with plans, as an engine's worker handles them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.engines.planned import EnginePlans
from ferrohook.errors import HookError
from support.made_engine import Worker

WIDTH = 4
PLAN = fh.Plan(fh.on("0", fh.Scale(2.0)), fh.keep("0"))


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(requires_grad=False)


def test_what_the_engine_forgot_is_forgotten(model: nn.Sequential) -> None:
    worker = Worker(model)
    worker.take("a", PLAN)
    worker.take("b", PLAN)
    worker.reconcile({"b", "of nobody"})
    assert [*worker.requests] == ["b"]
    with pytest.raises(HookError, match="already has the id 'b'"):
        worker.check_free(["a", "b"])


@pytest.mark.parametrize(
    ("dim", "index", "keeps"),
    [
        (0, ..., True),
        (0, None, True),
        (0, slice(None), True),
        (0, (slice(None), 0), True),
        (0, 0, False),
        (0, slice(0, 2), False),
        (0, [0, 1], False),
        (1, slice(0, 1), True),
        (1, (..., slice(0, 2)), True),
        (1, (slice(None), slice(None), 0), True),
        (1, 0, False),  # the rows move to another dimension
        (1, (slice(None), 0), False),
        (1, (0, slice(None)), False),
        (1, (slice(None), slice(1, None)), False),
    ],
)
def test_a_slice_keeps_the_rows(model: nn.Sequential, dim: int, index: Any, keeps: bool) -> None:
    """Rows of steps cannot be put together without their dimension."""
    plans = EnginePlans(model, dim=dim)
    plan = fh.Plan(fh.keep("0", slice=index))
    if keeps:
        plans.serve(plan)
        return
    with pytest.raises(HookError, match="slice= must keep the whole dimension"):
        plans.serve(plan)


def test_dropped_plans_stay_open_for_their_requests(model: nn.Sequential) -> None:
    x = torch.ones(3, WIDTH)
    plain, plans = model(x), EnginePlans(model, size=2)
    request = plans.serve(PLAN).open()
    assert len(plans) == 1
    plans.clear()
    assert len(plans) == 0
    with request:
        torch.testing.assert_close(model(x), 2.0 * plain)
    assert len(request.acts) == 1


def test_a_request_is_queued_then_runs_then_has_ended_once(model: nn.Sequential) -> None:
    worker = Worker(model)
    request = worker.take("a", PLAN, 2)
    assert (request.state, request.reason) == ("queued", "")
    with worker.step(("a", 0, 3)):
        model(torch.ones(3, WIDTH))
    assert (request.state, request.tokens) == ("running", 3)
    first, later = RuntimeError("first"), RuntimeError("later")
    worker.fail(request, first)
    worker.fail(request, later)
    assert (request.state, request.error, request.valid) == ("ended", first, 1)
    assert worker.failures() == {"a": "the plan of the request failed: RuntimeError: first"}
    assert worker.failures() == {}


def test_rows_run_again_replace_and_later_ones_are_cut_off(model: nn.Sequential) -> None:
    worker = Worker(model)
    request = worker.take("a", PLAN)
    x = torch.randn(6, WIDTH)
    for position, rows in ((0, 3), (0, 2), (2, 2), (4, 1), (5, 1)):  # the last: after a stop
        inputs = torch.cat([torch.zeros(1, WIDTH), x[position : position + rows], x[:1]])
        with worker.step((None, 7, 1), ("a", position, rows), padding=1):
            output = model(inputs)
        assert torch.equal(output[1:-1], 2 * model(inputs)[1:-1])
        assert torch.equal(output[[0, -1]], model(inputs)[[0, -1]])
    assert worker.retire("a") is request
    result = request.result(end=5)

    assert result.error is None
    assert result.acts.positions("0") == [0, 1, 2, 3, 4]
    torch.testing.assert_close(result.acts["0"], 2 * model(x)[:5])
    assert worker.retire("a") is None


def test_a_fork_has_the_rows_of_its_parent_that_it_never_ran(model: nn.Sequential) -> None:
    worker = Worker(model)
    x = torch.randn(6, WIDTH)
    parent = worker.take("a", PLAN)
    forks = [worker.take(name, PLAN, parent=parent) for name in ("b", "c")]
    for name, position, rows in (("a", 0, 3), ("a", 3, 2), ("b", 3, 2), ("c", 0, 4)):
        with worker.step((name, position, rows)):
            model(x[position : position + rows])
    for request, rows in zip((parent, *forks), (5, 5, 4), strict=True):
        request.close()
        result = request.result()
        assert result.acts.positions("0") == [*range(rows)]
        torch.testing.assert_close(result.acts["0"], 2 * model(x)[:rows])
        assert [*result.acts] == ["0"]


@pytest.mark.parametrize("again", [None, 3, 4, 5])
def test_a_fork_that_runs_again_keeps_its_readings(model: nn.Sequential, again: int | None) -> None:
    worker = Worker(model)
    gate = fh.gate("g", "0", fh.Norm(), at=slice(None), over="so_far", by="mean")
    plan = fh.Plan(gate, fh.keep("@gate.g"))
    x, other = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    own = torch.cat([x[:4], other[4:]])
    whole, parent = worker.take("whole", plan), worker.take("parent", plan)
    fork = worker.take("fork", plan, parent=parent)
    steps = [("whole", own, 0, 4), ("whole", own, 4, 2), ("parent", x, 0, 4), ("parent", x, 4, 2)]
    steps += [("fork", own, 3, 1), ("fork", own, 4, 1), ("fork", own, 5, 1)]
    for name, inputs, position, rows in steps:
        with worker.step((name, position, rows)):
            model(inputs[position : position + rows])
    if again is not None:
        fork.wait()
        fork.resume(6)
        with worker.step(("fork", again, 6 - again)):
            model(own[again:])
    assert fork.failure is None
    expected = whole.result().acts["@gate.g"][-1:]
    torch.testing.assert_close(fork.result().acts["@gate.g"][-1:], expected)


def test_a_fork_that_runs_again_may_need_more_rows_of_its_parent(model: nn.Sequential) -> None:
    """More of the rows are cached by then; the second failure at a token is the last."""
    worker = Worker(model)
    plan = PLAN + fh.Plan(fh.gate("read", "0", fh.Norm()))
    x = torch.randn(6, WIDTH)
    draft = torch.full((1, WIDTH), torch.nan)
    parent = worker.take("a", plan)
    fork = worker.take("b", plan, parent=parent)
    for name, position in (("a", 0), ("b", 1)):
        with worker.step((name, position, 4 - position)):
            model(x[position:4])

    def step_with_draft() -> None:
        worker._drafts = {"b": [7]}
        with worker.step(("b", 4, 2)):
            model(torch.cat([x[4:5], draft]))
        worker._drafts = {}

    step_with_draft()
    assert (worker.retries(), worker.failures()) == ({"b"}, {})
    with worker.step(("b", 5, 1)):  # scheduled before the failure was known
        model(x[5:])
    fork.resume(5)
    with worker.step(("b", 3, 2)):
        model(x[3:5])
    assert (worker.retries(), worker.failures()) == (set(), {})
    result = fork.result()
    assert result.acts.positions("0") == [*range(5)]
    torch.testing.assert_close(result.acts["0"], 2 * model(x)[:5])
    step_with_draft()
    assert (worker.retries(), [*worker.failures()]) == (set(), ["b"])


def test_a_request_that_cannot_be_entered_fails_alone(model: nn.Sequential) -> None:
    worker = Worker(model)
    prepared = PLAN.prepare(model)
    closed, opened = worker.take("closed", prepared), worker.take("open", PLAN)
    prepared.close()
    x = torch.randn(2, WIDTH)
    with worker.step(("closed", 0, 1), ("open", 0, 1)):
        output = model(x)

    assert "closed while it ran" in worker.failures()["closed"]
    assert isinstance(closed.error, HookError)
    assert opened.state == "running"
    assert torch.equal(output[0], model(x)[0])
    assert torch.equal(output[1], 2 * model(x)[1])


def test_rows_that_are_not_in_the_forward_fail_the_requests_of_the_step(
    model: nn.Sequential,
) -> None:
    worker = Worker(model)
    queued = worker.take("queued", PLAN)
    requests = [worker.take("a", PLAN), worker.take("b", PLAN)]
    x = torch.randn(2, WIDTH)
    with worker.step(("a", 0, 2), ("b", 0, 2), padding=-2):
        assert torch.equal(model(x), model(x))
    assert worker.failures().keys() == {"a", "b"}
    assert all(isinstance(each.error, fh.errors.RowsError) for each in requests)
    assert queued.state == "queued"


def test_plans_alike_are_prepared_once_and_let_go(model: nn.Sequential) -> None:
    worker = Worker(model)
    plain = type(model[0])
    worker.take("a", PLAN)
    worker.take("b", PLAN)
    same = [worker.plans.serve(fh.Plan(*PLAN.entries)) for _ in range(2)]
    assert same[0] is same[1]
    assert type(model[0]) is not plain

    del same
    worker.reconcile(())
    assert type(model[0]) is plain


def test_positions_of_a_plan_are_changed_in_its_own_rows(model: nn.Sequential) -> None:
    worker = Worker(model)
    plan = fh.Plan(fh.on("0", fh.Add(torch.ones(WIDTH)), at=slice(2, None, 2)), fh.keep("0"))
    worker.take("a", plan, 2)
    request = worker.take("b", plan, 9)
    x = torch.randn(7, WIDTH)
    plain = model(x)
    with worker.step((None, 0, 1), ("a", 1, 3), ("b", 0, 2), padding=1):
        output = model(x)
    changed = [(output[row] != plain[row]).any().item() for row in range(7)]
    assert changed == [False, False, True, False, False, False, False]  # a's position 2
    result = request.result()
    assert result.acts.positions("0") == [0, 1]
    torch.testing.assert_close(result.acts["0"], plain[4:6])
