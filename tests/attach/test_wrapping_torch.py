"""torch's utilities on wrappers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import ferrohook as fh
from support.modules import Zero
from support.wrapping import x


def test_functional_call() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 2))
    hooked.register_forward_hook(lambda _module, _args, output: output + 1)
    state = {"weight": torch.zeros(2, 4), "bias": torch.ones(2)}
    for module, prefix in ((hooked, ""), (nn.Sequential(hooked), "0.")):
        named = {prefix + name: value for name, value in state.items()}
        output = torch.func.functional_call(module, named, (x(),))
        assert torch.equal(output, torch.full((2, 3, 2), 2.0))
    assert hooked.weight.any()


@pytest.mark.parametrize("on", ["wrapper", "inner", "inner before"])
def test_parametrize(on: str) -> None:
    linear = nn.Linear(4, 2)
    if on == "inner before":
        parametrize.register_parametrization(linear, "weight", Zero())
    hooked = fh.HookedModule(linear)
    target: nn.Module = hooked if on == "wrapper" else linear
    if on != "inner before":
        hooked(x())
        parametrize.register_parametrization(target, "weight", Zero())
    assert torch.equal(hooked(x()), linear.bias.expand(2, 3, 2))
    assert not hooked.weight.any()
    assert parametrize.is_parametrized(hooked)
    parametrize.remove_parametrizations(target, "weight", leave_parametrized=False)
    assert type(linear) is nn.Linear
    assert hooked(x()).any()
    parametrizations.weight_norm(hooked)
    hooked(x()).sum().backward()


@pytest.mark.filterwarnings("ignore")  # torch warns that these functions are deprecated
def test_jit_trace_records_the_hooks_and_script_is_refused_with_the_reason() -> None:
    hooked = fh.HookedModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    hooked.register_forward_hook(lambda _module, _args, output: output * 2)
    hooked.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    for module in (hooked, nn.Sequential(nn.Linear(4, 4), hooked)):
        assert torch.equal(torch.jit.trace(module, x())(x()), module(x()))
    for module in (hooked, nn.Sequential(hooked)):
        with pytest.raises(fh.HookError, match=r"script the module inside, hooked\.inner"):
            torch.jit.script(module)
    scripted = fh.HookedModule(torch.jit.script(nn.Linear(4, 4)))
    scripted.register_forward_hook(lambda _module, _args, output: output * 2)
    assert torch.equal(scripted(x()), scripted.inner(x()) * 2)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_has_the_hooks_in_the_graph(strict: bool) -> None:
    hooked = fh.HookedModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    hooked.register_forward_hook(lambda _module, _args, output: output * 2)
    for module in (hooked, nn.Sequential(hooked)):
        exported = torch.export.export(module, (x(),), strict=strict)
        assert torch.equal(exported.module()(x()), module(x()))


def test_data_parallel_replicas_share_the_hooks() -> None:
    hooked = fh.HookedModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    handle = hooked.register_forward_hook(lambda _module, _args, output: output * 2)
    # The steps of torch.nn.parallel.replicate, which itself needs a GPU.
    replica = hooked._replicate_for_data_parallel()
    child = hooked[0]._replicate_for_data_parallel()
    for name, parameter in hooked[0].named_parameters():
        setattr(child, name, parameter.detach().clone())
    setattr(replica, "0", child)
    assert replica.inner is not hooked.inner
    assert replica[0] is child
    assert hooked[0] is not child
    assert torch.equal(replica(x()), hooked(x()))
    assert handle.calls == 2
    handle.remove()
    assert torch.equal(replica(x()), hooked.inner(x()))


@pytest.mark.cuda
@pytest.mark.not_emulated("DataParallel")
def test_data_parallel() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4)).cuda()
    hooked.register_forward_hook(lambda _module, _args, output: output * 2)
    parallel = nn.DataParallel(hooked, device_ids=[0])
    assert torch.equal(parallel(x().cuda()), hooked(x().cuda()))


def test_prune_and_the_old_norms_work_on_a_wrapper() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    prune.l1_unstructured(hooked, "weight", 2)
    prune.l1_unstructured(hooked, "weight", 2)
    hooked(x())
    assert (hooked.weight == 0).sum() == 4
    prune.remove(hooked, "weight")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that these functions are deprecated
        nn.utils.spectral_norm(hooked)
        hooked(x())
        nn.utils.remove_spectral_norm(hooked)
        nn.utils.weight_norm(hooked)
        hooked(x())
        nn.utils.remove_weight_norm(hooked)
    assert list(hooked.state_dict()) == ["bias", "weight"]


def test_the_hooks_of_a_wrapper_in_a_transformer_layer_fire() -> None:
    """Its fast path would call no submodule."""
    layer: Any = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    layer.linear1 = hooked = fh.HookedModule(layer.linear1)
    handle = hooked.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        layer(x())
    assert handle.calls == 1
    assert not hooked._forward_hooks


def test_recompiling_a_wrapped_graph_module_takes_effect() -> None:
    hooked: Any = fh.HookedModule(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())))
    relu = next(node for node in hooked.graph.nodes if node.op == "call_module")
    relu.replace_all_uses_with(relu.args[0])
    hooked.recompile()
    for call in (hooked, hooked.forward, hooked.inner):
        assert torch.equal(call(x()), x())
