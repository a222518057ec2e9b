"""Captures over the steps of a request, which are joined as they are read."""

from __future__ import annotations

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
    """One step of a request: its tokens begin here, and are so many; it is read behind it."""

    start: int
    count: int
    read: bool


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Identity())


def step(model: nn.Sequential, request: Request, x: Tensor, start: int, dim: int = 0) -> Tensor:
    """Runs tokens of a request between those of nobody; returns what the first module returned."""
    rows = slice(1, 1 + len(x))
    positions = torch.tensor([-1, *range(start, start + len(x)), -1])
    padded = torch.cat([torch.randn(1, WIDTH), x, torch.randn(1, WIDTH)])
    with fh.batch({request: rows}, dim, positions=positions, lengths={request: 1}):
        out: Tensor = model[0](padded if dim == 0 else padded[None])
    return out


@st.composite
def moves(draw: st.DrawFn) -> list[Moves]:
    """Steps of which some go back and run tokens again, as behind a preemption."""
    found: list[Moves] = []
    end = 0
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, end)) if draw(st.integers(0, 3)) == 0 else end
        count = draw(st.integers(1, 3))
        found.append(Moves(start, count, draw(st.booleans())))
        end = max(end, start + count)
    return found


@given(moves=moves(), dim=st.integers(0, 1), at=st.sampled_from([None, slice(None, None, 2)]))
def test_they_are_right_wherever_they_are_read(
    moves: list[Moves], dim: int, at: slice | None
) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    request = fh.Plan(fh.keep("0", at=at)).prepare(model).open()
    known: dict[int, Tensor] = {}
    for start, count, read in [*moves, Moves(0, 1, read=True)]:
        x = torch.randn(count, WIDTH)
        step(model, request, x, start, dim)
        known |= {start + row: each for row, each in enumerate(x)}
        if read:
            expected = {each: known[each] for each in sorted(known) if at is None or each % 2 == 0}
            assert request.error is None
            if expected:
                assert_same(request.acts["0"], torch.stack([*expected.values()]))
            assert request.positions("0") == [*expected]


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


def test_bytes_of_joined_steps_are_counted_on(model: nn.Sequential) -> None:
    prepared = fh.Plan(fh.keep("0")).prepare(model, max_bytes=4 * WIDTH * 5)
    request = prepared.open()
    for at in range(5):
        step(model, request, torch.randn(1, WIDTH), at)
        assert len(request.acts["0"]) == at + 1
    assert request.error is None
    step(model, request, torch.randn(1, WIDTH), 5)
    assert isinstance(request.error, fh.CaptureBudgetError)


@pytest.mark.usefixtures("switch_often")
def test_they_are_read_by_threads_while_it_runs(model: nn.Sequential) -> None:
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
        step(model, request, x[at : at + 1], at)
    done.set()
    for reader in readers:
        reader.join(30)
    assert not wrong
    assert torch.equal(request.acts["0"], x)
