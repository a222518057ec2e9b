"""Numbers of graphs: hooks, captures and instrumented layers compile as little as they can."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import ferrohook as fh
from support.compiling import BACKENDS, compiles
from support.numbers import close

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = compiles

LAYERS = 12  # more than Dynamo's recompile limit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Attention(nn.Module):
    """Returns a tensor and weights, those on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, weights: bool = False) -> Any:
        y = self.linear(x)
        return (y, y.softmax(-1)) if weights else (y,)


def layered() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inputs", [False, True])
def test_captures_of_modules_captured_before_share_one_graph(backend: str, inputs: bool) -> None:
    model, x = layered(), torch.randn(3, 4)
    counter = CompileCounterWithBackend(backend)
    with fh.instrument(model), torch.no_grad():
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        compiled(x)
        assert counter.frame_count == 1
        with fh.capture(model, "*", inputs=inputs):
            compiled(x)
        assert counter.frame_count == 2
        for layer in range(LAYERS):
            selection = [str(layer), str((layer + 5) % LAYERS)]
            with fh.capture(model, selection, inputs=inputs) as eager:
                model(x)
            with (
                fh.capture(model, selection, inputs=inputs) as acts,
                fh.capture(model, selection[0], inputs=inputs) as nested,
            ):
                compiled(x)
            assert {*acts} == {*selection}
            assert [*nested] == selection[:1]
            assert all(close(acts[name], eager[name]) for name in selection)
        compiled(x)
    assert counter.frame_count == 2


def test_a_call_without_a_capture_has_no_operators() -> None:
    model, x = layered(), torch.randn(3, 4)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def operators(graph: torch.fx.GraphModule) -> int:
        return sum("ferrohook.record" in str(node.target) for node in graph.graph.nodes)

    with fh.instrument(model):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with fh.capture(model, ["3", "5"]):
            compiled(x)
        compiled(x)
    assert [operators(graph) for graph in graphs] == [2, 0]


