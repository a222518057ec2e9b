"""Structures in batches: tensors with rows of the batch, and others of every length beside them.

The oracle picks rows by hand. A request sees, changes and captures its own rows of a tensor that
has the rows of the batch, and any other tensor whole, however its rows were written down.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

pytest.importorskip("transformers")
from support.structures import Named, Output, Pair

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, WIDTH = 8, 3
FORMS: dict[str, tuple[Any, Any]] = {
    "slices": (slice(0, 2), slice(4, 5)),
    "ranges": (range(3), range(5, 7)),
    "lists": ([5, 0, 2], [4]),
    "tensors": (torch.tensor([1, 0]), torch.tensor([7, 3, 2])),
    "strided": (slice(0, 8, 4), slice(1, 8, 2)),
    "all": (slice(0, 8), []),
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "ferrohook")


MAKES: dict[str, Callable[..., Any]] = {
    "tuple": lambda one, other: (one, other),
    "list": lambda one, other: [one, other],
    "named tuple": Named,
    "dict": lambda one, other: {"first": one, "second": other},
    "nested": lambda one, other: {"a": [one, (other, "text")], "b": None},
    "dataclass": Pair,
    "model output": Output,
}


def leaves(value: Any) -> list[Tensor]:
    """Tensors of a structure, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, Pair):
        return leaves((value.first, value.second))
    return (
        [leaf for each in value for leaf in leaves(each)] if isinstance(value, list | tuple) else []
    )


def picked(tensor: Tensor, rows: Any) -> Tensor:
    """Rows of a tensor with the batch's rows, in the order given; other tensors whole."""
    if tensor.dim() == 0 or len(tensor) != SIZE:
        return tensor
    return tensor[torch.arange(SIZE)[list(rows) if isinstance(rows, range) else rows]]


class Made(nn.Module):
    """Returns a structure of its input and other tensors."""

    def __init__(self, make: Callable[..., Any], other: Tensor) -> None:
        super().__init__()
        self.make, self.other = make, other

    def forward(self, x: Tensor) -> Any:
        return self.make(x * 2, self.other)


class First(nn.Module):
    """A part of a model whose output is a structure."""

    def __init__(self, make: Callable[..., Any], other: Tensor) -> None:
        super().__init__()
        self.part = Made(make, other)

    def forward(self, x: Tensor) -> Tensor:
        return leaves(self.part(x))[0]


OTHERS = {
    **{f"of {rows}": torch.arange(rows * 2.0).reshape(rows, 2) for rows in (1, 2, 3, 4, 5, 7, 9)},
    "of none": torch.zeros(0, 2),
    "a number": torch.tensor(7.0),
}


@pytest.mark.parametrize("python", [False, True], ids=["native", "beside Python"])
@pytest.mark.parametrize("copy", ["checked", "clone", "ref"])
@pytest.mark.parametrize("form", FORMS)
def test_a_capture_of_a_structure_has_each_tensor_as_alone(
    form: str, copy: Any, *, python: bool
) -> None:
    x = torch.arange(SIZE * WIDTH * 1.0).reshape(SIZE, WIDTH)
    for kind, make in MAKES.items():
        for what, other in OTHERS.items():
            model = First(make, other)
            entries: list[Any] = [fh.keep("part", copy=copy)]
            if python:
                entries.insert(0, fh.on("part", lambda *_: None))
            with fh.Plan(*entries).prepare(model) as plan, torch.no_grad():
                own = dict(zip((plan.open(), plan.open()), FORMS[form], strict=True))
                with fh.batch(own, size=SIZE, warn=False):
                    model(x)
                for request, rows in own.items():
                    if not len(picked(x, rows)):
                        continue
                    assert request.error is None
                    got = request.acts["part"]
                    expected = make(picked(x * 2, rows), other)
                    assert type(got) is type(expected), (kind, what)
                    for one, right in zip(leaves(got), leaves(expected), strict=True):
                        assert torch.equal(one, right), (kind, what)


def test_requests_share_no_tensor_that_has_no_rows() -> None:
    """Writes of one reader to its captures reach no other."""
    model = First(MAKES["tuple"], OTHERS["of 3"].clone())
    with fh.Plan(fh.keep("part", copy="clone")).prepare(model) as plan:
        a, b = plan.open(), plan.open()
        with fh.batch({a: slice(0, 2), b: [5, 3]}, size=SIZE):
            model(torch.ones(SIZE, WIDTH))
        a.acts["part"][1].fill_(-1.0)
        assert torch.equal(b.acts["part"][1], OTHERS["of 3"])
        assert torch.equal(model.part.other, OTHERS["of 3"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(SIZE, WIDTH), (SIZE, SIZE, WIDTH)], ids=["rows", "square"])
def test_an_index_of_a_tensor_counts_the_rows_of_the_request(
    form: str, shape: tuple[int, ...]
) -> None:
    model, x = nn.Identity(), torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    before = x.clone()
    add = fh.Add(torch.ones(WIDTH), output_index=0)
    plan = fh.Plan(fh.keep("", output_index=0, label="before"), fh.on("", add))
    with plan.prepare(model) as prepared:
        own = dict(zip((prepared.open(), prepared.open()), FORMS[form], strict=True))
        with fh.batch(own, size=SIZE, warn=False):
            y = model(x)
        assert torch.equal(x, before)
        expected = x.clone()
        for request, rows in own.items():
            picks = picked(torch.arange(SIZE), rows)
            if len(picks):
                assert torch.equal(request.acts["before:"], x[picks[0]])
                expected[picks[0]] += 1
        assert torch.equal(y, expected)
