"""Interventions under torch.compile."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.compiling import compiled
from support.plans import Net, forward_hook

WIDTH = 4


class Counting:
    """A backend that counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def of(kind: str, seed: int) -> Any:
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return {
        "add": lambda: fh.Add(vector, 1.0 + seed),
        "scale": lambda: fh.Scale(1.0 + seed),
        "ablate": lambda: fh.Ablate(vector),
        "clamp": lambda: fh.Clamp(vector, -0.1 * seed, 0.1),
        "replace": lambda: fh.Replace(vector),
        "zero": fh.Zero,
    }[kind]()


def expected(model: nn.Module, intervention: Any, x: torch.Tensor) -> torch.Tensor:
    plain = copy.deepcopy(model)
    for layer in ("embed", "head"):
        plain.get_submodule(layer).register_forward_hook(forward_hook(intervention))
    return plain(x)  # type: ignore[no-any-return]


@compiled
@pytest.mark.parametrize("kind", ["add", "scale", "ablate", "clamp", "replace", "zero"])
@pytest.mark.parametrize("way", ["register", "scope", "plan", "nested"])
def test_another_vector_needs_no_other_trace(kind: str, way: str) -> None:
    model = Net(WIDTH)
    plain = copy.deepcopy(model)
    backend = Counting()
    with fh.instrument(model):
        call = torch.compile(model, backend=backend, fullgraph=True)
        x = torch.randn(2, WIDTH)
        for seed in range(4):
            intervention = of(kind, seed)
            plan = fh.Plan(fh.on(["embed", "head"], intervention))
            if way == "register":
                with fh.register(model, ["embed", "head"], intervention):
                    y = call(x)
            elif way == "plan":
                with plan.prepare(model) as prepared, prepared.open():
                    y = call(x)
            else:
                with fh.scope() as scope:
                    fh.register(model, ["embed", "head"], intervention, scope=scope)
                    if way == "nested":
                        with fh.Plan(fh.keep("act")).prepare(model) as prepared:
                            with prepared.open() as request:
                                y = call(x)
                            assert list(request.acts) == ["act"]
                    else:
                        y = call(x)
            assert torch.equal(y, expected(plain, intervention, x))
        assert backend.graphs == 1


@compiled
def test_a_trained_vector_gets_its_gradient() -> None:
    grads = []
    for compiling in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(WIDTH)
        vector = torch.randn(WIDTH, requires_grad=True)
        with fh.register(model, "embed", fh.Ablate(vector)):
            call: Any = (
                torch.compile(model, backend="eager", fullgraph=True) if compiling else model
            )
            for _ in range(2):
                call(torch.ones(2, WIDTH)).square().sum().backward()
        grads.append(vector.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    assert torch.allclose(grads[0], grads[1])


@compiled
@pytest.mark.parametrize("part", [0, 1, -1, "sum"])
@pytest.mark.parametrize("kind", ["add", "ablate"])
def test_parts_in_graphs(kind: str, part: Any) -> None:
    vector = torch.randn(WIDTH)
    classes: dict[str, Any] = {"add": fh.Add, "ablate": fh.Ablate}
    intervention = classes[kind](vector, output_index=part)
    model = Net(WIDTH)
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.register_forward_hook(forward_hook(intervention))
    x = torch.randn(2, WIDTH)
    plan = fh.Plan(fh.on("blocks.*", intervention))
    with plan.prepare(model) as prepared, prepared.open():
        y = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(y, plain(x))


@compiled
def test_a_plan_that_takes_effect_in_a_compiled_model_is_not_reported_as_silent() -> None:
    model = Net(WIDTH)
    x = torch.randn(2, WIDTH)
    steered_alone = expected(model, fh.Scale(2.0), x)
    call = torch.compile(model, backend="eager", fullgraph=True)
    with fh.Plan(fh.on(["embed", "head"], fh.Scale(2.0))).prepare(model) as prepared:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("error", fh.NeverFiredWarning)
                with prepared.open():
                    steered = call(x)
            torch.testing.assert_close(steered, steered_alone)