def test_a_capture_compiled_in_one_context_leaves_those_of_others_alone() -> None:
    model, x = layered(), torch.randn(3, 4)
    counter = CompileCounter()
    with fh.instrument(model):
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with fh.capture(model, "*"):
            compiled(x)
        wrong: list[Any] = []

        def capture_one(layer: int) -> None:
            for _ in range(20):
                own = torch.randn(3, 4)
                with fh.capture(model, str(layer)) as acts:
                    compiled(own)
                with fh.capture(model, str(layer)) as eager:
                    model(own)
                if [*acts] != [str(layer)] or not close(acts[str(layer)], eager[str(layer)]):
                    wrong.append(layer)

        threads = [threading.Thread(target=capture_one, args=(layer,)) for layer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert counter.frame_count == 1


def test_an_operator_whose_module_is_not_selected_breaks_no_graph() -> None:
    model, x = nn.ModuleDict({"attention": Attention(), "last": nn.Linear(4, 4)}), torch.ones(3, 4)
    with fh.instrument(model):

        def call(weights: bool) -> Tensor:
            return model["last"](model["attention"](x, weights)[0])

        broken = torch.compile(call, backend="eager")
        with fh.capture(model, "attention") as acts:  # a tuple: no operator can take it
            broken(True)
        assert len(acts["attention"]) == 2
        whole = torch.compile(call, backend="eager", fullgraph=True)
        with fh.capture(model, "attention", output_index=1) as acts:
            whole(True)
        assert acts["attention"].shape == (3, 4)
        with fh.capture(model, "last") as acts:
            expected = whole(False)  # without weights
        assert close(acts["last"], expected)
        with (
            fh.capture(model, "attention", output_index=1),
            pytest.raises(fh.SelectionError, match="no output_index 1"),
        ):
            broken(False)


@pytest.mark.parametrize("make", [Block, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
@pytest.mark.parametrize("order", ["instrumented", "compiled"])
def test_layers_compiled_one_by_one_share_graphs(make: Callable[[], nn.Module], order: str) -> None:
    def graphs(instrumented: bool) -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        layers = [make() for _ in range(20)]
        instrument = [fh.instrument] if instrumented else []
        for layer in layers if order == "instrumented" else []:
            [each(layer) for each in instrument]
        compiled = [torch.compile(layer, backend=counter, fullgraph=True) for layer in layers]
        for layer in layers if order == "compiled" else []:
            [each(layer) for each in instrument]
        x = torch.randn(3, 4)
        for layer, call in zip(layers, compiled, strict=True):
            assert close(call(x), layer(x))
            x = call(x)
        return counter.frame_count

    assert graphs(instrumented=True) == graphs(instrumented=False)


@pytest.mark.parametrize("order", ["instrumented", "compiled"])
def test_hooks_and_captures_of_layers_compiled_one_by_one_share_graphs(order: str) -> None:
    counter = CompileCounter()
    layers = nn.Sequential(*(Block() for _ in range(20)))
    if order == "instrumented":
        fh.instrument(layers)
    compiled = [torch.compile(layer, backend=counter, fullgraph=True) for layer in layers]
    if order == "compiled":
        fh.instrument(layers)
    x = torch.randn(3, 4)

    def run() -> Tensor:
        y = x
        for layer in compiled:
            y = layer(y)
        return y

    with torch.no_grad():
        assert close(run(), layers(x))
        assert counter.frame_count == 1
        with fh.capture(layers, "*.first") as eager:
            layers(x)
        with fh.capture(layers, "*.first") as acts:
            run()
        assert counter.frame_count == 2
        assert [*acts] == [*eager]
        assert all(close(acts[name], eager[name]) for name in eager)
        with fh.register(layers, "*.first", lambda _module, _args, output: output * 2):
            assert close(run(), layers(x))
        assert counter.frame_count == 3


# --- `NeverFiredWarning` -------------------------------------------------------------------------


def double(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 2


def test_a_hook_in_a_graph_counts_as_fired() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fh.errors.NeverFiredWarning)
        for _ in range(2):  # the second time from the cache of graphs
            with fh.register(model, "0", double) as handles:
                assert close(compiled(x), (model[0](x)).relu())
                assert all(handle.traced for handle in handles)
            assert close(fh.run(compiled, x, hooks={"_orig_mod.0": double})[0], compiled(x) * 2)
        output, acts = fh.run(compiled, x, hooks={"_orig_mod.0": double}, capture="_orig_mod.1")
        assert close(acts["_orig_mod.1"], output)


def test_a_hook_that_no_graph_has_is_still_warned_of() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    with fh.instrument(model):
        compiled = torch.compile(model[0], backend="eager", fullgraph=True)
        with (
            pytest.warns(fh.errors.NeverFiredWarning, match="'1'"),
            fh.register(model, "1", double),
        ):
            compiled(x)
        with (
            pytest.warns(fh.errors.NeverFiredWarning, match="'0'"),
            fh.register(model, "0", double),
        ):
            pass
        with (
            pytest.warns(fh.errors.NeverFiredWarning, match="no gradient reached '0'"),
            fh.register(model, "0", lambda *_: None, phase="backward"),
        ):
            torch.compile(model, backend="eager")(x)


@pytest.mark.parametrize("how", ["prepared", "hooked"])
def test_a_graph_serves_all_openings_of_a_plan(how: str) -> None:
    """Nothing of ours is open in between, so its classes are garbage unless they are kept."""
    model, counter = layered(), CompileCounter()
    target = fh.HookedModule(model) if how == "hooked" else model
    plan = fh.Plan(fh.on("3", fh.Add(torch.ones(4))))
    compiled = torch.compile(target, backend=counter, fullgraph=True)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            with plan.prepare(model) as prepared, prepared.open():
                assert close(compiled(x), target(x))
            del prepared
            gc.collect()
    assert counter.frame_count == 1
