"""Positions of rows: `at=` of plans, and captures put together over steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ferrohook as fh

WIDTH = 4


class Tokens(nn.Sequential):
    """Takes what plans with positions are for."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return Tokens(nn.Linear(WIDTH, WIDTH), nn.Tanh())


@pytest.mark.parametrize("dim", [0, 1])
def test_captures_over_steps_are_put_together(model: nn.Sequential, dim: int) -> None:
    plan = fh.Plan(fh.keep("0"), fh.keep("1", at="generated")).prepare(model)
    a, b = plan.open(), plan.open()
    tokens = {a: torch.randn(6, WIDTH), b: torch.randn(4, WIDTH)}
    # (request, first position, number) of each step; b's second chunk is run again.
    steps = [[(a, 0, 3)], [(a, 3, 1), (b, 0, 2)], [(b, 2, 2), (a, 4, 1)], [(b, 2, 1), (a, 5, 1)]]
    for step in steps:
        rows, positions, inputs = {}, [], [torch.randn(1, WIDTH)]
        for request, start, count in step:
            rows[request] = slice(len(positions) + 1, len(positions) + 1 + count)
            positions += range(start, start + count)
            inputs.append(tokens[request][start : start + count])
        x, at = torch.cat(inputs), torch.tensor([-1, *positions])
        with fh.batch(rows, dim, positions=at, lengths={a: 3, b: 3}):
            model(x if dim == 0 else x[None])
    for request, generated in ((a, [3, 4, 5]), (b, [3])):
        assert request.error is None
        expected = model[0](tokens[request])
        assert torch.allclose(request.acts["0"], expected, atol=1e-6)
        assert request.positions("0") == [*range(len(expected))]
        assert torch.allclose(request.acts["1"], expected[generated].tanh(), atol=1e-6)
        assert request.positions("1") == generated


@pytest.mark.parametrize(
    ("at", "chosen"),
    [
        ("prompt", [0, 1, 2]),
        ("last_prompt", [2]),
        ("generated", [3, 4, 5]),
        (1, [1]),
        (-1, [2]),
        (slice(1, 4), [1, 2, 3]),
        (slice(-2, None), [1, 2, 3, 4, 5]),
        (slice(None, None, 2), [0, 2, 4]),
        (lambda positions: positions % 3 == 0, [0, 3]),
    ],
)
@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("layout", ["rows", "padded"])
def test_at(model: nn.Sequential, at: object, chosen: list[int], python: bool, layout: str) -> None:
    hook = (lambda _m, _a, o: o * 0) if python else fh.Zero()
    plan = fh.Plan(fh.on("1", hook, at=at), fh.keep("1", at=at)).prepare(model)
    request = plan.open()
    x = torch.randn(7, WIDTH)
    expected = model(x).clone()
    rows = [each + 1 for each in chosen]
    expected[rows] = 0
    positions = torch.tensor([-1, 0, 1, 2, 3, 4, 5])
    if layout == "rows":
        with fh.batch({request: slice(1, 7)}, positions=positions, lengths={request: 3}):
            out = model(x)
    else:
        both = torch.stack([positions, positions])
        with fh.batch({request: 1}, positions=both, lengths={request: 3}):
            out = model(torch.stack([x, x]))
        assert torch.equal(out[0], model(x))
        out = out[1]
    assert request.error is None
    assert torch.equal(out, expected)
    assert request.positions("1") == chosen
    assert torch.equal(request.acts["1"], expected[rows])


def test_the_length_of_a_prompt_is_remembered_or_refused(model: nn.Sequential) -> None:
    request = fh.Plan(fh.on("1", fh.Zero(), at="generated")).prepare(model).open()
    batch = fh.batch({request: 0}, positions=torch.tensor([0]))
    with pytest.raises(fh.RowsError, match="give lengths"), batch:
        pass
    for position, zero in ((1, False), (2, True)):
        lengths = {request: 2} if position == 1 else None
        with fh.batch({request: 0}, positions=torch.tensor([position]), lengths=lengths):
            out = model(torch.ones(1, WIDTH))
        assert bool((out == 0).all()) is zero


def test_positions_that_move_within_a_batch(model: nn.Sequential) -> None:
    plan = fh.Plan(fh.on("1", fh.Zero(), at="generated"), fh.keep("0")).prepare(model)
    requests = [plan.open(), plan.open()]
    x = torch.randn(2, 3, WIDTH)
    with fh.batch({each: at for at, each in enumerate(requests)}) as batch:
        first = torch.tensor([[-1, 0, 1], [0, 1, 2]])
        batch.move(first, {requests[0]: 2, requests[1]: 3})
        prompt = model(x)
        batch.move(torch.tensor([[2], [3]]))
        out = model(x[:, :1])
    assert out.count_nonzero() == 0
    assert prompt.count_nonzero() == prompt.numel()
    for at, request in enumerate(requests):
        expected = torch.cat([model[0](x[at]), model[0](x[at, :1])])
        assert torch.allclose(request.acts["0"], expected[[1, 2, 3]] if at == 0 else expected)
        assert request.positions("0") == [*range(3 + at)]


def test_without_positions_captures_are_those_of_the_last_call(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    for rows in (2, 3):
        with fh.batch({request: slice(0, rows)}):
            model(torch.randn(rows, WIDTH))
    assert len(request.acts["0"]) == 3
    with pytest.raises(fh.HookError, match="not known"):
        request.positions("0")
    with pytest.raises(fh.SelectionError):
        request.positions("nothing")


def test_positions_of_gathered_rows() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Identity()

        def forward(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            return self.head(x[last])

    model, last = Last(), torch.tensor([3, 1])
    plan = fh.Plan(fh.keep("head")).prepare(model)
    a, b, none = plan.open(), plan.open(), plan.open()
    x = torch.randn(5, WIDTH)
    rows = {a: slice(0, 2), b: slice(2, 4), none: 4}
    positions = torch.tensor([5, 6, 0, 1, 0])
    with fh.batch(rows, positions=positions, gathered={"head": last}):
        model(x, last)
    assert a.positions("head") == [6]
    assert torch.equal(b.acts["head"], x[3:4])
    assert [*none.acts] == []  # the module did not run for its rows
