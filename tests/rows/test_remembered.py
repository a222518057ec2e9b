"""Merged hooks of a batch's members, which its next calls and batches use again."""

from __future__ import annotations

import gc
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTH = 4
X = torch.arange(2.0 * WIDTH).reshape(2, WIDTH)
ONE, TEN = torch.ones(WIDTH), torch.full((WIDTH,), 10.0)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Identity())


def step(model: nn.Module, rows: Mapping[Any, Any], x: Tensor = X) -> Tensor:
    """Runs a new batch, as an engine does."""
    with torch.no_grad(), fh.batch(rows, warn=False):
        output: Tensor = model(x)
    return output


def steps(model: nn.Module, rows: Mapping[Any, Any]) -> Tensor:
    """Runs three batches of the same members: the later ones use the hooks of the first."""
    outputs = [step(model, rows) for _ in range(3)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    return outputs[0]


def steered(model: nn.Module) -> dict[Any, int]:
    """Makes two requests that add one and ten after the first module."""
    plans = [fh.Plan(fh.on("0", fh.Add(vector))) for vector in (ONE, TEN)]
    return {plan.prepare(model).open(): row for row, plan in enumerate(plans)}


def scopes(model: nn.Module) -> tuple[dict[Any, int], list[Any]]:
    """Makes two scopes, each with a hook at the first module."""
    members, handles = {}, []
    for row, vector in enumerate((ONE, TEN)):
        scope = fh.scope()
        handles.append(fh.register(model, "0", fh.Add(vector), scope=scope))
        members[scope] = row
    return members, handles


def test_a_hook_that_comes_later_fires(model: nn.Sequential) -> None:
    rows, _ = scopes(model)
    assert torch.equal(steps(model, rows), X + torch.stack([ONE, TEN]))
    first = next(iter(rows))
    fh.register(model, "0", fh.Scale(2), scope=first)
    expected = X + torch.stack([ONE, TEN])
    expected[0] *= 2
    assert torch.equal(steps(model, rows), expected)
    fh.register(model, "0", lambda _module, _args, output: output - 1, scope=first)
    expected[0] -= 1
    assert torch.equal(steps(model, rows), expected)


def test_a_vector_of_another_width_fails_its_member_in_a_later_batch(
    model: nn.Sequential, caplog: pytest.LogCaptureFixture
) -> None:
    plans = [fh.Plan(fh.on("0", fh.Add(each))) for each in (ONE, torch.tensor([10.0]))]
    members = [plan.prepare(model).open() for plan in plans]
    rows = {member: row for row, member in enumerate(members)}
    assert torch.equal(steps(model, rows), X + torch.stack([ONE, TEN]))
    wide = torch.cat([X, X], dim=1)
    found = step(model, rows, wide)
    assert isinstance(members[0].error, fh.HookTypeError)
    assert members[1].error is None
    assert torch.equal(found, torch.stack([wide[0], wide[1] + 10]))
    assert "width of 4" in caplog.text


def test_order_follows_a_changed_priority(model: nn.Sequential) -> None:
    rows, handles = scopes(model)
    first = next(iter(rows))
    fh.register(model, "0", fh.Scale(2), scope=first)
    assert torch.equal(steps(model, rows)[0], (X[0] + ONE) * 2)
    for handle in handles[0]:
        handle.priority = -1
    assert torch.equal(steps(model, rows)[0], X[0] * 2 + ONE)


@pytest.mark.parametrize("how", ["remove", "disable"])
def test_a_hook_that_goes_fires_no_more(model: nn.Sequential, how: str) -> None:
    rows, handles = scopes(model)
    steps(model, rows)
    for handle in handles[0]:
        getattr(handle, how)()
    assert torch.equal(steps(model, rows), X + torch.stack([0 * ONE, TEN]))


def test_rows_that_change_are_followed(model: nn.Sequential) -> None:
    rows = steered(model)
    steps(model, rows)
    first, second = rows
    for changed in ({first: 1, second: 0}, {second: 0, first: 1}):
        assert torch.equal(steps(model, changed), X + torch.stack([TEN, ONE]))
    assert torch.equal(steps(model, {first: [0, 1]}), X + 1)
    assert torch.equal(steps(model, {second: 1}), X + torch.stack([0 * ONE, TEN]))


def test_calls_are_counted(model: nn.Sequential) -> None:
    rows, handles = scopes(model)
    steps(model, rows)
    assert [handle.calls for each in handles for handle in each] == [3, 3]
    step(model, rows, torch.zeros(2, WIDTH - 1))  # no vector fits
    assert [handle.calls for each in handles for handle in each] == [4, 4]


@pytest.mark.parametrize("end", ["fail", "close"])
def test_a_request_that_ends_inside_a_batch_is_out_at_the_next_module(
    model: nn.Sequential, end: str
) -> None:
    plans = [fh.Plan(fh.on(["0", "1"], fh.Add(vector))) for vector in (ONE, TEN)]
    rows = {plan.prepare(model).open(): row for row, plan in enumerate(plans)}
    expected = X + 2 * torch.stack([ONE, TEN])
    assert torch.equal(steps(model, rows), expected)
    first = next(iter(rows))

    def ends(*_call: object) -> None:
        if end == "fail":
            first.fail(RuntimeError("enough"))
        else:
            first.close()

    model[1].register_forward_pre_hook(ends)
    expected[0] -= ONE
    assert torch.equal(step(model, rows), expected)


def test_a_deadline_ends_a_request_between_steps(model: nn.Sequential) -> None:
    plans = [fh.Plan(fh.on("0", fh.Add(vector))) for vector in (ONE, TEN)]
    prepared = [plan.prepare(model) for plan in plans]
    first, second = prepared[0].open(deadline=0.5), prepared[1].open(deadline=600)
    until = time.monotonic() + 0.5
    rows = {first: 0, second: 1}
    while time.monotonic() < until:
        step(model, rows)
    assert torch.equal(step(model, rows), X + torch.stack([0 * ONE, TEN]))
    assert isinstance(first.error, TimeoutError)
    assert second.error is None


def test_a_deadline_ends_a_request_inside_a_call(model: nn.Sequential) -> None:
    plans = [fh.Plan(fh.on("1", fh.Add(vector))) for vector in (ONE, TEN)]
    prepared = [plan.prepare(model) for plan in plans]
    first, second = prepared[0].open(deadline=0.5), prepared[1].open()
    with torch.no_grad(), fh.batch({first: 0, second: 1}):
        model(X)
        model[0].register_forward_hook(lambda *_: time.sleep(0.6))
        assert torch.equal(model(X), X + torch.stack([0 * ONE, TEN]))
    assert isinstance(first.error, TimeoutError)


def test_other_tensors_are_checked_anew(model: nn.Sequential) -> None:
    rows = steered(model)
    steps(model, rows)
    assert torch.equal(step(model, rows, X.double()), X.double() + torch.stack([ONE, TEN]))
    narrow = torch.zeros(2, WIDTH - 1)
    assert torch.equal(step(model, rows, narrow), narrow)
    assert all("width" in str(request.error) for request in rows)


def test_captures_and_changes_of_a_module_run_in_order(model: nn.Sequential) -> None:
    plans = [fh.Plan(fh.on("0", fh.Add(vector)), fh.keep("0")) for vector in (ONE, TEN)]
    rows = {plan.prepare(model).open(): row for row, plan in enumerate(plans)}
    for number in range(3):
        x = X + number
        step(model, rows, x)
        for (request, row), vector in zip(rows.items(), (ONE, TEN), strict=True):
            assert torch.equal(request.acts["0"][0], x[row] + vector)


def test_nothing_of_a_closed_request_is_kept(model: nn.Sequential) -> None:
    keep = fh.Plan(fh.keep("1")).prepare(model)
    rows = steered(model)
    first = next(iter(rows))
    kept = keep.open()
    output = step(model, {first: 0, kept: 1})
    step(model, {first: 0, kept: 1})
    assert torch.equal(kept.acts["1"][0], output[1])
    tensor = weakref.ref(kept.acts["1"].untyped_storage())
    request = weakref.ref(kept)
    kept.close()
    del kept, output
    gc.collect()
    assert request() is None
    assert tensor() is None
    assert torch.equal(step(model, {first: 0}), X + torch.stack([ONE, 0 * ONE]))
