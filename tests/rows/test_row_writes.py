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
    """Makes autograd save its input."""
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
                    assert member is members[1]  # a write that it must not make: the other goes on
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
            assert isinstance(request.error, fh.errors.RowsError)
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


def doubled_in_place(_module: object, args: tuple[Any, ...], _output: object) -> None:
    args[0].mul_(2)


class Reused(nn.Module):
    """Uses the input of its parts again, which may write to it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        h = x - 1
        return self.part(h) + 10 * h


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("replaces", ["native", "a function"])
@pytest.mark.parametrize("writer", ["member", "module"])
def test_an_argument_that_another_member_replaced_is_written_where_it_was(
    writer: str, replaces: str, form: str, mode: str
) -> None:
    """The module writes, for rows without an owner too, and so do hooks of the other member."""
    if writer == "module" and mode == "inference":
        pytest.skip("torch counts no writes in inference mode: docs/rows.md")
    model = Reused(nn.ReLU(inplace=True) if writer == "module" else nn.Identity())
    replace = fh.Scale(3.0) if replaces == "native" else lambda _m, args: (args[0] * 3,)
    plans = [
        fh.Plan(fh.on("part", replace, phase="forward_pre")),
        fh.Plan(fh.on("part", doubled_in_place)) if writer == "member" else fh.Plan(),
    ]
    rows, x = FORMS[form], torch.arange(SIZE * WIDTH).reshape(SIZE, WIDTH) % 5 - 2.0

    def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
        x = x.clone().requires_grad_(mode == "grad")
        y = model(x)
        return y.detach(), torch.autograd.grad(y.sum(), [x])[0] if mode == "grad" else None

    with MODES[mode]():
        requests = [plan.prepare(model).open() for plan in plans]
        with fh.batch(dict(zip(requests, rows, strict=True)), size=SIZE, warn=False):
            ours = run(model, x)
        assert [request.error for request in requests] == [None, None]
        nobody = sorted({*range(SIZE)} - {row for each in rows for row in taken(each)})
        for own, plan in ((nobody, fh.Plan()), *zip(map(taken, rows), plans, strict=True)):
            with plan.prepare(model).open():
                right = run(model, x[own])
            for one, other in zip(ours, right, strict=True):
                assert other is None or torch.equal(one[own], other)


def taken(rows: Any) -> list[int]:
    return [*range(SIZE)][rows] if isinstance(rows, slice) else rows


def test_an_argument_put_in_two_places_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """The batch has two tensors for it, and the module would compute with both."""

    class Sum(nn.Module):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return x + other

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum = Sum()

        def forward(self, x: Tensor) -> Tensor:
            return self.sum(x * 1, x + 1)

    model = Model()
    swap = fh.on("sum", lambda _m, args: (args[0], args[0]), phase="forward_pre")
    reads, writes = fh.Plan(swap), fh.Plan(swap, fh.on("sum", doubled_in_place))
    requests = [plan.prepare(model).open() for plan in (reads, writes)]
    with torch.no_grad(), fh.batch(dict(zip(requests, ([0], [1]), strict=True)), size=2):
        y = model(torch.tensor([[1.0], [2.0]]))
    assert requests[0].error is None
    assert y[0] == 2
    assert isinstance(requests[1].error, fh.errors.RowsError)
    assert "shares memory with another" in str(requests[1].error)


def test_an_intervention_of_no_token_is_not_judged() -> None:
    """Alone it does not run: beside a member with Python hooks, and beside none."""
    model = Reused(nn.Identity())
    wide = fh.Plan(fh.on("part", fh.Add(torch.ones(WIDTH + 1)), at="last_prompt"))
    for beside in (fh.Plan(fh.on("part", doubled_in_place)), fh.Plan(fh.on("part", fh.Scale(2.0)))):
        requests = [plan.prepare(model).open() for plan in (wide, beside)]
        positions, lengths = torch.tensor([4, 4]), dict.fromkeys(requests, 2)
        rows = dict(zip(requests, ([0], [1]), strict=True))
        with torch.no_grad(), fh.batch(rows, positions=positions, lengths=lengths, warn=False):
            model(torch.ones(2, WIDTH))
        assert [request.error for request in requests] == [None, None]
