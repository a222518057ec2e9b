"""torch's utilities on instrumented modules."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import ferrohook as fh
from support.instrumentation import call, logging, same, small, torch_script, x
from support.internals import is_instrumented
from support.interpreters import assert_ends_well, run_with_torch
from support.modules import Zero


@pytest.mark.parametrize("removed", ["during", "after", "never"])
@pytest.mark.parametrize("registered", ["before", "during"])
def test_parametrize(registered: str, removed: str) -> None:
    linear = nn.Linear(4, 2)
    if registered == "before":
        parametrize.register_parametrization(linear, "weight", Zero())
    parametrized = type(linear)
    with fh.instrument(linear):
        handle = linear.register_forward_hook(lambda *_: None)
        if registered == "during":
            parametrize.register_parametrization(linear, "weight", Zero())
            parametrized = linear.__class__
        assert torch.equal(linear(x()), linear.bias.expand(2, 3, 2))
        assert type(linear).__name__ == "ParametrizedLinear"
        duplicate = copy.deepcopy(linear)
        assert torch.equal(duplicate(x()), linear(x()))
        assert handle.calls == 2
        fh.restore(duplicate)
        assert type(duplicate) is parametrized
        if removed == "during":
            parametrize.remove_parametrizations(linear, "weight")
            assert linear.__class__ is nn.Linear
            linear(x())
            assert handle.calls == 3
    if removed == "after":
        assert type(linear) is parametrized
        parametrize.remove_parametrizations(linear, "weight")
    assert type(linear) is (parametrized if removed == "never" else nn.Linear)
    assert torch.equal(linear(x()), linear.bias.expand(2, 3, 2))
    assert not any("ferrohook" in key for key in vars(linear))


def test_prune_and_the_norms() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        linear.register_forward_pre_hook(lambda *_: None)
        prune.l1_unstructured(linear, "weight", 2)
        prune.l1_unstructured(linear, "weight", 2)
        linear(x())
        assert prune.is_pruned(linear)
        assert (linear.weight == 0).sum() == 4
        prune.remove(linear, "weight")
        with warnings.catch_warnings(
            action="ignore"
        ):  # torch warns that these functions are deprecated
            nn.utils.spectral_norm(linear)
            linear(x())
            nn.utils.remove_spectral_norm(linear)
            nn.utils.weight_norm(linear)
            linear(x())
        parametrizations.orthogonal(linear, "weight_v")
    linear(x())
    with warnings.catch_warnings(action="ignore"):
        parametrize.remove_parametrizations(linear, "weight_v")
        nn.utils.remove_weight_norm(linear)
    assert type(linear) is nn.Linear
    assert not linear._forward_pre_hooks
    assert list(linear.state_dict()) == ["bias", "weight"]


def test_scripting_and_script_modules_are_refused_with_the_reason() -> None:
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(nn.Linear(4, 4), x())
    for scripted in (torch_script(nn.Linear(4, 4)), traced):
        model = nn.Sequential(scripted, nn.ReLU())
        before = type(scripted)
        with pytest.raises(fh.HookError, match=r"0 \(.*\): TorchScript runs it outside of Python"):
            fh.instrument(model, "0")
        with pytest.raises(fh.HookError, match="the model itself"):
            fh.instrument(scripted)
        assert not is_instrumented(model[1])
        expected = model(x())
        with pytest.warns(fh.errors.NotInstrumentedWarning, match="0 .*TorchScript"):
            fh.instrument(model)
        assert type(scripted) is before
        assert torch.equal(model(x()), expected)
        fh.restore(model)
        assert not is_instrumented(model)


@pytest.mark.filterwarnings("ignore")  # torch warns that these functions are deprecated
def test_script_compiles_a_model_without_hooks_and_refuses_hooks() -> None:
    with fh.instrument(model := small()):
        assert torch.equal(torch.jit.script(model)(x()), model(x()))
        model.first.register_forward_hook(lambda *_: None)
        with pytest.raises(fh.HookError, match="cannot compile hooks"):
            torch.jit.script(model)
        with pytest.raises(fh.HookError, match="cannot compile hooks"):
            torch.jit.script(nn.Sequential(model))
        model(x())
    assert type(model.first) is nn.Linear


@pytest.mark.filterwarnings("ignore")  # torch warns that these functions are deprecated
def test_jit_trace_records_the_hooks() -> None:
    with fh.instrument(model := small()):
        model.register_forward_hook(lambda _module, _args, output: output * 2)
        model.first.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
        nn.Module.register_forward_hook(model.first, lambda _module, _args, output: output + 3)
        traced = torch.jit.trace(model, x())
        assert torch.equal(traced(x()), model(x()))
        assert "first" in str(traced.graph)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_has_the_hooks_in_the_graph(strict: bool) -> None:
    with fh.instrument(model := small()):
        model.first.register_forward_hook(lambda _module, _args, output: output * 2)
        exported = torch.export.export(model, (x(),), strict=strict)
        expected = model(x())
    assert torch.equal(exported.module()(x()), expected)
    assert not torch.equal(model(x()), expected)


def test_a_graph_module() -> None:
    plain = torch.fx.symbolic_trace(small())
    model = copy.deepcopy(plain)
    cls = type(model)
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda _module, _args, output: output + 1)
        assert torch.equal(model(x()), plain(x()) + 1)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x()), plain(x()))
        for duplicate in (copy.deepcopy(model), copy.copy(model)):
            assert torch.equal(duplicate(x()), model(x()))
            fh.restore(duplicate)
            assert not is_instrumented(duplicate)
            assert torch.equal(duplicate(x()), plain(x()))
            assert torch.equal(copy.deepcopy(duplicate)(x()), plain(x()))
        relu = next(node for node in model.graph.nodes if node.target == "second")
        relu.replace_all_uses_with(relu.args[0])
        model.recompile()
        assert torch.equal(model(x()), plain.first(x()) + 1)
        calls = handle.calls
    assert type(model) is cls
    assert torch.equal(model(x()), plain.first(x()))
    assert handle.calls == calls


@pytest.mark.filterwarnings("ignore")  # torch warns that these functions are deprecated
def test_a_quantised_model() -> None:
    model = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), {nn.Linear, nn.LSTM}, dtype=torch.qint8
    )
    before = [type(each) for each in model]
    expected = call(model, (x(),))
    with fh.instrument(model):
        handles = [each.register_forward_hook(lambda *_: None) for each in model]
        assert same(call(model, (x(),)), expected)
        assert [handle.calls for handle in handles] == [1, 1]
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert same(call(duplicate, (x(),)), expected)
    assert [type(each) for each in model] == before


def test_a_lazy_module_is_initialised_while_instrumented() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with fh.instrument(model):
        handle = model[0].register_forward_hook(lambda *_: None)
        first = model(x())
        assert model[0].__class__ is nn.Linear
        assert repr(model[0]).startswith("Linear(")
        assert torch.equal(model(x()), first)
        assert handle.calls == 2
    assert [type(each) for each in model] == [nn.Linear, nn.BatchNorm1d]
    assert set(vars(model[0])) == set(vars(nn.Linear(4, 4)))


def test_functional_call() -> None:
    with fh.instrument(model := small()):
        model.first.register_forward_hook(lambda _module, _args, output: output + 1)
        state = {"first.weight": torch.zeros(4, 4), "first.bias": torch.ones(4)}
        output = torch.func.functional_call(model, state, (x(),))
        assert torch.equal(output, torch.full((2, 3, 4), 2.0))
        assert model.first.weight.any()


@pytest.mark.parametrize("select", ["layers.0.linear1", None])
def test_a_hook_disables_the_fast_path_of_transformer_layers(
    select: str | None,
) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        fast = model(x())
        with fh.instrument(model, select):
            assert torch.equal(model(x()), fast)
            linear = model.layers[0].linear1
            handle = linear.register_forward_hook(lambda *_: None)
            model(x())
            assert handle.calls == 1
            behind = nn.Module.register_forward_hook(linear, logging(log := [], "torch"))
            handle.remove()
            model(x())
            behind.remove()
            model(x())
            assert log == ["torch"]
            linear._forward_hooks = OrderedDict()
            assert not linear._forward_hooks
        with fh.capture(model, "layers.1.linear1") as acts:
            model(x())
        assert acts["layers.1.linear1"].shape == (2, 3, 8)
        assert torch.equal(model(x()), fast)


def test_compiled_in_place_and_back() -> None:
    model = nn.Linear(4, 4)
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda _module, _args, output: output + 1)
        model.compile(backend="eager")
        expected = model.forward(x())
        assert torch.equal(model(x()), expected + 1)
        assert handle.calls == 1
    assert torch.equal(model(x()), expected)


MODELS = """
x = torch.ones(1, 2)
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
"""


@pytest.mark.parametrize("way", ["instrument", "HookedModule"])
def test_a_library_that_wraps_the_call_of_all_modules_sees_instrumented_ones(way: str) -> None:
    code = f"""
