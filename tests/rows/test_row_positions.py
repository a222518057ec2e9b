"""Positions of rows: `at=` of plans, and captures put together over steps."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ferrohook as fh
from ferrohook._core import places_at
from ferrohook.tokens.positions import At, mask_of, native_at
from ferrohook.tokens.positions import Tokens as CallTokens
from support.modules import Tokens

WIDTH = 4


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
        assert request.acts.positions("0") == [*range(len(expected))]
        assert torch.allclose(request.acts["1"], expected[generated].tanh(), atol=1e-6)
        assert request.acts.positions("1") == generated


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
    assert request.acts.positions("1") == chosen
    assert torch.equal(request.acts["1"], expected[rows])


def test_the_length_of_a_prompt_is_remembered_or_refused(model: nn.Sequential) -> None:
    request = fh.Plan(fh.on("1", fh.Zero(), at="generated")).prepare(model).open()
    batch = fh.batch({request: 0}, positions=torch.tensor([0]))
    with pytest.raises(fh.errors.RowsError, match="pass lengths"), batch:
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
        assert request.acts.positions("0") == [*range(3 + at)]


@pytest.mark.parametrize("at", ["generated", slice(1, None)])
def test_positions_that_move_choose_other_rows(model: nn.Sequential, at: At) -> None:
    """Rows of a call are not rows of the next one, which has padding among them."""
    plan = fh.Plan(fh.keep("0", at=at), fh.on("0", fh.Zero(), at=at)).prepare(model)
    first, second = plan.open(), plan.open()
    lengths = {first: 1, second: 2}
    begin = torch.tensor([0, 0, -1, 0])
    with fh.batch({first: [0, 1], second: [3]}, positions=begin, lengths=lengths) as batch:
        for ran in ([0, 1, -1, 1], [2, 3, -1, 2], [4, 5, -1, 3]):
            batch.move(torch.tensor(ran), lengths)
            x = torch.randn(4, WIDTH)
            out = model[0](x)
            expected = nn.functional.linear(x, model[0].weight, model[0].bias)
            for row, position in enumerate(ran):
                length = 1 if at != "generated" or row < 3 else 2
                assert (out[row] == 0).all() == (row != 2 and position >= length)
    assert first.acts.positions("0") == [1, 2, 3, 4, 5]
    assert second.acts.positions("0") == ([2, 3] if at == "generated" else [1, 2, 3])
    assert torch.allclose(first.acts["0"][-1], expected[1])
    assert torch.allclose(second.acts["0"][-1], expected[3])


def test_without_positions_captures_are_those_of_the_last_call(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    for rows in (2, 3):
        with fh.batch({request: slice(0, rows)}):
            model(torch.randn(rows, WIDTH))
    assert len(request.acts["0"]) == 3
    with pytest.raises(fh.HookError, match="not known"):
        request.acts.positions("0")
    with pytest.raises(fh.SelectionError):
        request.acts.positions("nothing")


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
    assert a.acts.positions("head") == [6]
    assert torch.equal(b.acts["head"], x[3:4])
    assert [*none.acts] == []  # the module did not run for its rows


HUGE = st.sampled_from([10**30, -(10**30), 2**63 - 1, 2**63, -(2**63), -(2**63) - 1])
BOUNDS = st.none() | st.integers(-9, 12) | HUGE
ATS = (
    st.sampled_from(["prompt", "last_prompt", "generated"])
    | st.integers(-9, 12)
    | HUGE
    | st.builds(slice, BOUNDS, BOUNDS, st.none() | st.integers(1, 4) | st.just(10**30))
)


def chosen(at: object, position: int, length: int) -> bool:
    """Says whether a token is at positions, by Python's own ranges."""
    if position < 0:
        return False
    if isinstance(at, slice):
        start, stop = (
            max(length + bound, 0) if bound is not None and bound < 0 else bound
            for bound in (at.start, at.stop)
        )
        return position in range(start or 0, sys.maxsize if stop is None else stop, at.step or 1)
    if isinstance(at, int):
        return position == (at if at >= 0 else length + at)
    named = {
        "prompt": position < length,
        "last_prompt": position == length - 1,
        "generated": position >= length,
    }
    return named[str(at)]


@given(at=ATS, positions=st.lists(st.integers(-9, 14), max_size=9), length=st.integers(1, 9))
def test_places_of_positions_are_those_of_ranges(at: At, positions: list[int], length: int) -> None:
    expected = [place for place, each in enumerate(positions) if chosen(at, each, length)]
    assert places_at(native_at(at), positions, length) == expected

    def by_function(given: torch.Tensor) -> torch.Tensor:
        # Padding is -1, and does not count.
        each = [chosen(at, int(p), length) if p >= 0 else int(p) == -1 for p in given[0]]
        return torch.tensor([each], dtype=torch.bool)

    assert places_at(native_at(by_function), positions, length) == expected
    for padded in (at, by_function):
        tokens = CallTokens(torch.tensor([positions], dtype=torch.long), torch.tensor([length]))
        assert mask_of(padded, tokens)[0].nonzero().flatten().tolist() == expected


def test_batches_made_ahead_have_lengths_of_their_own(model: nn.Sequential) -> None:
    prepared = fh.Plan(fh.on("0", fh.Zero(), at="generated")).prepare(model)
    request = prepared.open()
    positions = torch.arange(3)
    made = [
        fh.batch({request: slice(0, 3)}, positions=positions, lengths={request: length})
        for length in (1, 3)
    ]
    x = torch.randn(3, WIDTH)
    plain = model(x)
    for batch, zeroed in zip(made, (2, 0), strict=True):
        with batch:
            output = model(x)
        rows = (output == 0).all(-1).sum()
        assert rows == zeroed
        assert torch.equal(output[: 3 - zeroed], plain[: 3 - zeroed])


