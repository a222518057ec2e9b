"""Captures over the steps of a request, which are joined as they are read."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ferrohook as fh
from support.rows import assert_same

if TYPE_CHECKING:
    from ferrohook.plans import Request

WIDTH = 4


class Moves(NamedTuple):
    """One step of a request: first token, number of tokens, and if it is read after the step."""

    start: int
    count: int
    read: bool


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Identity())


def step(model: nn.Sequential, request: Request, x: Tensor, start: int, dim: int = 0) -> Tensor:
    """Runs tokens of a request between padding; returns the output of the first module."""
    rows = slice(1, 1 + len(x))
    positions = torch.tensor([-1, *range(start, start + len(x)), -1])
    padded = torch.cat([torch.randn(1, WIDTH), x, torch.randn(1, WIDTH)])
    with fh.batch({request: rows}, dim, positions=positions, lengths={request: 1}):
        out: Tensor = model[0](padded if dim == 0 else padded[None])
    return out


@st.composite
def moves(draw: st.DrawFn) -> list[Moves]:
    """Steps of which some go back and recompute tokens, as after a preemption."""
    found: list[Moves] = []
    end = 0
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, end)) if draw(st.integers(0, 3)) == 0 else end
        count = draw(st.integers(1, 3))
        found.append(Moves(start, count, draw(st.booleans())))
        end = max(end, start + count)
    return found


def padded_step(
    model: nn.Sequential, request: Request, x: Tensor, start: int, *, left: bool
) -> None:
    """Runs tokens of a request as one padded row, beside a row of padding."""
    padding = torch.randn(2, WIDTH)
    positions, row = torch.arange(start, start + len(x)), [x, padding]
    both = [positions, torch.tensor([-1, -7])]
    if left:
        row, both = row[::-1], both[::-1]
    rows = torch.stack([torch.cat(row), torch.randn(len(x) + 2, WIDTH)])
    with fh.batch({request: 0}, positions=torch.stack([torch.cat(both)] * 2), lengths={request: 1}):
        model[0](rows)


LAYOUTS = ("rows", "columns", "left", "right")


@given(
    moves=moves(),
    layout=st.sampled_from(LAYOUTS),
    at=st.sampled_from([None, slice(None, None, 2)]),
    counts=st.booleans(),
    copy=st.sampled_from(["checked", "clone", "ref"]),
    dtype=st.sampled_from([None, torch.float64]),
)
def test_they_are_right_wherever_they_are_read(  # noqa: PLR0913, PLR0917 (drawn arguments)
    moves: list[Moves], layout: str, at: slice | None, counts: bool, copy: Any, dtype: Any
) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    entry = fh.keep("0", at=at, copy=copy, dtype=dtype)
    # A token that runs again replaces its row, so that this is enough; padding counts too.
    width = 4 * WIDTH * (1 if dtype is None else 2)
    tokens = {each for move in moves for each in range(move.start, move.start + move.count)} | {0}
    wanted = [each for each in tokens if at is None or each % 2 == 0]
    padding = 2 * (len(moves) + 1) if layout in {"left", "right"} and at is None else 0
    most = width * (len(wanted) + padding)
    prepared = fh.Plan(entry).prepare(model, max_bytes=most if counts else None)
    request = prepared.open()
    known: dict[int, Tensor] = {}
    for start, count, read in [*moves, Moves(0, 1, read=True)]:
        x = torch.randn(count, WIDTH)
        if layout in {"left", "right"}:
            padded_step(model, request, x, start, left=layout == "left")
        else:
            step(model, request, x, start, dim=LAYOUTS.index(layout))
        known |= {start + row: each for row, each in enumerate(x)}
        assert request.error is None
        expected = {each: known[each] for each in sorted(known) if at is None or each % 2 == 0}
        if read and expected:
            right = torch.stack([*expected.values()])
            assert_same(request.acts["0"], right if dtype is None else right.to(dtype))
            assert request.acts.positions("0") == [*expected]


def held(request: Request) -> int:
    """Bytes of the memory that a request keeps alive."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in request.collector(0).read(0, stale=True)
    }
    return sum(storages.values())


@pytest.mark.parametrize("max_bytes", [None, 2**30])
def test_what_runs_again_releases_what_was(model: nn.Sequential, max_bytes: int | None) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model, max_bytes=max_bytes).open()
    count = 40
    for tokens in range(count, 0, -1):  # all but one of the tokens of the step before
        step(model, request, torch.randn(tokens, WIDTH), 0)
        # Padding rows, and at most as many rows that ran again as are left.
        assert held(request) <= 4 * WIDTH * (2 * count + 4 * (count - tokens + 1))
    again = torch.randn(count, WIDTH)
    step(model, request, again, 0)
    assert held(request) <= 4 * WIDTH * (count + 2)
    assert torch.equal(request.acts["0"], again)


