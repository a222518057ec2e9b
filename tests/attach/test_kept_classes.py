"""Instrumented modules that keep their class."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh

KEPT = "1"

needs_gil = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="refused without the GIL"
)


def test_without_the_gil_it_is_refused(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's call would fail while torch's entries change."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(fh.HookError, match="without the GIL such a call fails"):
        fh.instrument(model, keep_class=KEPT)
    assert vars(model[1]).keys() == vars(nn.Linear(3, 3)).keys()
    assert type(model[0]) is nn.Linear


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU())


def double(_module: object, _args: object, output: Any) -> Any:
    return output * 2


@needs_gil
def test_the_class_is_kept_and_hooks_fire(model: nn.Sequential) -> None:
    x = torch.randn(2, 3)
    plain = model(x)
    with fh.instrument(model, keep_class=KEPT):
        assert type(model[1]) is nn.Linear
        assert type(model[0]) is not nn.Linear
        assert torch.equal(model(x), plain)
        group = fh.register(model, KEPT, double)
        seen: list[Any] = []
        model[1].register_forward_hook(lambda *call: seen.append(call[-1]))  # torch's own
        with fh.capture(model) as acts:
            model(x)
        right = nn.functional.linear(acts["0"], model[1].weight, model[1].bias)
        assert torch.equal(acts[KEPT], 2 * right)
        group.remove()
        assert len(seen) == 1
    assert vars(model[1]).keys() == vars(nn.Linear(3, 3)).keys()
    model[1]._forward_hooks.clear()
    assert torch.equal(model(x), plain)


@needs_gil
def test_every_phase_scope_plan_and_batch(model: nn.Sequential) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    twin = copy.deepcopy(model)

    def results(of: nn.Module) -> list[Any]:
        phases: list[Any] = []
        for phase in ("forward_pre", "forward", "backward_pre", "backward"):
            fh.register(of, KEPT, lambda *_call, phase=phase: phases.append(phase), phase=phase)
        with fh.scope() as s:
            fh.register(of, KEPT, double, scope=s)
            scoped = of(x)
        scoped.sum().backward()
        plan = fh.Plan(fh.on(KEPT, fh.Scale(3.0)), fh.keep(KEPT))
        with plan.prepare(of) as prepared:
            requests = [prepared.open() for _ in range(2)]
            with fh.batch({request: [row] for row, request in enumerate(requests)}):
                batched = of(x)
            kept = [request.acts[KEPT] for request in requests]
        return [phases, scoped, batched, *kept, of[1].weight.grad, of(x)]  # type: ignore[index]

    with fh.instrument(model, keep_class=KEPT), fh.instrument(twin):
        for ours, right in zip(results(model), results(twin), strict=True):
            assert ours == right if isinstance(ours, list) else torch.equal(ours, right)


@needs_gil
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_are_plain(model: nn.Sequential, duplicate: Any) -> None:
    with fh.instrument(model, KEPT, keep_class=KEPT):
        group = fh.register(model, KEPT, double)
        copied = duplicate(model[1])
        x = torch.randn(2, 3)
        assert torch.equal(copied(x) * 2, model[1](x))
        with torch.no_grad():  # the copy is called, not the original
            copied.bias = nn.Parameter(copied.bias + 1)
        assert torch.equal(copied(x), nn.functional.linear(x, copied.weight, copied.bias))
        assert not fh.hooks(copied)
        with fh.capture(copied) as acts:
            copied(x)
        assert [*acts] == [""]
        assert torch.equal(copied(x), acts[""])
        calls: list[Any] = []
        with fh.register(copied, "", lambda *call: calls.append(call)):
            model(x)
            assert not calls
            copied(x)
        assert len(calls) == 1
        group.remove()
    assert vars(model[1]).keys() == vars(nn.Linear(3, 3)).keys()


@needs_gil
def test_models_that_are_compiled_later_run_the_hooks(model: nn.Sequential) -> None:
    """Earlier ones do not guard torch's hooks either (`skip_nnmodule_hook_guards`)."""
    x = torch.randn(2, 3)
    plain = model(x)
    with torch.no_grad(), fh.instrument(model, keep_class=KEPT):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(x), plain)
        group = fh.register(model, KEPT, double)
        assert torch.equal(compiled(x), model(x))
        assert not torch.equal(compiled(x), plain)
        group.remove()
        assert torch.equal(compiled(x), plain)


