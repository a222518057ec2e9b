"""Compiled models on a GPU, whose kernels Inductor replays as CUDA graphs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import is_cudagraph_unsafe_fx_node

import ferrohook as fh
from ferrohook.rows import operators as sites_operators
from support.compiling import compiles

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = compiles


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
    assert replayed == {"steer", "tap"}


@pytest.mark.cuda
@pytest.mark.not_emulated("kernels of Inductor")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_each_call_of_a_replayed_graph_is_captured(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model.requires_grad_(requires_grad=False)
    on_gpu = copy.deepcopy(model).cuda()
    compiled = torch.compile(on_gpu, mode=mode, fullgraph=True)

    def call(x: Tensor) -> None:
        with fh.capture(on_gpu, ["0", "2"]) as acts:
            out = compiled(x.cuda())
            assert torch.allclose(out.cpu(), model(x), atol=1e-5)
            for name, layers in (("0", model[:1]), ("2", model)):
                assert torch.allclose(acts[name].cpu(), layers(x), atol=1e-5)

    for _ in range(6):
        call(torch.randn(4, 8))