@pytest.mark.parametrize("read", [False, True])
def test_a_step_over_the_budget_replaces_nothing(model: nn.Sequential, read: bool) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model, max_bytes=4 * WIDTH * 4).open()
    x = torch.randn(4, WIDTH)
    step(model, request, x[:2], 0)
    step(model, request, x[2:], 2)
    if read:  # which joins the steps
        assert torch.equal(request.acts["0"], x)
    step(model, request, torch.randn(3, WIDTH), 2)
    assert isinstance(request.error, fh.errors.CaptureBudgetError)
    assert torch.equal(request.acts["0"], x)
    assert request.acts.positions("0") == [0, 1, 2, 3]


@pytest.mark.parametrize("first", range(8))
def test_steps_and_readers_that_come_between_lose_no_token(
    model: nn.Sequential, first: int
) -> None:
    """Runs steps, then another reader, in turn, where the functions that read start and end.

    `first`: number of starts and ends before.
    """
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    x = torch.randn(40, WIDTH)
    seen, ran = 0, 0
    found: list[Tensor] = []

    def between(frame: Any, event: str, _argument: object) -> Any:
        nonlocal seen, ran
        if not frame.f_code.co_filename.endswith("captured.py"):
            return None
        if event in {"call", "return"}:
            seen += 1
            turn = (seen - first) % 2 if seen > first else None
            for _ in range(2 if turn == 1 and ran < len(x) else 0):
                step(model, request, x[ran : ran + 1], ran)
                ran += 1
            if turn == 0:
                found.append(request.acts["0"])
        return between

    acts, tracer = request.acts, sys.gettrace()
    sys.settrace(between)
    try:
        with contextlib.suppress(fh.SelectionError):  # no step has run yet
            found.append(acts["0"])
    finally:
        sys.settrace(tracer)
    assert seen > 2
    assert all(torch.equal(each, x[: len(each)]) for each in found)
    assert first > 5 or ran == len(request.acts["0"]) > 0


def test_tensors_of_batches_are_released_as_they_are_read(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    outputs = [weakref.ref(step(model, request, torch.randn(2, WIDTH), 2 * at)) for at in range(3)]
    assert all(output() is not None for output in outputs)
    first = request.acts["0"]
    assert all(output() is None for output in outputs)
    assert request.acts["0"].data_ptr() == first.data_ptr()


def test_a_stale_step_is_told(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    step(model, request, torch.randn(2, WIDTH), 0)
    step(model, request, torch.randn(2, WIDTH), 2).add_(1)
    for _ in range(2):
        with pytest.raises(fh.StaleActivationError):
            request.acts["0"]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("copy", ["checked", "clone", "ref"])
def test_a_reader_that_writes_is_told(model: nn.Sequential, steps: int, copy: Any) -> None:
    request = fh.Plan(fh.keep("0", copy=copy)).prepare(model).open()
    for at in range(steps):
        step(model, request, torch.randn(1, WIDTH), at)
    request.acts["0"].add_(1)
    if copy == "checked":
        with pytest.raises(fh.StaleActivationError):
            request.acts["0"]
    else:
        assert len(request.acts["0"]) == steps


def test_what_is_joined_in_inference_mode_can_be_part_of_a_graph(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    with torch.inference_mode():
        for at in range(3):
            step(model, request, torch.randn(1, WIDTH), at)
        assert request.acts["0"].shape == (3, WIDTH)
    weight = torch.ones(WIDTH, requires_grad=True)
    (grad,) = torch.autograd.grad((request.acts["0"] * weight).sum(), weight)
    assert torch.equal(grad, request.acts["0"].sum(0))


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("again", [0, 3])
def test_they_are_read_by_threads_while_it_runs(model: nn.Sequential, again: int) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    x = torch.randn(200, WIDTH)
    step(model, request, x[:1], 0)
    wrong: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            found = request.acts["0"]
            if not torch.equal(found, x[: len(found)]):
                wrong.append(len(found))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for at in range(1, len(x)):
        first = max(at - again, 0)
        step(model, request, x[first : at + 1], first)
    done.set()
    for reader in readers:
        reader.join(30)
    assert not wrong
    assert torch.equal(request.acts["0"], x)
