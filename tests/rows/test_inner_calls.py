"""Hooks of a batch's members that call modules themselves, as a logit lens does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, ROWS = 4, 3
"""Rows of a member; a whole batch has them once for each."""
MEMBERS = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def entries(model: Model) -> dict[str, Callable[[], Any]]:
    """Makes entries of which some call the modules of others."""
    whole = torch.ones(MEMBERS * ROWS, WIDTH)

    def lens(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return output + model.norm(output)

    def before(_module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        return args[0] + model.norm(args[0])

    def as_many_rows(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return output + model.norm(whole).mean(0)

    def inside(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return output + model.layers[1](output)

    def doubled(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return output * 2

    return {
        "lens": lambda: fh.on("layers.0", lens),
        "lens before": lambda: fh.on("layers.1", before, phase="forward_pre"),
        "as many rows": lambda: fh.on("layers.1", as_many_rows),
        "inside": lambda: fh.on("layers.0", inside),
        "native": lambda: fh.on("norm", fh.Scale(3.0)),
        "python": lambda: fh.on("norm", doubled),
        "inner": lambda: fh.on("layers.1", fh.Add(torch.ones(WIDTH))),
        "keep": lambda: fh.keep("norm", calls="all"),
        "keep last": lambda: fh.keep("layers.1"),
    }


@pytest.mark.parametrize("seed", range(60))
def test_inner_calls_are_the_members_own(seed: int) -> None:
    """Each gets what it gets alone: hooks of others neither run in its calls nor see them."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    torch.manual_seed(seed)
    model = Model().requires_grad_(requires_grad=False)
    made = entries(model)
    plans = [
        fh.Plan(*(made[name]() for name in rng.sample([*made], rng.randrange(5))))
        for _ in range(MEMBERS)
    ]
    everywhere = [
        fh.register(model, "norm", lambda _m, _a, output: output + 1)
        for _ in range(rng.randrange(2))
    ]
    x = torch.randn(MEMBERS * ROWS, WIDTH)
    rows = [slice(ROWS * number, ROWS * number + ROWS) for number in range(MEMBERS)]
    alone = []
    for plan, own in zip(plans, rows, strict=True):
        with plan.open(model) as request:
            alone.append((model(x[own]), request))

    members = [plan.prepare(model).open() for plan in plans]
    with fh.batch(dict(zip(members, rows, strict=True))):
        together = model(x)

    for (output, expected), request, own in zip(alone, members, rows, strict=True):
        assert request.error is None
        torch.testing.assert_close(together[own], output)
        assert [*request.acts] == [*expected.acts]
        for name, value in expected.acts.items():
            torch.testing.assert_close(request.acts[name], value)
    for handle in everywhere:
        handle.remove()


def test_a_hook_that_fails_in_its_inner_call_fails_its_member() -> None:
    model = Model().requires_grad_(requires_grad=False)

    def lens(_module: nn.Module, _args: object, output: Tensor) -> None:
        model.norm(output)

    def raising(_module: nn.Module, _args: object, _output: Tensor) -> None:
        msg = "no lens"
        raise ValueError(msg)

    bad = fh.Plan(fh.on("layers.0", lens), fh.on("norm", raising)).prepare(model).open()
    good = fh.Plan(fh.on("norm", fh.Scale(2.0)), fh.keep("norm")).prepare(model).open()
    x = torch.randn(2 * ROWS, WIDTH)
    with fh.batch({bad: slice(ROWS), good: slice(ROWS, 2 * ROWS)}):
        model(x)
    assert isinstance(bad.error, ValueError)
    assert good.error is None
    torch.testing.assert_close(good.acts["norm"], 2 * model(x[ROWS:]))
