"""Interventions under torch.compile."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

import ferrohook as fh
from support.compiling import compiled
from support.plans import Net, Tokens, forward_hook

WIDTH = 4


class Counting:
    """A backend that counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.codes: list[str] = []

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.graphs += 1
        self.codes.append(graph.code)
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
@pytest.mark.parametrize("kind", ["add", "ablate", "clamp", "replace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["own", "other"])
def test_a_vector_of_the_models_type_and_device_is_not_copied_in_a_graph(
    kind: str, dtype: torch.dtype
) -> None:
    """One of another is converted by each layer in each call."""
    copies: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        copies.extend(name for name in names if "_to_copy" in name or "device_put" in name)
        return graph.forward

    model = Net(WIDTH)
    plain = copy.deepcopy(model)
    vector = torch.ones(WIDTH, dtype=dtype)
    classes: dict[str, Any] = {
        "add": fh.Add,
        "ablate": fh.Ablate,
        "clamp": lambda direction: fh.Clamp(direction, 0.0, 1.0),
        "replace": fh.Replace,
    }
    intervention = classes[kind](vector)
    x = torch.randn(2, WIDTH)
    call = torch.compile(model, backend=aot_autograd(fw_compiler=compile_graph), fullgraph=True)
    with torch.no_grad(), fh.register(model, ["embed", "head"], intervention):
        assert torch.allclose(call(x), expected(plain, intervention, x))
    used = 1 if kind == "replace" else 2  # the second one overwrites the first
    assert len(copies) == (0 if dtype == torch.float32 else used)


@compiled
@pytest.mark.parametrize(
    "change",
    [fh.Scale(0.1), fh.Add(torch.ones(WIDTH, dtype=torch.float64), 0.1)],
    ids=["scale", "add"],
)
def test_numbers_are_exact_in_double_precision(change: Any) -> None:
    model, x = Net(WIDTH).double(), torch.randn(2, WIDTH, dtype=torch.float64)
    with fh.register(model, ["embed", "head"], change):
        y = torch.compile(model, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(y, model(x), rtol=1e-14, atol=1e-14)


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


class Named(NamedTuple):
    hidden: Any
    other: Any


@dataclasses.dataclass
class Record:
    hidden: Any
    other: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any
    other: Any = dataclasses.field(default=None, init=False)


class Structured(nn.Module):
    """A model with a layer that returns a structure."""

    def __init__(self, make: Any, read: Any) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.forward = make  # type: ignore[method-assign]
        self.read = read

    def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
        value = self.layer(x)
        return value, self.read(value) * 3


def attribute(value: Any) -> Any:
    return value.hidden


def item(value: Any) -> Any:
    return value["hidden"]


STRUCTURES: dict[str, tuple[Any, Any, Any]] = {
    "named by field": (lambda x: Named(x * 2, x), "hidden", attribute),
    "named by index": (lambda x: Named(x * 2, x), 0, attribute),
    "sum of named": (lambda x: Named(x * 2, x), "sum", attribute),
    "record": (lambda x: Record(x * 2, x), "hidden", attribute),
    "frozen": (lambda x: Frozen(x * 2), "hidden", attribute),
    "list": (lambda x: [x, x * 2], -1, lambda value: value[1]),
    "dict": (lambda x: {"hidden": x * 2, "other": x}, "hidden", item),
    "ordered": (lambda x: OrderedDict(hidden=x * 2, other=x), "hidden", item),
}


@compiled
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_in_graphs(structure: str) -> None:
    make, part, read = STRUCTURES[structure]
    check_structure(Structured(make, read), part)


@compiled
@pytest.mark.parametrize("structure", STRUCTURES)
def test_parts_of_structures_are_captured_in_graphs(structure: str) -> None:
    make, part, read = STRUCTURES[structure]
    model, x = Structured(make, read), torch.randn(2, WIDTH)
    captured = []
    for call in (model, torch.compile(model, backend="eager", fullgraph=True)):
        with fh.capture(model, "layer", output_index=part) as acts:
            call(x)
        captured.append(acts["layer"])
    assert torch.equal(*captured)


@dataclasses.dataclass(slots=True)
class Slotted:
    hidden: Any
    other: Any


@compiled
def test_objects_with_slots_change_outside_of_graphs() -> None:
    model = Structured(lambda x: Slotted(x * 2, x), attribute)
    x = torch.randn(2, WIDTH)
    with fh.register(model, "layer", fh.Add(torch.ones(WIDTH), output_index="hidden")):
        value, read = torch.compile(model, backend="eager")(x)
    torch.testing.assert_close(value.hidden, x * 2 + 1)
    torch.testing.assert_close(read, (x * 2 + 1) * 3)


@compiled
@pytest.mark.parametrize("part", [0, "last_hidden_state"])
def test_a_model_output_in_graphs(part: Any) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def make(x: torch.Tensor) -> Any:
        return outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x,))

    check_structure(Structured(make, lambda value: value.last_hidden_state + value[0]), part)


def check_structure(model: nn.Module, part: Any) -> None:
    intervention = fh.Ablate(torch.randn(WIDTH), output_index=part)
    x = torch.randn(2, WIDTH)
    with fh.register(model, "layer", intervention):
        value, read = model(x)
        value_compiled, read_compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert type(value_compiled) is type(value)
    torch.testing.assert_close(read_compiled, read)
    assert not torch.equal(read, model(x)[1])
    parts, parts_compiled = (
        tree_leaves(vars(each) if hasattr(each, "__dataclass_fields__") else each)
        for each in (value, value_compiled)
    )
    assert len(parts) == len(parts_compiled)
    for one, other in zip(parts, parts_compiled, strict=True):
        torch.testing.assert_close(one, other)


@compiled
def test_a_plan_that_takes_effect_in_a_compiled_model_is_not_reported_as_silent() -> None:
    model = Net(WIDTH)
    x = torch.randn(2, WIDTH)
    steered_alone = expected(model, fh.Scale(2.0), x)
    call = torch.compile(model, backend="eager", fullgraph=True)
    with fh.Plan(fh.on(["embed", "head"], fh.Scale(2.0))).prepare(model) as prepared:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("error", fh.errors.NeverFiredWarning)
                with prepared.open():
                    steered = call(x)
            torch.testing.assert_close(steered, steered_alone)


@compiled
@pytest.mark.parametrize(
    "plan",
    [
        fh.Plan(fh.on("head", fh.Scale(3.0), at=slice(1, None)), fh.keep("embed")),
        fh.Plan(fh.on("embed", lambda *call: call[-1] * 2, at="last_prompt"), fh.keep("embed")),
        fh.Plan(fh.on("head", fh.Scale(3.0)), fh.keep("embed", at=-1)),
    ],
    ids=["intervention", "function", "keep"],
)
@pytest.mark.parametrize("before", [True, False])
def test_positions_break_graphs_and_hold(plan: fh.Plan, before: bool) -> None:
    """The model is compiled before the plan is prepared, or after."""
    model = Tokens(WIDTH)
    backend = Counting()

    def calls() -> list[Any]:
        return [torch.compile(model, backend=backend, fullgraph=each) for each in (True, False)]

    former = calls()
    with plan.prepare(model) as prepared:
        whole, call = former if before else calls()
        # A capture stands in the graph: the model's own call breaks it.
        fits = before and plan.entries[1].at is not None
        refused = pytest.raises(
            torch._dynamo.exc.Unsupported, match="graphs do not support: at positions"
        )
        with contextlib.nullcontext() if fits else refused, prepared.open():
            whole(torch.tensor([[1, 2, 3]]))
        torch._dynamo.reset()
        for length in (3, 4, 3):
            ids = torch.arange(2 * length).reshape(2, length)
            with prepared.open() as eager:
                expected = model(ids)
            with prepared.open() as request:
                torch.testing.assert_close(call(ids), expected)
            torch.testing.assert_close(request.acts["embed"], eager.acts["embed"])
    # None of the functions that find positions.
    assert all("cumsum" not in code and "arange" not in code for code in backend.codes)
