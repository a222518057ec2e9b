"""Writes in place by hooks of a batch's members, against each request alone.

A write changes the rows of its member as it does alone: in every tensor that shares the memory, the
caller's too, with the same gradients; and it reaches no other member, whose backward is its own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, WIDTH = 6, 4
FORMS: dict[str, tuple[Any, Any]] = {
    "slices": (slice(0, 2), slice(3, 5)),
    "lists": ([2, 0], [5, 3]),
    "mixed": (slice(1, 3), slice(0, 6, 4)),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "ferrohook")


def views(y: Tensor, *of: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    return tuple(view(y) for view in of)


def itself(y: Tensor) -> Tensor:
    return y


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "fresh": lambda x: x * 2,
    "its input": lambda x: x,
    "a view of its input": lambda x: x[..., 1:],
    "fresh, and its input": lambda x: (x * 2, x),
    "one twice": lambda x: views(x * 2, itself, itself),
    "one, and a view of it": lambda x: views(x * 2, itself, lambda y: y[..., :2]),
    "two views": lambda x: views(x * 2, lambda y: y[..., :2], lambda y: y[..., 1:]),
    "chunks": lambda x: (x * 2).chunk(2, -1),
    "one, and an empty view at its end": lambda x: views(x * 2, itself, lambda y: y[..., WIDTH:]),
    "another shape": lambda x: views(x * 2, itself, lambda y: y.view(-1, 2, 2).mT),
    "saved by its operation": lambda x: x.exp(),
    "saved, and a view of it": lambda x: views(x.sigmoid(), itself, lambda y: y.view(-1, 2, 2)),
    "expanded": lambda x: x[:, :1].expand(len(x), WIDTH),
    "expanded, of all rows": lambda x: (x * 2, torch.ones(1, WIDTH).expand(len(x), WIDTH)),
    "one, and it expanded": lambda x: views(x * 2, itself, lambda y: y[:, :1].expand_as(y)),
}


class Part(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(x)


class Residual(nn.Module):
    """Uses the input of its part again, as residual streams are."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.part = Part(output)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.5
        out = self.part(h)
        total = h.square().sum(1)
        for each in [out] if isinstance(out, Tensor) else out:
            total = total + each.flatten(1).sum(1)
        return total


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [*output]


def first(_m: object, _a: object, out: Any) -> None:
    tensors(out)[0].mul_(3.0)


def last(_m: object, _a: object, out: Any) -> None:
    tensors(out)[-1].mul_(3.0)


def both(_m: object, _a: object, out: Any) -> None:
    tensors(out)[0].mul_(3.0)
    tensors(out)[-1].add_(1.0)


def again(_m: object, _a: object, out: Any) -> Any:
    tensors(out)[0].mul_(3.0)
    return type(out)(each + 1 for each in out) if isinstance(out, tuple) else out + 1


def argument(_m: object, args: tuple[Tensor], _out: object) -> None:
    args[0].mul_(3.0)


def before(_m: object, args: tuple[Tensor]) -> None:
    args[0].mul_(3.0)


def before_again(_m: object, args: tuple[Tensor]) -> Tensor:
    args[0].mul_(3.0)
    return args[0] + 1


def saves(_m: object, _a: object, out: Any) -> Any:
    """Has autograd save its input."""
    return type(out)(map(torch.sin, out)) if isinstance(out, tuple) else torch.sin(out)


WRITES = (first, last, both, again, argument, before, before_again)


def run(model: nn.Module, x: Tensor, mode: str, context: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the output of a call in a context, and the gradient of its input."""
    x = x.clone().requires_grad_(mode == "grad")
    with context:
        y = model(x)
    if mode == "grad":
        y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_write_is_that_of_the_request_alone(form: str, output: str, mode: str) -> None:
    torch.manual_seed(0)
    model, x, rows = Residual(OUTPUTS[output]), torch.randn(SIZE, WIDTH), FORMS[form]
    for write in WRITES:
        phase: Any = "forward_pre" if write in {before, before_again} else "forward"
        reader = fh.Plan(fh.on("part", saves), fh.keep("part"))
        writer = fh.Plan(fh.on("part", write, phase=phase), fh.keep("part"))
        with (
            MODES[mode](),
            reader.prepare(model) as one,
            writer.prepare(model) as other,
        ):
            members = one.open(), other.open()
            y, grad = run(
                model, x, mode, fh.batch(dict(zip(members, rows, strict=True)), size=SIZE)
            )
            assert members[0].error is None, write
            for member, plan, own in zip(members, (one, other), rows, strict=True):
                alone = plan.open()
                try:
                    expected, gradient = run(model, x[own], mode, alone)
                except RuntimeError:
                    assert member is members[1]  # what it must not write: the other goes on
                    continue
                assert member.error is None, (write, member.error)
                torch.testing.assert_close(y[own], expected)
                if gradient is not None and grad is not None:
                    torch.testing.assert_close(grad[own], gradient)
                if member is members[0]:
                    kept = zip(
                        tensors(member.acts["part"]), tensors(alone.acts["part"]), strict=True
                    )
                    for got, right in kept:
                        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("mode", ["no_grad", "grad", "inference"])
@pytest.mark.parametrize("form", ["slices", "lists"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_write_to_what_all_rows_share_reaches_nobody_else(
    form: str, mode: str, *, raises: bool
) -> None:
    table = torch.arange(9.0).reshape(3, 3)
    model = Part(lambda x: (x * 2, table))
    seen = []

    def guilty(_m: object, _a: object, out: Any) -> None:
        out[1].mul_(2.0)
        if raises:
            raise ValueError

    def reader(_m: object, _a: object, out: Any) -> None:
        seen.append(out[1].clone())

    with (
        MODES[mode](),
        fh.Plan(fh.on("", guilty)).prepare(model) as plan,
        fh.Plan(fh.on("", reader)).prepare(model) as reading,
    ):
        request, other = plan.open(), reading.open()
        first, second = FORMS[form][:2]
        with fh.batch({request: first, other: second}, size=SIZE):
            out = model(torch.ones(SIZE, WIDTH))
        if raises:
            assert isinstance(request.error, ValueError)
        else:
            assert isinstance(request.error, fh.RowsError)
            assert "guilty" in str(request.error)
            assert "no rows of the batch" in str(request.error)
        assert other.error is None
        assert out[1] is table
        for each in (table, *seen):
            assert torch.equal(each, torch.arange(9.0).reshape(3, 3))
        assert len(seen) == 1


def test_memory_that_copies_cannot_share_is_refused() -> None:
    def guilty(_m: object, _a: object, out: Any) -> None:
        out[0].mul_(3.0)

    # Rows of the second are not in the blocks of the first's rows.
    model = Part(lambda x: views(x * 2, itself, lambda y: y.view(WIDTH, SIZE).t()))
    with torch.no_grad(), fh.Plan(fh.on("", guilty)).prepare(model) as plan:
        request = plan.open()
        with fh.batch({request: [4, 1]}, size=SIZE):
            model(torch.ones(SIZE, WIDTH))
        assert "guilty" in str(request.error)
        assert "shares memory" in str(request.error)
