"""Plans: requests opened for each call, and native interventions."""

from __future__ import annotations

import contextvars
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import torch
from torch import nn

import ferrohook as fh
from benches.harness import Group, Row, Sampler, expect, one_thread, timed
from benches.rows.calls import instrumented
from benches.rows.models import LAYERS, collected, expect_activations, model_calls, stack

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

NAMES = [str(number) for number in range(LAYERS)]
FEW, MANY = 4, 480
PLANS = 10_000


def calls_in(
    opened: Callable[[], AbstractContextManager[object]], model: nn.Module, x: torch.Tensor
) -> Sampler:
    """Calls of a model, a request or a capture opened for each."""

    def loop(count: int) -> None:
        with one_thread(), torch.no_grad():
            for _ in repeat(None, count):
                with opened():
                    model(x)

    return timed(loop)


def kept_for_each_call() -> dict[str, Sampler]:
    """All outputs of a stack of layers, anew for each call."""
    x = torch.randn(1, 64)
    plan, append = fh.Plan(fh.keep(NAMES)), collected(stack())
    with torch.no_grad(), plan.prepare(model := stack()) as prepared, prepared.open() as request:
        model(x)
        expect_activations(dict(request.acts), x)
        expect(all(map(torch.equal, append(x), request.acts.values())), "the list's activations")
    kept, captured = stack(), instrumented(stack())
    capture = partial(fh.capture, captured, NAMES)
    return {
        "48 layers, plain": model_calls(stack(), x),
        "48 layers, a list by PyTorch's hooks": model_calls(append, x),
        "48 layers kept, a request for each call": calls_in(plan.prepare(kept).open, kept, x),
        "48 layers captured, a capture for each call": calls_in(capture, captured, x),
    }


def added(vector: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A stack of layers with PyTorch's hooks that add a vector."""

    def add(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        return output + vector

    model = stack()
    for layer in model.children():
        layer.register_forward_hook(add)
    return model


def steered() -> dict[str, Sampler]:
    """A vector added to all outputs of a stack of layers."""
    x, vector = torch.randn(1, 64), torch.randn(64)
    theirs, ours = added(vector), stack()
    fh.register(ours, NAMES, fh.Add(vector))
    with torch.no_grad():
        expect(torch.equal(theirs(x), ours(x)), "the sum that PyTorch's hooks make")
    return {
        "48 layers, PyTorch's hooks return output + v": model_calls(theirs, x),
        "48 layers, Add": model_calls(ours, x),
    }


def opened() -> dict[str, Sampler]:
    """Opening and closing a request, by the number of modules."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    def open_and_close(modules: int) -> Sampler:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(modules)))
        prepared = fh.Plan(fh.on([str(n) for n in range(modules)], fh.Zero())).prepare(model)
        x = torch.ones(1, 1)
        with prepared.open():
            expect(bool(model(x) == 0), "an output of zeros")

        def loop(count: int) -> None:
            for _ in repeat(None, count):
                with prepared.open():
                    pass
            expect(isinstance(model, nn.Module), "the model alive")

        return timed(loop)

    def set_and_reset(count: int) -> None:
        for _ in repeat(None, count):
            token = variable.set(1)
            variable.reset(token)

    return {
        "contextvars, set + reset": timed(set_and_reset),
        f"open + close, a plan over {FEW} modules": open_and_close(FEW),
        f"open + close, a plan over {MANY} modules": open_and_close(MANY),
    }


def idle() -> dict[str, Sampler]:
    """A model that many plans were prepared for, none of them open."""
    x = torch.randn(1, 64)
    plain, model = instrumented(stack()), instrumented(stack())
    plans = [fh.Plan(fh.on(name, fh.Add(torch.ones(64)))) for name in NAMES]
    prepared = [plans[number % LAYERS].prepare(model) for number in range(PLANS)]
    with torch.no_grad():
        expect(torch.equal(model(x), plain(x)), "the output without plans")
    expect(not any(each.closed for each in prepared), "plans that are not closed")

    def loop(count: int) -> None:
        with one_thread(), torch.no_grad():
            for _ in repeat(None, count):
                model(x)
        expect(len(prepared) == PLANS, "the plans alive")

    return {
        "48 layers, no plans": model_calls(plain, x),
        "48 layers, 10,000 plans prepared": timed(loop),
    }


GROUPS = [
    Group(
        name="plans that keep 48 linear layers",
        setup=kept_for_each_call,
        rows=[
            Row(name="48 layers kept, a request for each call", over="48 layers, plain", bar=1.05),
            Row(
                name="48 layers kept, a request for each call",
                over="48 layers, a list by PyTorch's hooks",
                bar=0.80,
            ),
            Row(
                name="48 layers captured, a capture for each call",
                over="48 layers, a list by PyTorch's hooks",
                bar=1.00,
            ),
        ],
    ),
    Group(
        name="a vector added to 48 linear layers",
        setup=steered,
        rows=[
            Row(
                name="48 layers, Add",
                over="48 layers, PyTorch's hooks return output + v",
                bar=0.85,
            )
        ],
    ),
    Group(
        name="opening a plan",
        setup=opened,
        rows=[
            Row(
                name=f"open + close, a plan over {MANY} modules",
                over=f"open + close, a plan over {FEW} modules",
                bar=1.30,
            ),
            Row(
                name=f"open + close, a plan over {FEW} modules",
                over="contextvars, set + reset",
                bar=8.00,
            ),
        ],
    ),
    Group(
        name="plans prepared and not open",
        setup=idle,
        rows=[Row(name="48 layers, 10,000 plans prepared", over="48 layers, no plans", bar=1.05)],
    ),
]
