"""`HookPoint`: hooks, conversions, copies and files."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch

import ferrohook as fh
from ferrohook.compat.transformer_lens import HookPoint
from support.limits import LIMIT
from support.points import MID, Model, Transposed, adding, compiled_for, noting, observe, zero

# --- HookPoint ---


def test_a_point_returns_its_input_object() -> None:
    tensor = torch.ones(2)
    assert HookPoint()(tensor) is tensor


def test_a_hook_gets_the_tensor_and_the_point_and_may_replace_the_tensor() -> None:
    point, seen = HookPoint(), []

    def hook(tensor: torch.Tensor, hook: HookPoint) -> torch.Tensor:
        seen.append((tensor.clone(), hook))
        return tensor + 1

    handle = point.add_hook(hook)
    assert point(torch.ones(1)).item() == 2
    assert seen[0][0].item() == 1
    assert seen[0][1] is point
    assert handle.user_hook is hook
    assert handle.hook.calls == 1


def test_order_and_prepend() -> None:
    point, log = HookPoint(), []
    handles = [
        point.add_hook(noting(log, "a")),
        point.add_hook(noting(log, "b")),
        point.add_hook(noting(log, "first"), prepend=True),
        point.add_perma_hook(noting(log, "c")),
    ]
    point(torch.ones(1))
    assert log == ["first", "a", "b", "c"]
    assert point.fwd_hooks == [handles[2], handles[0], handles[1], handles[3]]
    assert point.bwd_hooks == []


def test_backward_hooks_get_the_gradient_and_may_replace_it() -> None:
    point, log = HookPoint(), []
    weight = torch.tensor([1.0, 2.0], requires_grad=True)

    def double(gradient: torch.Tensor, hook: HookPoint) -> torch.Tensor:
        log.append(gradient.clone())
        return gradient * 2

    point.add_hook(double, dir="bwd")
    point.add_hook(lambda gradient, hook: log.append(gradient.clone()), dir="bwd")
    (point(weight) * 3).sum().backward()
    # Each hook gets the output's gradient; the last value returned replaces it.
    assert [gradient.tolist() for gradient in log] == [[3, 3], [3, 3]]
    assert weight.grad is not None
    assert weight.grad.tolist() == [6, 6]
    assert len(point.bwd_hooks) == 2


def test_a_backward_hook_may_return_a_tuple_of_one() -> None:
    point = HookPoint()
    weight = torch.ones(1, requires_grad=True)
    point.add_hook(lambda gradient, hook: (gradient * 5,), dir="bwd")
    point(weight).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 5


def test_levels_and_permanent_hooks() -> None:
    point = HookPoint()
    for level in (1, 2, None):
        point.add_hook(observe, level=level)
    point.add_perma_hook(observe)
    point.add_hook(observe, "bwd", True, 1)
    assert point.has_hooks(level=1)
    assert not point.has_hooks(level=3)
    assert point.has_hooks("bwd", level=1)
    assert not point.has_hooks("bwd", including_permanent=False)

    point.remove_hooks(level=1)
    assert [handle.context_level for handle in point.fwd_hooks] == [2, None, None]
    point.remove_hooks()
    assert [handle.is_permanent for handle in point.fwd_hooks] == [True]
    point.remove_hooks("both", including_permanent=True)
    assert not point.has_hooks()


def test_a_handle_removes_only_its_hook_and_has_hooks_follows() -> None:
    point, log = HookPoint(), []
    handle = point.add_hook(noting(log, "a"))
    point.add_hook(noting(log, "b"))
    handle.remove()
    handle.remove()
    point(torch.ones(1))
    assert log == ["b"]
    point.fwd_hooks[0].hook.remove()  # idiom of TransformerLens users
    assert not point.has_hooks()
    assert point.fwd_hooks == []


def test_an_alias_is_a_view_with_another_name() -> None:
    point, seen = HookPoint(), []
    point.name = "blocks.0.hook"
    point.ctx["kept"] = 1
    point.enable_reshape(Transposed())

    def hook(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        seen.append((hook.name, hook.layer(), hook.ctx, hook.hook_conversion, tensor.sum().item()))
        return tensor + 1

    point.add_hook(hook, alias_names=["blocks.7.a", "blocks.8.b"])
    out = point(torch.zeros(2, 3))
    assert [row[:2] for row in seen] == [("blocks.7.a", 7), ("blocks.8.b", 8)]
    assert all(row[2] is point.ctx and row[3] is point.hook_conversion for row in seen)
    # Each call gets the return value of the previous one.
    assert [row[4] for row in seen] == [0, 6]
    assert out.tolist() == [[2] * 3] * 2


def test_a_replacement_by_an_earlier_aliased_call_is_not_lost() -> None:
    point = HookPoint()

    def only_first(tensor: torch.Tensor, hook: Any) -> torch.Tensor | None:
        return tensor + 1 if hook.name == "first" else None

    point.add_hook(only_first, alias_names=["first", "second"])
    assert point(torch.zeros(1)).item() == 1


def test_hooks_get_and_return_the_converted_tensor() -> None:
    point, shapes = HookPoint(), []
    point.enable_reshape(Transposed())

    def hook(tensor: torch.Tensor, hook: HookPoint) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor * 2

    point.add_hook(hook)
    point.add_hook(hook, "bwd")
    value = torch.randn(2, 5, requires_grad=True)
    out = point(value)
    out.sum().backward()
    assert shapes == [(5, 2), (5, 2)]
    assert torch.equal(out, value * 2)
    assert value.grad is not None
    assert torch.equal(value.grad, torch.full((2, 5), 2.0))
    point.enable_reshape()
    assert point.hook_conversion is None


def test_backward_scale_scales_full_reductions() -> None:
    point, sums = HookPoint(), []
    point.backward_scale = 3

    def hook(gradient: torch.Tensor, hook: HookPoint) -> torch.Tensor:
        sums.append((gradient.sum().item(), gradient.sum(0).tolist(), (gradient * 1).sum().item()))
        assert isinstance(gradient, torch.Tensor)
        return gradient

    point.add_hook(hook, "bwd")
    value = torch.ones(4, 2, requires_grad=True)
    point(value).sum().backward()
    # As in TransformerLens: only full reductions are scaled, and derived tensors are plain.
    assert sums == [(24, [4, 4], 8)]
    assert value.grad is not None
    assert type(value.grad) is torch.Tensor
    assert value.grad.tolist() == [[1, 1]] * 4


def test_ctx_is_shared_by_hooks_and_can_be_cleared() -> None:
    point = HookPoint()
    point.add_hook(lambda tensor, hook: hook.ctx.__setitem__("seen", tensor))
    point(torch.ones(1))
    held = point.ctx
    assert set(held) == {"seen"}
    point.clear_context()
    assert point.ctx == {}
    assert set(held) == {"seen"}


def test_repr_shows_name_and_hook_counts(model: Model) -> None:
    assert repr(HookPoint()) == "HookPoint()"
    model.add_hook(MID, observe)
    model.add_hook(MID, observe, dir="bwd")
    assert repr(model.hook_dict[MID]) == f"HookPoint(name={MID!r}, 1 fwd, 1 bwd)"
    assert repr(model.hook_dict[MID].fwd_hooks[0]).startswith("LensHandle(observe, hook=<HookHandl")


def test_captures_scopes_and_summaries_work_on_points(model: Model, x: torch.Tensor) -> None:
    rich = pytest.importorskip("rich.console")
    with fh.capture(model, MID) as acts:
        assert model.hook_dict[MID].has_hooks()
        assert model.hook_dict[MID].fwd_hooks == []
        model(x)
    assert acts[MID].shape == x.shape
    with fh.scope() as s, fh.register(model, MID, lambda module, args, out: out * 0, scope=s):
        model.hook_dict[MID].add_hook(observe, scope=s)
        text = io.StringIO()
        rich.Console(file=text, width=120).print(fh.summary(model))
        assert "observe" in text.getvalue()
        with fh.capture(model, MID) as acts:
            model(x)
    assert not acts[MID].any()
    assert not model.hook_dict[MID].has_hooks()
    handle = model.hook_dict[MID].register_forward_hook(lambda module, args, out: out * 0)
    assert isinstance(handle, fh.typing.HookHandle)
    with fh.instrument(model):
        pass
    with fh.capture(model, MID) as acts:
        model(x)
    assert not acts[MID].any()


def test_the_note_of_an_error_names_the_users_hook(model: Model, x: torch.Tensor) -> None:
    def broken(tensor: torch.Tensor, hook: HookPoint) -> None:
        msg = "mine"
        raise ArithmeticError(msg)

    with pytest.raises(ArithmeticError, match="mine") as caught:
        model.run_with_hooks(x, fwd_hooks=[(MID, broken)])
    assert "broken" in caught.value.__notes__[0]
    assert "HookPoint" in caught.value.__notes__[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hooks_of_a_point_compile_into_the_graph(model: Model, x: torch.Tensor) -> None:
    compiled = compiled_for(model, x)
    assert torch.equal(compiled(x), model(x))
    with model.hooks(fwd_hooks=[(MID, adding(1))]):
        assert torch.equal(compiled(x), model(x))
    handle = model.add_hook(MID, zero)
    assert torch.equal(compiled(x), model(x))
    handle.remove()
    model.hook_dict[MID].enable_reshape(Transposed())
    model.add_hook(MID, lambda tensor, hook: tensor[:1] * 0 + tensor)
    assert torch.equal(compiled(x), model(x))


# --- copies and files ---


def test_a_deep_copy_has_hooks_of_its_own(model: Model, x: torch.Tensor) -> None:
    seen: list[Any] = []

    def hook(tensor: torch.Tensor, hook: HookPoint) -> torch.Tensor:
        seen.append(hook)
        return tensor * 0

    kept = model.add_hook(MID, hook)
    point = model.hook_dict[MID]
    point.ctx["kept"] = torch.ones(1, requires_grad=True) * 2  # cannot be copied
    point.backward_scale = 2
    duplicate = copy.deepcopy(model)
    twin = duplicate.hook_dict[MID]
    assert twin.backward_scale == 2
    assert twin.ctx == {}
    assert torch.equal(duplicate(x), model(x))
    assert seen == [twin, point]

    kept.remove()
    assert not point.has_hooks()
    assert len(twin.fwd_hooks) == 1
    again = copy.deepcopy(duplicate).hook_dict[MID]
    duplicate.reset_hooks()
    assert not twin.has_hooks()
    assert torch.equal(duplicate(x), model(x))
    assert len(again.fwd_hooks) == 1
    with model.hooks([(MID, zero)]):
        # Hooks of a scope are not copied.
        assert not copy.deepcopy(model).hook_dict[MID].has_hooks()
    fh_copy = copy.deepcopy(model)
    with fh.instrument(fh_copy):
        pass
    assert fh_copy.add_hook(MID, zero).hook.enabled


def test_a_shallow_copy_shares_the_hooks() -> None:
    point = HookPoint()
    twin = copy.copy(point)
    handle = point.add_hook(zero)
    assert twin(torch.ones(1)).item() == 0
    twin.remove_hooks()
    assert handle.hook.removed


def test_saving_drops_hooks(model: Model, x: torch.Tensor) -> None:
    point = model.hook_dict[MID]
    model.add_hook(MID, lambda tensor, hook: tensor * 0)  # cannot be pickled
    point.ctx["lock"] = threading.Lock()
    point.enable_reshape(None)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded) is Model
    assert loaded.hook_dict[MID].ctx == {}
    assert not loaded.hook_dict[MID].has_hooks()
    model.reset_hooks()
    assert torch.equal(loaded(x), model(x))
    assert loaded.run_with_hooks(x, fwd_hooks=[("hook_out", zero)]).item() == 0
    assert model.state_dict().keys() == loaded.state_dict().keys()
    assert pickle.loads(pickle.dumps(point)).name == MID


def test_nothing_keeps_a_model_alive(x: torch.Tensor) -> None:
    model = Model()
    model.add_hook(MID, lambda tensor, hook, model=model: None)
    model.run_with_hooks(x, fwd_hooks=[(MID, lambda tensor, hook: None)])
    _, cache = model.run_with_cache(x, incl_bwd=True)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(cache) == 7  # x needs no gradient


def test_importing_ferrohook_imports_no_points() -> None:
    code = "import sys, ferrohook; assert not {'torch', 'ferrohook.compat'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)


@pytest.mark.filterwarnings("error")
def test_nothing_warns_in_an_ordinary_run(model: Model, x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        model.run_with_cache(x, incl_bwd=True)
        model.run_with_hooks(x, fwd_hooks=[(MID, zero)], bwd_hooks=[], reset_hooks_end=True)