called = fh.{way}(model)
called = model if "{way}" == "instrument" else called
seen = []
plain = nn.Module.__call__
def counting(module, *args, **kwargs):
    seen.append(module)
    return plain(module, *args, **kwargs)
for _ in range(6):
    nn.Module.__call__ = counting  # at first: before any hooked call
    called(x)
    assert seen == [model, *model], seen
    nn.Module.__call__ = plain
    called(x)
    assert len(seen) == 3
    seen.clear()
"""
    assert_ends_well(run_with_torch(MODELS + code))


def test_fx_keeps_leaf_modules_if_the_first_call_is_traced() -> None:
    code = """
fh.instrument(model)
for _ in range(6):
    graph = torch.fx.symbolic_trace(model).graph
    ops = [node.op for node in graph.nodes]
    assert ops == ["placeholder", "call_module", "call_module", "output"], ops
    assert torch.equal(model(x), model[1](model[0](x)))
"""
    assert_ends_well(run_with_torch(MODELS + code))


class Half(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, _tensor: Tensor, default_mask: Tensor) -> Tensor:
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


@pytest.mark.parametrize("wrap", [False, True])
def test_a_user_s_kind_of_pruning_works(wrap: bool) -> None:
    module: Any = nn.Linear(4, 4)
    if wrap:
        module = fh.HookedModule(module)
    else:
        fh.instrument(module)
    for _ in range(2):
        Half.apply(module, "weight")
    assert prune.is_pruned(module)
    prune.remove(module, "weight")
    assert not module.weight.view(-1)[::2].any()
    assert not prune.is_pruned(module)


def test_a_cuda_graph_is_refused_for_a_module_with_hooks() -> None:
    module, x = nn.Linear(4, 4), torch.ones(4)
    with fh.register(module, "", lambda *_: None):
        module(x)
        with pytest.raises(AssertionError, match="hooks"):
            torch.cuda.make_graphed_callables(module, (x,))
