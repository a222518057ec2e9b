"""Compiled models on a GPU: vectors there, and kernels that are replayed as CUDA graphs."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch.fx.passes.split_module import split_module

import ferrohook as fh
from ferrohook.rows import operators as sites_operators
from support.compiling import compiles
from support.gpu import waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WIDTH = 8
LAYERS = 3

pytestmark = compiles


def make_models(layers: int = LAYERS) -> tuple[nn.Sequential, nn.Sequential]:
    """Returns a model on the GPU and on the CPU."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    model.requires_grad_(requires_grad=False)
    return copy.deepcopy(model).cuda(), model


def vector(seed: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


# --- Vectors of interventions --------------------------------------------------------------------

BY_VECTOR: tuple[Callable[[Tensor], Any], ...] = (
    lambda vector: fh.Add(vector, 0.5),
    fh.Ablate,
    lambda vector: fh.Clamp(vector, -0.1, 0.1),
    lambda vector: fh.Clamp(vector, low=0.1),
    lambda vector: fh.Add(vector[None]),
    fh.Replace,
)


def by_hand(model: nn.Sequential, interventions: Iterable[Any], x: Tensor) -> Tensor:
    """Output of a model on the CPU with layers changed."""
    for layer, intervention in zip(model, interventions, strict=True):
        x = intervention.apply(layer(x))
    return x


@pytest.mark.cuda
def test_a_vector_is_copied_to_the_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the host, in a graph that takes other vectors too: no copy in a warm call."""
    copies: list[Tensor] = []
    pin = Tensor.pin_memory

    def pin_memory(tensor: Tensor, *args: Any) -> Tensor:
        copies.append(tensor)
        return pin(tensor, *args)

    on_gpu, on_cpu = make_models(len(BY_VECTOR))
    counter = CompileCounter()
    compiled = torch.compile(on_gpu, backend=counter, fullgraph=True)
    x = torch.randn(4, WIDTH)
    there = x.cuda()
    with torch.no_grad():
        for seed in range(3):
            changes = [make(vector(seed)) for make in BY_VECTOR]
            entries = [fh.on(str(layer), change) for layer, change in enumerate(changes)]
            with fh.Plan(*entries).prepare(on_gpu) as prepared, prepared.open():
                if seed == 0:
                    compiled(there)  # traced: waits for the trace's questions
                with monkeypatch.context() as patch, waits() as found:
                    patch.setattr(Tensor, "pin_memory", pin_memory)
                    first = compiled(there)
                    made = len(copies)
                    outputs = [first, compiled(there), compiled(there)]
                assert found == []
                assert len(copies) == made == seed * len(BY_VECTOR)
                for out in outputs:
                    assert torch.allclose(out.cpu(), by_hand(on_cpu, changes, x), atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_vector_is_used_behind_what_made_it(device: str) -> None:
    """The graph runs on another stream than the one that makes the vector, or copies it."""
    on_gpu, on_cpu = make_models()
    compiled = torch.compile(on_gpu, backend="eager", fullgraph=True)
    x = torch.randn(4, WIDTH)
    there = x.cuda()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.no_grad():
        for seed in range(3):
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000_000)
                made = vector(seed).to(device, non_blocking=True)
                intervention = fh.Add(made)
                with fh.register(on_gpu, "*", intervention):
                    if device == "cpu":
                        compiled(there)  # copies it
                    with torch.cuda.stream(torch.cuda.default_stream()):
                        out = compiled(there)
            expected = by_hand(on_cpu, [fh.Add(vector(seed))] * LAYERS, x)
            assert torch.allclose(out.cpu(), expected, atol=1e-5)


@pytest.mark.cuda
def test_a_vector_that_is_trained_is_copied_in_the_graph() -> None:
    on_gpu, on_cpu = make_models()
    compiled = torch.compile(on_gpu, backend="eager", fullgraph=True)
    x, trained = torch.randn(4, WIDTH), vector(0).requires_grad_()
    with fh.register(on_gpu, "*", fh.Add(trained, 2.0)):
        for _ in range(2):
            out = compiled(x.cuda())
            expected = by_hand(on_cpu, [fh.Add(trained, 2.0)] * LAYERS, x)
            assert torch.allclose(out.cpu(), expected, atol=1e-5)
            assert out.requires_grad
            with torch.no_grad():
                trained.mul_(2)


# --- Graphs that are replayed --------------------------------------------------------------------


def test_inductor_leaves_captures_out_of_cuda_graphs() -> None:
    left: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        unsafe = [node for node in graph.graph.nodes if is_cudagraph_unsafe_fx_node(node)]
        left.extend(str(node.target) for node in unsafe)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    backend = aot_autograd(fw_compiler=compile_graph)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), fh.capture(model, "*") as acts:
        compiled(x)
    assert torch.equal(acts["0"], model[0](x))
    assert left == ["ferrohook.record.default"] * 2


def test_operators_that_act_on_the_host_are_left_out_of_cuda_graphs() -> None:
    """`steer` and `tap` alone are made to be replayed: they read and write tables alone."""
    sites_operators.define()
    names = [
        name.removeprefix("ferrohook::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("ferrohook::")
    ]
    tags = {name: getattr(torch.ops.ferrohook, name).default.tags for name in names}
    replayed = {name for name, own in tags.items() if torch.Tag.cudagraph_unsafe not in own}
    assert {"record", "steer", "tap"} <= tags.keys()
    assert replayed == {"change", "steer", "tap"}


class Replayed(nn.Module):
    """A part of a graph that is replayed as a CUDA graph, as Inductor does it: the outputs are
    written again by the next replay.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.graph: torch.cuda.CUDAGraph | None = None

    def forward(self, *args: Tensor) -> Any:
        if self.graph is None:
            self.inputs = [each.clone() for each in args]
            self.part(*args)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.part(*self.inputs)
        for own, each in zip(self.inputs, args, strict=True):
            if own.is_cuda:  # the value read from the host is part of the graph
                own.copy_(each)
        self.graph.replay()
        return self.outputs


def replay(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """Compiles for CUDA graphs around the operators that Inductor leaves out of them."""
    numbers, parts = itertools.count(), {}
    number = next(numbers)
    for node in graph.graph.nodes:
        unsafe = is_cudagraph_unsafe_fx_node(node)
        number = next(numbers) if unsafe else number
        parts[node] = number
        number = next(numbers) if unsafe else number
    split = split_module(graph, graph, parts.__getitem__)
    for name, part in [*split.named_children()]:
        if not any(is_cudagraph_unsafe_fx_node(node) for node in part.graph.nodes):
            setattr(split, name, Replayed(part))
    return split.forward


@pytest.mark.cuda
def test_each_replay_is_captured_and_changed() -> None:
    """Vectors come and go between replays, on either device."""
    on_gpu, on_cpu = make_models()
    compiled = torch.compile(on_gpu, backend=aot_autograd(fw_compiler=replay), fullgraph=True)
    kept = []
    with torch.no_grad():
        for seed in range(6):
            made = vector(seed) if seed % 2 else vector(seed).cuda()
            x = torch.randn(4, WIDTH)
            plan = fh.Plan(fh.on(["0", "1"], fh.Add(made)), fh.keep("*"))
            with plan.prepare(on_gpu) as prepared, prepared.open() as request:
                out = compiled(x.cuda())
            expected = []
            h = x
            for number, layer in enumerate(on_cpu):
                h = layer(h) + (vector(seed) if number < 2 else 0)
                expected.append(h)
            assert torch.allclose(out.cpu(), h, atol=1e-4)
            kept.append((request.acts, expected))
    for acts, expected in kept:
        for name, value in enumerate(expected):
            assert torch.allclose(acts[str(name)].cpu(), value, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.not_emulated("kernels of Inductor")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_each_call_of_a_replayed_graph_is_captured(mode: str) -> None:
    on_gpu, on_cpu = make_models()
    compiled = torch.compile(on_gpu, mode=mode, fullgraph=True)
    for seed in range(6):
        x, intervention = torch.randn(4, WIDTH), fh.Add(vector(seed))
        plan = fh.Plan(fh.on("0", intervention), fh.keep(["0", "2"]))
        with torch.no_grad(), plan.prepare(on_gpu) as prepared, prepared.open() as request:
            out = compiled(x.cuda())
            first = intervention.apply(on_cpu[0](x))
            assert torch.allclose(out.cpu(), on_cpu[1:](first), atol=1e-4)
        assert torch.allclose(request.acts["0"].cpu(), first, atol=1e-4)
        assert torch.allclose(request.acts["2"].cpu(), on_cpu[1:](first), atol=1e-4)
