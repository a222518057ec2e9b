"""Requests with plans, as an engine's adapter handles them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.engines import Span, Step
from ferrohook.engines.planned import PlannedRequests
from ferrohook.errors import HookError

WIDTH = 4
PLAN = fh.Plan(fh.on("0", fh.Scale(2.0)), fh.keep("0"))


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(requires_grad=False)


def admit(planned: PlannedRequests, *names: str) -> None:
    for name in names:
        with planned.admitting(name, PLAN):
            pass


def test_what_the_engine_forgot_is_forgotten(model: nn.Sequential) -> None:
    planned = PlannedRequests(model)
    admit(planned, "a", "b")
    planned.reconcile(lambda: {"b", "of nobody"})
    assert planned.ids() == ["b"]


@pytest.mark.parametrize(
    ("dim", "index", "keeps"),
    [
        (0, ..., True),
        (0, (slice(None), 0), True),
        (0, 0, False),
        (0, slice(0, 2), False),
        (0, [0, 1], False),
        (1, slice(0, 1), True),
        (1, (..., slice(0, 2)), True),
        (1, (slice(None), slice(None), 0), True),
        (1, 0, False),  # the rows move to another dimension
        (1, (slice(None), 0), False),
        (1, (slice(None), slice(1, None)), False),
    ],
)
def test_a_slice_keeps_the_rows(model: nn.Sequential, dim: int, index: Any, keeps: bool) -> None:
    """Without their dimension the rows of steps cannot be put together."""
    planned = PlannedRequests(model, dim=dim)
    plan = fh.Plan(fh.keep("0", slice=index))
    if keeps:
        planned.plans.serve(plan)
        return
    with pytest.raises(HookError, match="slice= keeps all of the dimension"):
        planned.plans.serve(plan)


def test_a_request_submitted_while_the_engine_is_asked_stays(model: nn.Sequential) -> None:
    planned = PlannedRequests(model)

    def read_live() -> set[str]:
        live: set[str] = set()
        admit(planned, "new")  # behind the look at the engine, and before its result is used
        return live

    planned.reconcile(read_live)
    assert "new" in planned


def test_a_request_that_is_being_submitted_stays(model: nn.Sequential) -> None:
    planned = PlannedRequests(model)
    with planned.admitting("a", PLAN):
        planned.reconcile(set)
        assert "a" in planned
    with pytest.raises(ZeroDivisionError), planned.admitting("b", PLAN):
        _ = 1 / 0
    assert planned.ids() == ["a"]


def test_rows_run_again_replace_and_later_ones_are_cut_off(model: nn.Sequential) -> None:
    planned = PlannedRequests(model)
    admit(planned, "a")
    x = torch.randn(6, WIDTH)
    for position, rows in ((0, 3), (0, 2), (2, 2), (4, 1), (5, 1)):  # the last: behind a stop
        step = Step([Span("other", 0, 1, 7, 9), Span("a", 1, rows, position, 4)], rows=rows + 2)
        inputs = torch.cat([torch.zeros(1, WIDTH), x[position : position + rows], x[:1]])
        with planned.running(step):
            output = model(inputs)
        assert torch.equal(output[1:-1], 2 * model(inputs)[1:-1])
        assert torch.equal(output[[0, -1]], model(inputs)[[0, -1]])
    result = planned.retire("a", end=5)

    assert result is not None
    assert result.error is None
    assert result.positions("0") == [0, 1, 2, 3, 4]
    torch.testing.assert_close(result.acts["0"], 2 * model(x)[:5])
    assert planned.retire("a") is None


def test_a_fork_has_the_rows_of_its_parent_that_it_never_ran(model: nn.Sequential) -> None:
    planned = PlannedRequests(model)
    x = torch.randn(6, WIDTH)
    with planned.admitting("a", PLAN, children=["b", "c"]):
        pass
    for name, position, rows in (("a", 0, 3), ("a", 3, 2), ("b", 3, 2), ("c", 0, 4)):
        with planned.running(Step([Span(name, 0, rows, position, 4)])):
            model(x[position : position + rows])
    for name, rows in (("a", 5), ("b", 5), ("c", 4)):
        result = planned.retire(name)
        assert result is not None
        assert result.positions("0") == [*range(rows)]
        torch.testing.assert_close(result.acts["0"], 2 * model(x)[:rows])
        assert [*result.acts] == ["0"]


def test_a_request_that_cannot_be_entered_fails_alone(model: nn.Sequential) -> None:
    planned = PlannedRequests(model)
    prepared = PLAN.prepare(model)
    with planned.admitting("closed", prepared):
        pass
    admit(planned, "open")
    prepared.close()
    step = Step([Span("closed", 0, 1, 0, 1), Span("open", 1, 1, 0, 1)])
    x = torch.randn(2, WIDTH)
    with planned.running(step):
        output = model(x)

    assert isinstance(planned.failure_of("closed"), HookError)
    assert planned.failure_of("open") is None
    assert torch.equal(output[0], model(x)[0])
    assert torch.equal(output[1], 2 * model(x)[1])


def test_keys_and_values_that_a_plan_changed_are_its_own(model: nn.Sequential) -> None:
    planned = PlannedRequests(model)
    admit(planned, "changes")
    with planned.admitting("watches", fh.Plan(fh.keep("0"))):
        pass
    for name, read, write in (
        ("changes", False, False),
        ("watches", False, True),
        ("no plan", True, True),
    ):
        assert planned.shares(name, write=False) is read
        assert planned.shares(name, write=True) is write


def test_plans_alike_are_prepared_once_and_let_go(model: nn.Sequential) -> None:
    planned = PlannedRequests(model)
    plain = type(model[0])
    admit(planned, "a", "b")
    same = [planned.plans.serve(fh.Plan(*PLAN.entries)) for _ in range(2)]
    assert same[0] is same[1]
    assert type(model[0]) is not plain

    del same
    planned.forget(["a", "b"])
    assert type(model[0]) is plain


def test_steps_with_rows_of_others_or_of_nobody_fail_their_requests_alone(
    model: nn.Sequential,
) -> None:
    planned = PlannedRequests(model)
    plan = fh.Plan(fh.on("0", fh.Add(torch.ones(WIDTH)), at=slice(2, None, 2)), fh.keep("0"))
    with planned.admitting("a", plan), planned.admitting("b", plan):
        pass
    x = torch.randn(7, WIDTH)
    plain = model(x)
    with planned.running(Step([Span("a", 1, 3, 1, 2), Span("b", 4, 2, 0, 9)], rows=7)):
        output = model(x)
    changed = [(output[row] != plain[row]).any().item() for row in range(7)]
    assert changed == [False, False, True, False, False, False, False]  # a's position 2
    peeked = planned.peek("b")
    assert peeked is not None
    assert peeked.positions("0") == [0, 1]
    torch.testing.assert_close(peeked.acts["0"], plain[4:6])
