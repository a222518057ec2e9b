"""Native interventions and captures of all requests at a module: one operation, bit for bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ferrohook as fh

WIDTH = 16


class Operations(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def interventions(dtype: torch.dtype = torch.float32) -> list[Any]:
    def vector() -> Tensor:
        return torch.randn(WIDTH, dtype=dtype)

    return [
        lambda: fh.Add(vector()),
        lambda: fh.Add(vector(), scale=0.3),
        lambda: fh.Scale(1 + float(torch.rand(()))),
        lambda: fh.Ablate(vector()),
        lambda: fh.Clamp(vector(), low=-0.1, high=0.2),
        lambda: fh.Clamp(vector(), high=0.1),
        lambda: fh.Replace(vector()),
        fh.Zero,
    ]


ROWS = {
    "all, in order": [slice(0, 2), slice(2, 6), slice(6, 7)],
    "some": [[5], slice(1, 3), [6, 4]],
    "one each": [0, 1, 2, 3, 4, 5, 6],
}


@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(7, WIDTH), (7, 3, WIDTH)])
def test_bit_for_bit_as_by_hand(
    model: nn.Sequential, kind: int, layout: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    model = model.to(dtype)
    make = interventions(dtype)[kind]
    x = torch.randn(shape, dtype=dtype)
    hooks = [(make(), make()) for _ in ROWS[layout]]
    prepared = [
        fh.Plan(fh.on("1", first), fh.on("1", second), fh.keep("1")).prepare(model)
        for first, second in hooks
    ]
    requests = [each.open() for each in prepared]
    with fh.batch(dict(zip(requests, ROWS[layout], strict=True)), size=7):
        out = model(x)
    h = model[1](model[0](x))
    changed = h.clone()
    for rows, pair in zip(ROWS[layout], hooks, strict=True):
        own = [rows] if isinstance(rows, int) else rows
        part = h[own]
        for each in pair:
            part = _alone(each, part)
        changed[own] = part
    assert torch.equal(out, model[2](changed))
    for request, rows in zip(requests, ROWS[layout], strict=True):
        assert request.error is None
        own = [rows] if isinstance(rows, int) else rows
        assert torch.equal(request.acts["1"], changed[own])


def _alone(intervention: fh.Intervention, x: Tensor) -> Tensor:
    identity = nn.Identity()
    with fh.register(identity, "", intervention):
        return identity(x)


def operations_of(model: nn.Module, requests: list[Any], last: int) -> Counter[str]:
    """Counts the operations for requests of two rows each, but for the last one."""
    x = torch.randn(2 * (len(requests) - 1) + last, WIDTH)
    rows = {each: slice(2 * at, 2 * at + 2) for at, each in enumerate(requests)}
    rows[requests[-1]] = slice(len(x) - last, len(x))
    for _ in range(2):
        with fh.batch(dict(rows)), torch.no_grad(), Operations() as operations:
            model(x)
    return operations.counts


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.flip(0) * 3


@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("count", [1, 2])
def test_a_changed_sum_leaves_the_hidden_state_of_others(kind: int, count: int) -> None:
    torch.manual_seed(kind)
    model, x = Pair(), torch.randn(64, WIDTH)
    changes = [interventions()[kind]() for _ in range(count)]
    plans = [fh.Plan(fh.on("", type(each)(*each.values, output_index="sum"))) for each in changes]
    requests = [plan.prepare(model).open() for plan in plans]
    with fh.batch({request: 2 + row for row, request in enumerate(requests)}):
        hidden, _ = model(x)
    assert torch.equal(hidden[:2], x[:2])
    assert torch.equal(hidden[2 + count :], x[2 + count :])
    for row, plan in enumerate(plans, 2):
        with plan.prepare(model).open():
            alone, _ = model(x)
        assert torch.equal(hidden[row], alone[row])


@pytest.mark.parametrize("kind", range(8))
def test_a_changed_sum_leaves_the_hidden_state_at_other_positions(kind: int) -> None:
    torch.manual_seed(kind)
    model, x = Pair(), torch.randn(64, WIDTH)
    change = interventions()[kind]()
    plan = fh.Plan(fh.on("", type(change)(*change.values, output_index="sum"), at=5))
    with fh.batch({plan.prepare(model).open(): slice(None)}, positions=torch.arange(64)):
        hidden, _ = model(x)
    others = [row for row in range(64) if row != 5]
    assert torch.equal(hidden[others], x[others])
    assert not torch.equal(hidden[5], x[5])


@pytest.mark.parametrize(("last", "gathered"), [(2, 0), (3, 1)])
def test_as_many_operations_for_many_requests_as_for_two(
    model: nn.Sequential, last: int, gathered: int
) -> None:
    plans = [
        fh.Plan(fh.on("1", fh.Add(torch.randn(WIDTH))), fh.keep("*")).prepare(model)
        for _ in range(16)
    ]
    few = operations_of(model, [each.open() for each in plans[:2]], last)
    many = operations_of(model, [each.open() for each in plans], last)
    assert few == many
    assert many["add.Tensor"] == 1
    assert many["index_select.default"] == gathered  # no row of a vector for each row of the batch
    assert not many["clone.default"]


def test_a_request_that_does_not_fit_leaves_the_others(model: nn.Sequential) -> None:
    good, bad = torch.randn(WIDTH), torch.randn(WIDTH - 1)
    a = fh.Plan(fh.on("1", fh.Add(good))).prepare(model)
    b = fh.Plan(fh.on("1", fh.Add(good)), fh.on("1", fh.Add(bad))).prepare(model)
    first, second = a.open(), b.open()
    x = torch.randn(4, WIDTH)
    with fh.batch({first: slice(0, 2), second: slice(2, 4)}):
        out = model(x)
    assert isinstance(second.error, fh.HookTypeError)
    h = model[1](model[0](x))
    h[:2] += good
    assert torch.equal(out, model[2](h))


@pytest.mark.parametrize(
    "misfit", [torch.ones(WIDTH - 1), torch.ones(WIDTH, dtype=torch.complex64)]
)
def test_a_vector_that_does_not_fit_is_found_before_hooks_run(
    model: nn.Sequential, misfit: Tensor
) -> None:
    scopes = [fh.scope(), fh.scope()]
    handles = [
        handle
        for scope, vector in zip(scopes, (torch.ones(WIDTH), misfit), strict=True)
        for handle in fh.register(model, "1", fh.Add(vector), scope=scope)
    ]
    with fh.batch({scope: row for row, scope in enumerate(scopes)}):
        model(torch.randn(2, WIDTH))
    assert [handle.calls for handle in handles] == [1, 1]


def test_a_capture_that_fails_takes_the_changes_before_it_back(model: nn.Sequential) -> None:
    change = fh.on("1", fh.Add(torch.ones(WIDTH)))
    plans = [fh.Plan(change, fh.keep("1", max_bytes=1)), fh.Plan(change, fh.keep("1"))]
    failing, good = (plan.prepare(model).open() for plan in plans)
    x = torch.randn(2, WIDTH)
    with fh.batch({failing: 0, good: 1}):
        out = model(x)
    assert isinstance(failing.error, fh.errors.CaptureBudgetError)
    assert good.error is None
    h = model[1](model[0](x))
    h[1] += 1
    assert torch.equal(out, model[2](h))


def test_captures_share_what_they_keep(model: nn.Sequential) -> None:
    plan = fh.Plan(fh.keep("0"), fh.keep("1", copy="clone")).prepare(model)
    requests = [plan.open() for _ in range(4)]
    rows = {each: [at] for at, each in enumerate(requests)}
    with torch.no_grad(), fh.batch(rows, size=16), Operations() as operations:
        model(torch.randn(16, WIDTH))
    # One selection a module.
    assert operations.counts["index_select.default"] + operations.counts["clone.default"] == 2


def test_tables_are_made_anew_only_when_requests_change(model: nn.Sequential) -> None:
    prepared = [fh.Plan(fh.on("*", fh.Add(torch.randn(WIDTH)))).prepare(model) for _ in range(3)]
    a, b, c = (each.open() for each in prepared)
    stacks = []
    for members in ([a, b], [a, b], [a, b, c], [a, b], [a, b, c]):
        rows = {each: at for at, each in enumerate(members)}
        with torch.no_grad(), fh.batch(rows), Operations() as operations:
            model(torch.randn(len(members), WIDTH))
        stacks.append(operations.counts["stack.default"])
    assert stacks == [1, 0, 1, 0, 0]