@needs_gil
def test_a_transformer_layer_calls_its_modules() -> None:
    """Its fast path would not."""
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    with torch.no_grad(), fh.instrument(layer, keep_class="linear1"):
        calls: list[Any] = []
        fh.register(layer, "linear1", lambda *call: calls.append(call))
        layer(torch.randn(1, 3, 8))
    assert len(calls) == 1


@needs_gil
@pytest.mark.filterwarnings("ignore")  # torch warns that this function is deprecated
def test_script_refuses_it_with_the_reason(model: nn.Sequential) -> None:
    with (
        fh.instrument(model, KEPT, keep_class=KEPT),
        pytest.raises(fh.HookError, match=r"torch\.jit\.script cannot compile .* restore it first"),
    ):
        torch.jit.script(model)


@needs_gil
def test_what_cannot_keep_its_class_is_refused(model: nn.Sequential) -> None:
    with pytest.raises(fh.SelectionError):
        fh.instrument(model, keep_class="none")
    with (
        fh.instrument(model),
        pytest.raises(fh.HookError, match="'1' is already instrumented with another"),
    ):
        fh.instrument(model, keep_class=KEPT)
    model[1].compile(backend="eager")
    for select in (KEPT, None):
        with pytest.raises(fh.HookError, match="'1' was compiled with its compile"):
            fh.instrument(model, select, keep_class=KEPT)
        assert type(model[0]) is type(model[1]) is nn.Linear


@needs_gil
@torch.no_grad()
def test_calls_of_a_module_that_is_compiled_later_raise(model: nn.Sequential) -> None:
    """Its `compile` takes the place of the call that runs the hooks."""
    torch._dynamo.reset()
    x = torch.randn(2, 3)
    plain = model(x)
    with fh.instrument(model, keep_class=KEPT):
        group = fh.register(model, KEPT, double)
        model[1].compile(backend="eager")
        with pytest.raises(fh.HookError, match=r"compile\(\) .* of this Linear, .* would not fire"):
            model(x)
        copied = copy.copy(model[1])
        assert torch.equal(model[2](copied(model[0](x))), plain)
        group.remove()
        assert torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)
    assert vars(model[1]).keys() == vars(nn.Linear(3, 3)).keys() | {"_compiled_call_impl"}
    assert not model[1]._forward_pre_hooks


@needs_gil
def test_keys_of_torch_s_hooks_are_ints_as_torch_s_own(model: nn.Sequential) -> None:
    before = nn.Module.register_forward_pre_hook(model[1], lambda *_: None)
    with fh.instrument(model, keep_class=KEPT):
        after = nn.Module.register_forward_pre_hook(model[1], lambda *_: None)
        keys = [*model[1]._forward_pre_hooks]
        assert {type(key) for key in keys} == {int}
        assert len({*keys}) == 3
    assert [*model[1]._forward_pre_hooks] == [before.id, after.id]
    with fh.instrument(model, keep_class=KEPT):
        model[1]._forward_pre_hooks.clear()  # another library removed all hooks
    assert vars(model[1]).keys() == vars(nn.Linear(3, 3)).keys()


@needs_gil
def test_it_is_counted(model: nn.Sequential) -> None:
    first = fh.instrument(model, KEPT, keep_class=KEPT)
    second = fh.instrument(model)
    assert type(model[1]) is nn.Linear
    handle = model[0].register_forward_hook(double)
    group = fh.register(model, KEPT, double)
    x = torch.randn(2, 3)
    hooked = model(x)
    first.restore()
    assert torch.equal(model(x), hooked)
    handle.remove()
    group.remove()
    second.restore()
    assert vars(model[1]).keys() == vars(nn.Linear(3, 3)).keys()