def test_lengths_of_several_prompts_are_refused_for_single_tokens(model: nn.Sequential) -> None:
    prepared = fh.Plan(fh.on("0", fh.Zero(), at="generated")).prepare(model)
    request = prepared.open()
    batch = fh.batch(
        {request: slice(0, 3)}, positions=torch.arange(3), lengths={request: [1, 2, 3]}
    )
    with pytest.raises(fh.errors.RowsError, match="has one prompt") as refused, batch:
        pass
    assert refused.value.member is request
    with pytest.raises(fh.HookTypeError, match="lengths must be one or several 64-bit ints"):
        fh.batch({request: slice(0, 3)}, positions=torch.arange(3), lengths={request: "3"})
    with fh.batch({request: slice(0, 3)}, positions=torch.arange(3), lengths={request: 3}):
        model(torch.randn(3, WIDTH))


def raises(_positions: torch.Tensor) -> torch.Tensor:
    msg = "on purpose"
    raise fh.errors.RowsError(msg)


FAILING = {
    "raises": raises,
    "shape": lambda _: torch.ones(1, 5, dtype=torch.bool),
    "fewer dimensions": lambda positions: torch.ones(positions.shape[-1], dtype=torch.bool),
    "dtype": lambda positions: positions,
    "type": lambda positions: (positions == 0).tolist(),
}


@pytest.mark.parametrize("what", FAILING)
@pytest.mark.parametrize("way", ["flat", "padded", "flat moves", "padded moves", "sites"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_function_of_positions_that_fails_fails_its_request(
    model: nn.Sequential, what: str, way: str, keeps: bool
) -> None:
    at: Any = FAILING[what]
    entry = fh.keep("0", at=at) if keeps else fh.on("0", fh.Add(torch.ones(WIDTH)), at=at)
    good = fh.Plan(fh.on("0", fh.Add(torch.ones(WIDTH)), at=0), fh.keep("0")).prepare(model).open()
    bad = fh.Plan(entry).prepare(model).open()
    x = torch.randn(2, WIDTH)
    plain = model[0](x)
    if "padded" in way:
        positions, given, rows = torch.tensor([[0], [0]]), x[:, None], {bad: 0, good: 1}
    else:
        positions, given, rows = torch.tensor([0, 0]), x, {bad: 0, good: 1}
    with contextlib.ExitStack() as stack:
        if way == "sites":
            open_sites = fh.rows.sites(model, "0", max_requests=4, max_rows=4, width=WIDTH)
            stack.enter_context(open_sites)
        if "moves" in way:
            batch = stack.enter_context(fh.batch(rows, size=2))
            batch.move(positions)
        else:
            stack.enter_context(fh.batch(rows, positions=positions))
        output = model[0](given).reshape(2, WIDTH)
    assert torch.equal(output, torch.stack([plain[0], plain[1] + 1]))
    assert torch.equal(good.acts["0"], output[1:])
    assert good.error is None
    assert bad.failed
    assert isinstance(bad.error, fh.errors.RowsError if what == "raises" else fh.HookTypeError)


def test_a_function_of_positions_that_fails_ends_no_generation(model: nn.Sequential) -> None:
    good = fh.Plan(fh.keep("0")).prepare(model).open()
    bad = fh.Plan(fh.on("0", fh.Zero(), at=raises)).prepare(model).open()
    huge = fh.Plan(fh.on("0", fh.Zero(), at=2**70)).prepare(model).open()
    x = torch.randn(3, 2, WIDTH)
    with fh.rows.generating([good, bad, huge]):
        output = model(x)
    assert torch.equal(output, model(x))
    assert good.acts["0"].shape == (2, WIDTH)
    assert (good.error, huge.error, bad.failed) == (None, None, True)


def test_an_interrupt_in_a_function_of_positions_is_everybody_s(model: nn.Sequential) -> None:
    def interrupts(_positions: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    for positions in (torch.tensor([0]), torch.tensor([[0]])):
        request = fh.Plan(fh.keep("0", at=interrupts)).prepare(model).open()
        with pytest.raises(KeyboardInterrupt), fh.batch({request: 0}, positions=positions):
            pass
        assert not request.failed


@pytest.mark.parametrize("sites", [False, True])
def test_lengths_that_are_missing_are_refused_at_the_door(
    model: nn.Sequential, sites: bool
) -> None:
    request = fh.Plan(fh.keep("0", at="generated")).prepare(model).open()
    with contextlib.ExitStack() as stack:
        if sites:
            open_sites = fh.rows.sites(model, "0", max_requests=4, max_rows=4, width=WIDTH)
            stack.enter_context(open_sites)
        shapes = [(1,)] if sites else [(1,), (1, 1)]
        for shape in shapes:
            batch = fh.batch({request: 0}, positions=torch.zeros(shape, dtype=torch.long))
            with pytest.raises(fh.errors.RowsError, match="pass lengths") as refused, batch:
                pass
            assert refused.value.member is request
            assert not request.failed


def test_lengths_are_one_for_each_row_or_one_for_all(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0", at="generated")).prepare(model).open()
    positions = torch.zeros(3, 2, dtype=torch.long)
    lengths: Any = {request: [1, 2]}
    batch = fh.batch({request: slice(0, 3)}, positions=positions, lengths=lengths)
    with pytest.raises(fh.errors.RowsError, match="2 prompts for a request with 3 rows"), batch:
        pass
    with pytest.raises(fh.HookTypeError, match="64-bit ints"):
        fh.batch({request: 0}, positions=torch.zeros(1, dtype=torch.long), lengths={request: 2**70})
