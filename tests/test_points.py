"""Hook points and models made of them: what they do, refuse, and keep apart."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from threaded import in_threads
from torch import nn

import ferrohook as fh
from ferrohook import points
from ferrohook.points import HookedRootModule, HookPoint, PointCache, Slice

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 60
CALLS = 200
THREADS = 4
BATCH, POS, WIDTH = 2, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hook_mid = HookPoint()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hook_mid(self.linear(x)).relu()


class Model(HookedRootModule):
    """A few layers, with hook points before, inside and after."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.hook_out = HookPoint()
        self.setup()

    def forward(self, x: torch.Tensor, *, fail: bool = False) -> torch.Tensor:
        x = self.hook_embed(x)
        for block in self.blocks:
            x = block(x)
        if fail:
            msg = "the model failed"
            raise ArithmeticError(msg)
        return self.hook_out(x).sum()


NAMES = ["hook_embed", "blocks.0.hook_mid", "blocks.1.hook_mid", "hook_out"]
MID = "blocks.0.hook_mid"


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, POS, WIDTH)


def zero(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return torch.zeros_like(tensor)


def observe(tensor: torch.Tensor, hook: Any) -> None:
    pass


def adding(value: float) -> Callable[..., torch.Tensor]:
    return lambda tensor, hook: tensor + value


def noting(log: list[Any], word: Any) -> Callable[..., None]:
    def note(tensor: Any, hook: Any) -> None:
        log.append(word)

    return note


class Transposed:
    """A conversion that swaps the last two dimensions."""

    def convert(self, value: torch.Tensor) -> torch.Tensor:
        return value.transpose(-1, -2)

    def revert(self, value: torch.Tensor) -> torch.Tensor:
        return value.transpose(-1, -2)


# --- HookPoint ---


def test_a_point_returns_the_very_object() -> None:
    tensor = torch.ones(2)
    assert HookPoint()(tensor) is tensor


def test_a_hook_sees_the_tensor_and_the_point_and_may_replace() -> None:
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


def test_backward_hooks_see_the_gradient_and_replace_it() -> None:
    point, log = HookPoint(), []
    weight = torch.tensor([1.0, 2.0], requires_grad=True)

    def double(gradient: torch.Tensor, hook: HookPoint) -> torch.Tensor:
        log.append(gradient.clone())
        return gradient * 2

    point.add_hook(double, dir="bwd")
    point.add_hook(lambda gradient, hook: log.append(gradient.clone()), dir="bwd")
    (point(weight) * 3).sum().backward()
    # Each sees the gradient of the output; the last one to return something decides.
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


def test_levels_and_permanents() -> None:
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


def test_a_handle_removes_its_hook_alone_and_has_hooks_knows() -> None:
    point, log = HookPoint(), []
    handle = point.add_hook(noting(log, "a"))
    point.add_hook(noting(log, "b"))
    handle.remove()
    handle.remove()
    point(torch.ones(1))
    assert log == ["b"]
    point.fwd_hooks[0].hook.remove()  # as TransformerLens' users do
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
    # Each call sees what the one before it returned.
    assert [row[4] for row in seen] == [0, 6]
    assert out.tolist() == [[2] * 3] * 2


def test_an_earlier_aliased_call_that_replaces_is_not_lost() -> None:
    point = HookPoint()

    def only_first(tensor: torch.Tensor, hook: Any) -> torch.Tensor | None:
        return tensor + 1 if hook.name == "first" else None

    point.add_hook(only_first, alias_names=["first", "second"])
    assert point(torch.zeros(1)).item() == 1


def test_hooks_see_the_converted_tensor_and_return_it_so() -> None:
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


def test_backward_scale_scales_the_sum() -> None:
    point, sums = HookPoint(), []
    point.backward_scale = 3

    def hook(gradient: torch.Tensor, hook: HookPoint) -> torch.Tensor:
        sums.append((gradient.sum().item(), gradient.sum(0).tolist(), (gradient * 1).sum().item()))
        assert isinstance(gradient, torch.Tensor)
        return gradient

    point.add_hook(hook, "bwd")
    value = torch.ones(4, 2, requires_grad=True)
    point(value).sum().backward()
    # As in the original: only where one number comes out, and what is computed from it is plain.
    assert sums == [(24, [4, 4], 8)]
    assert value.grad is not None
    assert type(value.grad) is torch.Tensor
    assert value.grad.tolist() == [[1, 1]] * 4


def test_ctx_is_for_the_hooks_and_is_cleared() -> None:
    point = HookPoint()
    point.add_hook(lambda tensor, hook: hook.ctx.__setitem__("seen", tensor))
    point(torch.ones(1))
    held = point.ctx
    assert set(held) == {"seen"}
    point.clear_context()
    assert point.ctx == {}
    assert set(held) == {"seen"}


def test_repr_tells_name_and_hooks(model: Model) -> None:
    assert repr(HookPoint()) == "HookPoint()"
    model.add_hook(MID, observe)
    model.add_hook(MID, observe, dir="bwd")
    assert repr(model.hook_dict[MID]) == f"HookPoint(name={MID!r}, 1 fwd, 1 bwd)"
    assert repr(model.hook_dict[MID].fwd_hooks[0]).startswith("LensHandle(observe, hook=<HookHandl")


def test_the_rest_of_ferrohook_knows_points(model: Model, x: torch.Tensor) -> None:
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
    assert isinstance(handle, fh.HookHandle)
    with fh.instrument(model):
        pass
    with fh.capture(model, MID) as acts:
        model(x)
    assert not acts[MID].any()


def test_an_error_in_a_hook_names_the_users_hook(model: Model, x: torch.Tensor) -> None:
    def broken(tensor: torch.Tensor, hook: HookPoint) -> None:
        msg = "mine"
        raise ArithmeticError(msg)

    with pytest.raises(ArithmeticError, match="mine") as caught:
        model.run_with_hooks(x, fwd_hooks=[(MID, broken)])
    assert "broken" in caught.value.__notes__[0]
    assert "HookPoint" in caught.value.__notes__[0]


def compiled_for(model: Any, x: torch.Tensor) -> Callable[..., Any]:
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    try:
        compiled(x)
    except RuntimeError as error:  # no Dynamo on this Python
        pytest.skip(str(error))
    return compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_with_the_hooks_in_the_graph(model: Model, x: torch.Tensor) -> None:
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
    point.ctx["kept"] = torch.ones(1, requires_grad=True) * 2  # which cannot be copied
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
        assert not copy.deepcopy(model).hook_dict[MID].has_hooks()  # a scope's stay with it
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


def test_saving_keeps_no_hooks(model: Model, x: torch.Tensor) -> None:
    point = model.hook_dict[MID]
    model.add_hook(MID, lambda tensor, hook: tensor * 0)  # which no pickle takes
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


# --- HookedRootModule ---


def test_setup_finds_and_names(model: Model) -> None:
    assert list(model.hook_dict) == NAMES
    assert list(model.hook_points()) == list(model.hook_dict.values())
    assert [point.name for point in model.hook_points()] == NAMES
    assert model.mod_dict["blocks.0.linear"] is model.blocks[0].linear
    assert model.blocks[0].linear.name == "blocks.0.linear"
    assert model.hook_dict[MID].layer() == 0


def test_setup_leaves_a_name_alone_that_is_no_text() -> None:
    class Named(nn.Module):
        name = property(lambda self: "mine")

    class Around(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Named()
            self.other = nn.Module()
            self.other.name = nn.Linear(1, 1)
            self.setup()

    model = Around()
    assert model.inner.name == "mine"
    assert isinstance(model.other.name, nn.Linear)


def test_add_hook_by_name_and_predicate(model: Model, x: torch.Tensor) -> None:
    log: list[Any] = []
    one = model.add_hook("hook_out", noting(log, "one"))
    many = model.add_hook(lambda name: name.endswith("mid"), noting(log, "mid"), prepend=True)
    assert isinstance(many, list)
    assert len(many) == 2
    model(x)
    assert log == ["mid", "mid", "one"]
    assert model.list_hooks() == {NAMES[1]: [many[0]], NAMES[2]: [many[1]], "hook_out": [one]}
    assert model.list_hooks("hook_out", dir="bwd") == {}
    model.add_perma_hook(lambda name: name == "hook_out", observe, dir="bwd")
    assert list(model.list_hooks(dir="bwd")) == ["hook_out"]
    assert model.list_hooks(dir="bwd", including_permanent=False) == {}
    model.reset_hooks()
    assert list(model.list_hooks()) == ["hook_out"]
    model.remove_all_hook_fns("fwd", including_permanent=True)
    assert list(model.list_hooks()) == ["hook_out"]
    model.remove_all_hook_fns(including_permanent=True)
    assert model.list_hooks() == {}


def test_check_hooks_to_add_may_refuse_and_nothing_stays() -> None:
    class Strict(Model):
        def check_hooks_to_add(
            self, hook_point: Any, hook_point_name: str, *args: Any, **options: Any
        ) -> None:
            if hook_point_name == "hook_out":
                msg = "not there"
                raise ArithmeticError(msg)

    model = Strict()
    with pytest.raises(ArithmeticError, match="not there"):
        model.add_hook(lambda name: True, observe)
    assert model.list_hooks() == {}


def test_run_with_hooks(model: Model, x: torch.Tensor) -> None:
    clean = model(x)
    assert model.run_with_hooks(x, fwd_hooks=[("hook_out", zero)]).item() == 0
    seen: list[str] = []
    out = model.run_with_hooks(
        x, fwd_hooks=[(lambda name: "mid" in name, lambda tensor, hook: seen.append(hook.name))]
    )
    assert torch.equal(out, clean)
    assert seen == NAMES[1:3]
    assert torch.equal(model(x), clean)
    assert model.list_hooks() == {}


def test_levels_count_the_open_contexts(model: Model, x: torch.Tensor) -> None:
    assert model.context_level == 0
    with model.hooks([(MID, observe)]) as same, model.hooks([(MID, observe)]):
        assert same is model
        assert model.context_level == 2
        assert [handle.context_level for handle in model.hook_dict[MID].fwd_hooks] == [1, 2]
        assert Model().context_level == 0
    assert model.context_level == 0


def test_leaving_removes_exactly_what_was_added(model: Model, x: torch.Tensor) -> None:
    # The original removes whatever has the level, and with nested ones leaks or takes too much.
    point = model.hook_dict[MID]
    mine = model.add_hook(MID, observe, level=1)
    with model.hooks([(MID, observe)]):
        inside = model.add_hook(MID, observe, level=1)
        with model.hooks([(MID, zero)]):
            assert len(point.fwd_hooks) == 4
        assert len(point.fwd_hooks) == 3
    assert point.fwd_hooks == [mine, inside]


def test_contexts_may_be_left_in_any_order(model: Model) -> None:
    first, second = model.hooks([(MID, observe)]), model.hooks([(MID, zero)])
    first.__enter__()
    second.__enter__()
    with pytest.raises(fh.HookError, match="left after the scopes"):
        first.__exit__(None, None, None)
    assert [handle.user_hook for handle in model.hook_dict[MID].fwd_hooks] == [zero]
    second.__exit__(None, None, None)
    assert not model.hook_dict[MID].has_hooks()


def test_nothing_stays_when_the_model_raises(model: Model, x: torch.Tensor) -> None:
    for run in (model.run_with_hooks, model.run_with_cache):
        with pytest.raises(ArithmeticError, match="the model failed"):
            run(x, fail=True)
    with pytest.raises(ArithmeticError), model.hooks([(MID, zero)], [(MID, zero)]):
        model(x, fail=True)
    assert model.list_hooks() == {}
    assert not any(point.has_hooks() for point in model.hook_points())
    assert not model.is_caching
    assert model.context_level == 0


def test_nothing_stays_when_a_hook_is_refused(model: Model, x: torch.Tensor) -> None:
    for last in (True, False):
        with pytest.raises(fh.SelectionError):
            model.run_with_hooks(
                x, fwd_hooks=[(MID, zero), ("hook_nowhere", zero)], reset_hooks_end=last
            )
        assert model.list_hooks() == {}
        assert model.context_level == 0
    assert fh._core.active_scopes.get() == ()


def test_hooks_that_stay_stay_in_the_context(model: Model, x: torch.Tensor) -> None:
    gradients: list[torch.Tensor] = []
    weight = x.clone().requires_grad_()
    with fh.scope():
        loss = model.run_with_hooks(
            weight,
            fwd_hooks=[("hook_embed", adding(1))],
            bwd_hooks=[(MID, lambda gradient, hook: gradients.append(gradient))],
            reset_hooks_end=False,
        )
    loss.backward()
    assert len(gradients) == 1
    assert list(model.list_hooks()) == ["hook_embed", MID]
    assert torch.equal(model(x), loss)
    clean = contextvars.Context().run(model, x)
    assert not torch.equal(clean, loss)
    model.reset_hooks()
    assert model.list_hooks() == {}
    assert torch.equal(model(x), clean)
    assert fh._core.active_scopes.get() == ()


def test_contexts_are_cleared_when_asked_for(model: Model, x: torch.Tensor) -> None:
    def keep(tensor: torch.Tensor, hook: HookPoint) -> None:
        hook.ctx["seen"] = tensor

    model.run_with_hooks(x, fwd_hooks=[(MID, keep)])
    assert model.hook_dict[MID].ctx
    model.run_with_hooks(x, fwd_hooks=[(MID, keep)], clear_contexts=True)
    assert not model.hook_dict[MID].ctx
    model.run_with_hooks(x, fwd_hooks=[(MID, keep)])
    model.run_with_cache(x, clear_contexts=True)
    assert not model.hook_dict[MID].ctx
    model.run_with_hooks(x, fwd_hooks=[(MID, keep)])
    model.reset_hooks(clear_contexts=False)
    assert model.hook_dict[MID].ctx
    model.reset_hooks()
    assert not model.hook_dict[MID].ctx


# --- caches ---


def test_run_with_cache_keeps_all_in_order(model: Model, x: torch.Tensor) -> None:
    out, cache = model.run_with_cache(x)
    assert torch.equal(out, model(x))
    assert list(cache) == NAMES
    assert torch.equal(cache["hook_embed"], x)
    assert torch.equal(cache[MID], model.blocks[0].linear(x))
    assert not cache[MID].requires_grad
    assert not model.hook_dict[MID].has_hooks()


@pytest.mark.parametrize(
    "names",
    [
        [NAMES[2], MID],
        (NAMES[2], MID),
        {NAMES[2], MID},
        frozenset((NAMES[2], MID)),
        lambda name: name.endswith("hook_mid"),
    ],
)
def test_names_filters(model: Model, x: torch.Tensor, names: Any) -> None:
    _, cache = model.run_with_cache(x, names_filter=names)
    assert list(cache) == [MID, NAMES[2]]
    _, cache = model.run_with_cache(x, names_filter=MID)
    assert list(cache) == [MID]
    cache, fwd, bwd = model.get_caching_hooks(names, incl_bwd=True)
    assert [name for name, _ in fwd] == [name for name, _ in bwd] == [MID, NAMES[2]]
    assert len(model.run_with_cache(x, names_filter=[])[1]) == 0
    assert len(model.run_with_cache(x, names_filter=[], pos_slice=1)[1]) == 0


def test_what_is_cached_is_what_leaves_the_hooks(model: Model, x: torch.Tensor) -> None:
    with model.hooks([(MID, adding(1))]):
        _, cache = model.run_with_cache(x, names_filter=MID)
    assert torch.equal(cache[MID], model.blocks[0].linear(x) + 1)


def test_gradients_are_cached_too(model: Model, x: torch.Tensor) -> None:
    x.requires_grad_()
    weights = [p.grad for p in model.parameters()]
    assert weights == [None] * 4
    _, cache = model.run_with_cache(x, incl_bwd=True)
    assert list(cache) == NAMES + [f"{name}_grad" for name in reversed(NAMES)]
    assert torch.equal(cache["hook_out_grad"], torch.ones_like(x))
    assert x.grad is not None
    assert torch.equal(cache["hook_embed_grad"], x.grad)
    _, cache = model.run_with_cache(x.detach(), incl_bwd=True)
    assert "hook_embed_grad" not in cache
    assert f"{MID}_grad" in cache


def test_a_point_that_runs_twice_has_the_last_calls_gradient() -> None:
    # The original has the last call's activation beside the first call's gradient.
    class Twice(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook = HookPoint()
            self.setup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.hook(x) * 2).sum() + (self.hook(x + 1) * 3).sum()

    _, cache = Twice().run_with_cache(torch.zeros(1, requires_grad=True), incl_bwd=True)
    assert cache["hook"].item() == 1
    assert cache["hook_grad"].item() == 3


@pytest.mark.parametrize(
    ("pos_slice", "part"),
    [
        (1, np.s_[:, [1]]),
        (-1, np.s_[:, [-1]]),
        ((1,), np.s_[:, :1]),
        ((0, 3, 2), np.s_[:, 0:3:2]),
        ([0, 2], np.s_[:, [0, 2]]),
        (torch.tensor([2]), np.s_[:, [2]]),
        (np.array([True, False, True]), np.s_[:, [0, 2]]),
        (Slice(1), np.s_[:, 1]),
        (None, np.s_[:]),
    ],
)
def test_positions_are_sliced(model: Model, x: torch.Tensor, pos_slice: Any, part: Any) -> None:
    _, cache = model.run_with_cache(x, pos_slice=pos_slice, incl_bwd=True)
    _, whole = model.run_with_cache(x, incl_bwd=True)
    assert list(cache) == list(whole)
    for name in cache:
        assert torch.equal(cache[name], whole[name][part])
    cache, fwd, bwd = model.get_caching_hooks(None, True, pos_slice=pos_slice)
    with model.hooks(fwd, bwd):
        model(x).backward()
    for name in whole:
        assert torch.equal(cache[name], whole[name][part])


def test_the_position_is_elsewhere_where_heads_are_apart() -> None:
    class Heads(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook_q, self.hook_declared, self.hook_flat = (HookPoint() for _ in range(3))
            self.hook_declared.pos_dim = 1
            self.setup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hook_flat(x[0, 0, 0])
            return self.hook_declared(self.hook_q(x))

    x = torch.randn(1, 5, 2, 3)  # batch, position, head, inside
    for remove in (False, True):
        _, cache = Heads().run_with_cache(x, pos_slice=(1, 3), remove_batch_dim=remove)
        wanted = x[0, 1:3] if remove else x[:, 1:3]
        assert torch.equal(cache["hook_q"], wanted)
        assert torch.equal(cache["hook_declared"], wanted)
        assert torch.equal(cache["hook_flat"], x[0, 0, 0])


def test_a_slice_does_not_keep_the_whole_alive(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x, pos_slice=(0, 1))
    assert cache[MID].untyped_storage().nbytes() == cache[MID].nbytes


def test_the_batch_dimension_is_dropped(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x[:1], remove_batch_dim=True)
    assert {tuple(value.shape) for value in cache.values()} == {(POS, WIDTH)}
    with pytest.raises(ValueError, match="has one of 2"):
        model.run_with_cache(x, remove_batch_dim=True)
    cache = model.add_caching_hooks(remove_batch_dim=True)
    model(x)
    assert {tuple(value.shape) for value in cache.values()} == {(BATCH, POS, WIDTH)}


def test_tensors_go_to_a_device(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x, device="meta")
    assert {value.device.type for value in cache.values()} == {"meta"}
    _, cache = model.run_with_cache(x, device=torch.device("cpu"))
    assert torch.equal(cache["hook_embed"], x)
    with pytest.raises(RuntimeError, match="nowhere"):
        model.run_with_cache(x, device="nowhere")


@pytest.mark.cuda
def test_copies_from_a_gpu_are_complete_when_they_are_read(model: Model) -> None:
    model = model.cuda()
    for factor in range(1, 6):
        x = torch.full((BATCH, POS, WIDTH), float(factor), device="cuda")
        torch.cuda._sleep(50_000_000)
        out, cache = model.run_with_cache(x, device="cpu", incl_bwd=True)
        assert torch.equal(cache["hook_embed"], torch.full((BATCH, POS, WIDTH), float(factor)))
        out.backward()
        assert torch.equal(cache["hook_out_grad"], torch.ones(BATCH, POS, WIDTH))
        assert not cache[MID].is_cuda


def test_conversions_show_in_caches(model: Model, x: torch.Tensor) -> None:
    model.hook_dict[MID].enable_reshape(Transposed())
    _, cache = model.run_with_cache(x, incl_bwd=True)
    assert list(cache)[:4] == NAMES
    assert torch.equal(cache[MID], model.blocks[0].linear(x).transpose(-1, -2))
    assert cache[f"{MID}_grad"].shape == (BATCH, WIDTH, POS)
    kept = model.add_caching_hooks(MID, incl_bwd=True)
    model(x).backward()
    assert torch.equal(kept[MID], cache[MID])
    assert torch.equal(kept[f"{MID}_grad"], cache[f"{MID}_grad"])


def test_copies_are_obeyed(model: Model, x: torch.Tensor) -> None:
    class Careless(Model):
        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            out = self.hook_embed(x)
            out.add_(1)
            return self.hook_out(out)

    model, before = Careless(), x.clone()
    for reset in (True, False):
        x = before.clone()
        _, cache = model.run_with_cache(x, reset_hooks_end=reset, names_filter=["hook_embed"])
        with pytest.raises(fh.StaleActivationError, match=r"hook_embed. was changed.*clone"):
            cache["hook_embed"]
        assert "hook_embed" in cache
        assert "(2, 3, 4)" in repr(cache)
        model.reset_hooks()
        x = before.clone()
        _, cache = model.run_with_cache(
            x, copy="ref", reset_hooks_end=reset, names_filter=["hook_embed"]
        )
        assert torch.equal(cache["hook_embed"], before + 1)
        model.reset_hooks()
        for pos_slice in (None, (0, 3)):
            _, cache = model.run_with_cache(
                before.clone(), copy="clone", reset_hooks_end=reset, pos_slice=pos_slice
            )
            assert torch.equal(cache["hook_embed"], before)
            model.reset_hooks()
    with pytest.raises(ValueError, match="checked, clone or ref"):
        model.run_with_cache(x, copy="deep")


def test_inference_tensors_are_cached(model: Model, x: torch.Tensor) -> None:
    with torch.inference_mode():
        _, cache = model.run_with_cache(x.clone())
        kept = model.add_caching_hooks()
        model(x.clone())
    assert torch.equal(cache["hook_embed"], x)
    assert torch.equal(kept["hook_embed"], x)


def test_a_cache_is_changed_as_a_dict(model: Model, x: torch.Tensor, tmp_path: Any) -> None:
    _, cache = model.run_with_cache(x, incl_bwd=True)
    assert dict(cache).keys() == set(cache)
    cache["mine"] = x
    assert cache["mine"] is x
    assert torch.equal(cache.pop(MID), model.blocks[0].linear(x))
    assert MID not in cache
    assert cache.get(MID) is None
    with pytest.raises(fh.SelectionError, match=MID):
        cache[MID]
    with pytest.raises(KeyError):
        del cache[MID]
    assert torch.equal(cache.to("cpu")["hook_embed"], x)
    cache.save(tmp_path / "acts.safetensors")
    assert list(fh.ActivationCache.load(tmp_path / "acts.safetensors")) == list(cache)
    assert cache.stack("blocks.*.hook_mid").shape == (1, *x.shape)
    cache.clear()
    assert not cache


def test_what_is_deleted_from_a_cache_is_freed(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x)
    gone, other = weakref.ref(cache[MID]), cache["hook_embed"]
    del cache[MID]
    assert gone() is None
    assert cache["hook_embed"] is other
    other.add_(1)
    with pytest.raises(fh.StaleActivationError):
        cache["hook_embed"]
    del cache["hook_embed"]
    _, cache = model.run_with_cache(x)
    cache["hook_embed"].add_(1)
    del cache[MID]
    with pytest.raises(fh.StaleActivationError):
        cache["hook_embed"]


def test_caching_hooks_fill_until_reset(model: Model, x: torch.Tensor) -> None:
    cache = model.add_caching_hooks(MID, incl_bwd=True)
    assert isinstance(cache, PointCache)
    assert model.is_caching
    model(x).backward()
    first = cache[MID]
    model(x + 1)
    assert not torch.equal(cache[MID], first)
    assert list(cache) == [MID, f"{MID}_grad"]
    # Another cache in between ends by itself.
    model.run_with_cache(x)
    assert model.is_caching
    model.reset_hooks()
    assert not model.is_caching
    cache.clear()
    model(x)
    assert not cache
    mine: dict[str, Any] = {}
    assert model.add_caching_hooks([MID], cache=mine) is mine
    model(x)
    assert list(mine) == [MID]


def test_a_cache_that_goes_on(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x, reset_hooks_end=False)
    before = cache[MID]
    model(x * 2)
    assert not torch.equal(cache[MID], before)
    contextvars.Context().run(model, x * 3)
    assert torch.equal(cache["hook_embed"], x * 2)
    model.reset_hooks()
    model(x)
    assert torch.equal(cache["hook_embed"], x * 2)


def test_deprecated_ones_warn(model: Model, x: torch.Tensor) -> None:
    cache: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match="cache_all is deprecated"):
        model.cache_all(cache)
    model(x)
    assert list(cache) == NAMES
    model.reset_hooks()
    cache.clear()
    with pytest.warns(DeprecationWarning, match="cache_some is deprecated"):
        model.cache_some(cache, lambda name: name == MID, incl_bwd=True)
    model(x).backward()
    assert list(cache) == [MID, f"{MID}_grad"]


def test_a_hook_sees_that_it_is_cached(model: Model, x: torch.Tensor) -> None:
    seen: list[Any] = []
    model.add_hook(MID, lambda tensor, hook: seen.append((model.is_caching, hook.has_hooks())))
    model(x)
    model.run_with_cache(x)
    assert [row[0] for row in seen] == [False, True]


# --- Slice ---


@pytest.mark.parametrize(
    ("given", "mode", "taken"),
    [
        (2, "int", [2]),
        (-1, "int", [-1]),
        (np.int32(3), "int", [3]),
        (torch.tensor(3), "int", [3]),
        (np.array(3), "int", [3]),
        ((3,), "slice", [0, 1, 2]),
        ((1, 4), "slice", [1, 2, 3]),
        ((1, None, 3), "slice", [1, 4]),
        (slice(1, 3), "slice", [1, 2]),
        ([0, 4], "array", [0, 4]),
        (torch.tensor([4, 0]), "array", [4, 0]),
        (np.array([True, False, False, False, True]), "array", [0, 4]),
        (None, "identity", [0, 1, 2, 3, 4]),
    ],
)
def test_slices(given: Any, mode: str, taken: list[int]) -> None:
    made = Slice(given)
    tensor = torch.arange(10).reshape(2, 5)
    assert made.mode == mode
    assert made.indices(5).tolist() == taken
    result = made.apply(tensor, dim=-1)
    assert result.tolist() == tensor[:, taken[0] if mode == "int" else taken].tolist()
    assert torch.equal(made.apply(tensor.T, dim=0).T if result.ndim > 1 else result, result)
    assert Slice.unwrap(made) is made
    kept = Slice.unwrap(given)
    assert kept.apply(tensor, 1).tolist() == tensor[:, taken].tolist()
    assert mode in repr(made)


@pytest.mark.parametrize("given", ["1", 1.5, True, (), (1, 2, 3, 4), {1}])
def test_no_slices(given: Any) -> None:
    with pytest.raises(ValueError, match="a Slice is made from"):
        Slice(given)


def test_a_slice_needs_the_size() -> None:
    with pytest.raises(ValueError, match="max_ctx"):
        Slice((1,)).indices()


# --- bad input ---


def test_a_wrong_direction_is_refused(model: Model) -> None:
    point = model.hook_dict[MID]
    for act in (
        functools.partial(point.add_hook, observe, "forward"),
        functools.partial(point.add_hook, observe, dir="both"),
        functools.partial(model.add_hook, MID, observe, dir=None),
        functools.partial(point.has_hooks, "up"),
        functools.partial(point.remove_hooks, "up"),
        functools.partial(model.reset_hooks, direction="up"),
        functools.partial(model.list_hooks, dir="up"),
    ):
        with pytest.raises(ValueError, match="dir is 'fwd'"):
            act()
    assert model.list_hooks() == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "blocks.0.hook_mdi",
            r"'blocks.0.hook_mdi' names nothing in Model.*closest.*'blocks.0.hook_mid'",
        ),
        ("blocks.0.linear", r"'blocks.0.linear' is a Linear in Model and is no hook point"),
        ("", "'' names nothing"),
    ],
)
def test_a_name_that_is_no_hook_point_is_refused(
    model: Model, x: torch.Tensor, name: str, message: str
) -> None:
    for act in (
        functools.partial(model.add_hook, name, observe),
        functools.partial(model.add_perma_hook, name, observe),
        functools.partial(model.run_with_hooks, x, fwd_hooks=[(name, observe)]),
        functools.partial(model.run_with_cache, x, names_filter=name),
        functools.partial(model.run_with_cache, x, names_filter=[MID, name]),
        functools.partial(model.get_caching_hooks, (name,)),
        functools.partial(model.add_caching_hooks, {name}),
        functools.partial(model.list_hooks, name),
    ):
        with pytest.raises(fh.SelectionError, match=message):
            act()


def test_a_wrong_filter_is_refused(model: Model, x: torch.Tensor) -> None:
    for wrong in (1, b"hook", {MID: 1}, [1], [None]):
        with pytest.raises(fh.HookTypeError):
            model.run_with_cache(x, names_filter=wrong)
        with pytest.raises(fh.HookTypeError):
            model.list_hooks(wrong)
    for wrong in (1, None, [MID]):
        with pytest.raises(fh.HookTypeError, match="a name or to a predicate"):
            model.add_hook(wrong, observe)
    for wrong in ([MID], (MID, observe), MID, [(MID, observe, 1)], 3):
        with pytest.raises(fh.HookTypeError, match="pairs"):
            model.run_with_hooks(x, fwd_hooks=wrong)
    with pytest.raises(fh.HookTypeError, match="cache is a dict"):
        model.add_caching_hooks(cache=[])


def keyword_only(tensor: Any, *, hook: Any) -> None: ...
def anything(*args: Any, **options: Any) -> None: ...
def more(tensor: Any, hook: Any, scale: float = 1) -> None: ...


def by_position(tensor: Any, hook: Any, /) -> None: ...


class Hooks:
    def method(self, tensor: Any, hook: Any) -> None: ...
    def without(self, tensor: Any) -> None: ...
    def __call__(self, tensor: Any, hook: Any) -> None: ...


@pytest.mark.parametrize(
    "hook",
    [
        observe,
        keyword_only,
        anything,
        more,
        Hooks().method,
        Hooks(),
        functools.partial(more, scale=2),
        functools.partial(lambda scale, tensor, hook: None, 2),
    ],
)
def test_hooks_that_take_the_point(hook: Any) -> None:
    point = HookPoint()
    point.add_hook(hook)
    point(torch.ones(1))


@pytest.mark.parametrize(
    "hook",
    [
        lambda tensor: None,
        lambda tensor, point: None,
        lambda hook, tensor: None,
        lambda tensor, hook, more: None,
        lambda tensor, hook, *, more: None,
        by_position,
        lambda: None,
        Hooks().without,
        functools.partial(lambda scale, tensor: None, 2),
        "hook",
        None,
        fh.ForwardHook(lambda input, output: None),
    ],
)
def test_a_hook_without_the_point_is_refused(model: Model, hook: Any) -> None:
    for act in (
        functools.partial(model.hook_dict[MID].add_hook, hook),
        functools.partial(model.add_hook, lambda name: True, hook),
        functools.partial(model.run_with_hooks, fwd_hooks=[(MID, hook)]),
    ):
        with pytest.raises(fh.HookTypeError, match=r"hook\(tensor, hook=point\)"):
            act()
    assert model.list_hooks() == {}


def test_other_options_of_add_hook_are_refused() -> None:
    point = HookPoint()
    for wrong in ("1", 1.0, True):
        with pytest.raises(fh.HookTypeError, match="level is a whole number"):
            point.add_hook(observe, level=wrong)
    for wrong in ("name", [1]):
        with pytest.raises(fh.HookTypeError, match="list of names"):
            point.add_hook(observe, alias_names=wrong)
    with pytest.raises(ValueError, match="never be called"):
        point.add_hook(observe, alias_names=[])
    with pytest.raises(TypeError, match="prepend"):
        point.add_hook(observe, prepend="yes")
    with fh.scope() as left:
        pass
    with pytest.raises(fh.HookError, match="scope was left"):
        point.add_hook(observe, scope=left)
    assert not point.has_hooks()


@pytest.mark.parametrize("scale", ["2", None, True, torch.tensor(2.0), [1]])
def test_a_backward_scale_that_is_no_number_is_refused(scale: Any) -> None:
    point = HookPoint()
    with pytest.raises(fh.HookTypeError, match="backward_scale is a number"):
        point.backward_scale = scale
    assert point.backward_scale == 1


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_backward_scale_is_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        HookPoint().backward_scale = scale


def test_a_conversion_without_revert_is_refused() -> None:
    class Half:
        def convert(self, value: Any) -> Any:
            return value

    point = HookPoint()
    with pytest.raises(fh.HookTypeError, match="Half lacks revert"):
        point.enable_reshape(Half())
    with pytest.raises(fh.HookTypeError, match="int lacks convert and revert"):
        point.hook_conversion = 3
    assert point.hook_conversion is None


def test_without_setup_it_says_so(x: torch.Tensor) -> None:
    class Forgetful(HookedRootModule):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Forgetful()
    for act in (
        functools.partial(model.run_with_cache, x),
        functools.partial(model.run_with_hooks, x, fwd_hooks=[("a", observe)]),
        functools.partial(model.add_hook, "a", observe),
        model.reset_hooks,
        model.hook_points,
        lambda: model.mod_dict,
    ):
        with pytest.raises(points.SetupError, match=r"Forgetful has no .*self\.setup\(\)"):
            act()
    assert not hasattr(model, "hook_dict")
    with pytest.raises(AttributeError, match="nothing_else"):
        model.nothing_else  # noqa: B018 (reading raises)
    model.setup()
    with pytest.raises(fh.SelectionError, match="it has none"):
        model.add_hook("a", observe)


@pytest.mark.parametrize("name", ["hook_embed", "blocks.x.hook", "blocks", "", None])
def test_a_name_without_a_layer_says_so(name: str | None) -> None:
    point = HookPoint()
    point.name = name
    with pytest.raises(ValueError, match="layer"):
        point.layer()


def test_backward_hooks_that_cannot_fire_are_warned_of(model: Model, x: torch.Tensor) -> None:
    fired: list[Any] = []
    with pytest.warns(UserWarning, match="removed at the end of run_with_hooks"):
        loss = model.run_with_hooks(x, bwd_hooks=[(MID, noting(fired, 1))])
    loss.backward()
    assert fired == []
    with model.hooks(bwd_hooks=[(MID, noting(fired, 1))]):
        model(x).backward()
    assert fired == [1]


def test_a_point_that_was_named_and_never_ran_is_told(model: Model, x: torch.Tensor) -> None:
    model.hook_spare = HookPoint()
    model.setup()
    with pytest.warns(fh.NeverFiredWarning, match="'hook_spare' was selected and never ran"):
        _, cache = model.run_with_cache(x, names_filter=["hook_spare", MID])
    assert list(cache) == [MID]
    model.run_with_cache(x)
    model.run_with_cache(x, names_filter=lambda name: name == "hook_spare")


def test_gradients_need_a_number(model: Model, x: torch.Tensor) -> None:
    model.forward = lambda x: model.hook_out(x * 1)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="scalar"):
        model.run_with_cache(x.requires_grad_(), incl_bwd=True)
    assert not model.hook_out.has_hooks()


# --- one model, many contexts ---


def test_four_threads_with_hooks_of_their_own(switch_often: None) -> None:
    model, x = Model(), torch.ones(1, 1, WIDTH)
    wrong: list[Any] = []
    alone = [model.run_with_hooks(x, fwd_hooks=[("hook_embed", adding(n))]) for n in range(THREADS)]

    def work(number: int) -> None:
        for _ in range(CALLS):
            seen: list[Any] = []
            out = model.run_with_hooks(
                x,
                fwd_hooks=[
                    ("hook_embed", adding(number)),
                    ("hook_out", lambda tensor, hook, seen=seen: seen.append(number)),
                ],
            )
            if not torch.equal(out, alone[number]) or seen != [number]:
                wrong.append(number)

    in_threads(THREADS, work)
    assert wrong == []
    assert model.list_hooks() == {}
    assert model.context_level == 0


def test_threads_that_ablate_cache_and_look_do_not_meet(switch_often: None) -> None:
    # What was counted on the original: calls with another thread's hooks, clean calls with
    # another's output, foreign activations in caches, and hooks that stay.
    model, x = Model(), torch.ones(1, 1, WIDTH)
    clean = model(x)
    wrong: list[str] = []

    def expect(right: bool, what: str) -> None:
        if not right:
            wrong.append(what)

    def ablate(number: int) -> None:
        def mine(tensor: torch.Tensor, hook: HookPoint) -> torch.Tensor:
            expect(threading.get_ident() == thread, "fired in another thread")
            return tensor * 0

        thread = threading.get_ident()
        for _ in range(CALLS):
            with model.hooks([("hook_embed", mine)]), model.hooks([("hook_out", mine)]):
                expect(model(x).item() == 0, "own hooks missing")

    def look(number: int) -> None:
        for _ in range(CALLS):
            expect(torch.equal(model(x), clean), "another's output")

    def cache(number: int) -> None:
        mine = torch.full((1, 1, WIDTH), float(number))
        for _ in range(CALLS):
            _, kept = model.run_with_cache(mine)
            expect(torch.equal(kept["hook_embed"], mine), "another's activations")
            expect(list(kept) == NAMES, "others' names")

    roles = (ablate, look, cache, cache)
    in_threads(len(roles), lambda number: roles[number](number))
    assert wrong == []
    assert model.list_hooks() == {}
    assert not any(point.has_hooks() for point in model.hook_points())


def test_tasks_do_not_see_each_others_hooks(model: Model, x: torch.Tensor) -> None:
    clean = model(x)

    async def task(number: int) -> None:
        for _ in range(10):
            with model.hooks([("hook_out", adding(number))]):
                await asyncio.sleep(0)
                assert torch.allclose(model(x), clean + number * x.numel())
                assert torch.equal(await asyncio.to_thread(model, x), model(x))
                assert model.context_level == 1
            await asyncio.sleep(0)
            assert torch.equal(model(x), clean)

    async def run() -> None:
        await asyncio.gather(*(task(number) for number in range(1, 6)))

    asyncio.run(run())


def test_hooks_that_stay_are_not_another_threads(model: Model, x: torch.Tensor) -> None:
    outs: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        if number:
            model.run_with_hooks(x, fwd_hooks=[("hook_out", zero)], reset_hooks_end=False)
        outs[number] = model(x)

    in_threads(2, work)
    assert outs[1].item() == 0
    assert torch.equal(outs[0], model(x))


# --- existing models ---


class Layer(nn.Module):
    """Returns a tuple, and takes a keyword, as many layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, str]:
        return self.linear(hidden) * scale, "weights"


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.dropout = nn.Dropout()
        self.config = {"a": 1}

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x, _ = layer(hidden=x, scale=2.0)
        return {"logits": self.head(x), "hidden": x}

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)["logits"]


POINTS = {"layers.*": ["hook_in", "hook_out"], "head": "hook_out", "": "hook_out"}
WRAPPED = [
    *(f"layers.{number}.hook_{end}" for number in range(2) for end in ("in", "out")),
    "head.hook_out",
    "hook_out",
]


def test_wrap_makes_points_of_modules(x: torch.Tensor) -> None:
    plain = Plain()
    expected = plain(x)
    model = HookedRootModule.wrap(plain, points=POINTS)
    assert sorted(model.hook_dict) == sorted(WRAPPED)
    out, cache = model.run_with_cache(x)
    assert type(out) is dict
    assert torch.equal(out["logits"], expected["logits"])
    assert list(cache) == WRAPPED
    assert torch.equal(cache["layers.0.hook_in"], x)
    assert torch.equal(cache["layers.1.hook_in"], cache["layers.0.hook_out"])
    assert torch.equal(cache["hook_out"], expected["logits"])
    assert model.hook_dict["layers.1.hook_in"].layer() == 1
    assert model.mod_dict["layers.0.linear"] is plain.layers[0].linear

    seen: list[Any] = []
    out = model.run_with_hooks(
        x,
        fwd_hooks=[
            ("layers.1.hook_in", zero),
            (lambda name: name.endswith("1.hook_out"), lambda tensor, hook: seen.append(hook.name)),
        ],
    )
    assert seen == ["layers.1.hook_out"]
    assert torch.equal(out["hidden"], (plain.layers[1].linear.bias * 2).expand_as(x))
    out = model.run_with_hooks(x, fwd_hooks=[("layers.1.hook_out", zero)])
    assert not out["hidden"].any()
    assert torch.equal(plain(x)["logits"], expected["logits"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wrapped_model_compiles_with_its_hook_points(x: torch.Tensor) -> None:
    plain = Plain().eval()
    expected = plain(x)["logits"]
    model = HookedRootModule.wrap(plain, points=POINTS)
    compiled = compiled_for(model, x)
    with model.hooks(fwd_hooks=[("layers.1.hook_in", zero)]):
        assert torch.equal(compiled(x)["hidden"], model(x)["hidden"])
        assert not torch.equal(compiled(x)["logits"], expected)
    assert torch.equal(compiled(x)["logits"], expected)
    model.add_hook("head.hook_out", adding(1))
    assert torch.equal(compiled(x)["logits"], expected + 1)
    assert torch.equal(compiled.run_with_cache(x)[1]["head.hook_out"], expected + 1)


def test_wrapped_gradients(x: torch.Tensor) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, 1), nn.Flatten(0), Summing())
    model = HookedRootModule.wrap(plain, points={"1": ("hook_in", "hook_out")})
    _, cache = model.run_with_cache(x, incl_bwd=True)
    assert list(cache) == ["1.hook_in", "1.hook_out", "1.hook_out_grad", "1.hook_in_grad"]
    assert torch.equal(cache["1.hook_out_grad"], torch.ones(BATCH, POS, 1))
    plain.zero_grad()
    with model.hooks(bwd_hooks=[("1.hook_in", zero)]):
        model(x).backward()
    assert not plain[0].weight.grad.any()


class Summing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def test_a_wrapped_model_is_the_model(x: torch.Tensor) -> None:
    plain = Plain()
    state, names = list(plain.state_dict()), [name for name, _ in plain.named_modules()]
    model = HookedRootModule.wrap(plain, points=POINTS)
    assert isinstance(model, HookedRootModule)
    assert list(model.state_dict()) == state == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == names
    assert [id(p) for p in model.parameters()] == [id(p) for p in plain.parameters()]
    assert model.config is plain.config
    model.added = 3
    assert plain.added == 3
    del model.added
    assert not hasattr(plain, "added")
    assert model.eval() is model
    assert not plain.training
    assert not plain.dropout.training
    model.double()
    assert plain.head.weight.dtype == torch.float64
    model.float()
    model.requires_grad_(False)
    assert not plain.head.weight.requires_grad
    with model.hooks([("head.hook_out", zero)]):
        assert not model.predict(x).any()
        assert not model(x)["logits"].any()
    assert "Plain" in repr(model)
    assert "predict" in dir(model)
    with fh.capture(model, "layers.*") as acts:
        model(x)
    assert list(acts) == ["layers.0", "layers.1"]
    with fh.capture(model, "") as acts:
        model(x)
    assert list(acts) == [""]
    assert type(plain.layers[0]).__name__ == "Layer"
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018 (reading raises)


def test_a_wrapped_model_is_given_back(x: torch.Tensor) -> None:
    plain = Plain()
    before = [(type(module), dict(vars(module))) for module in plain.modules()]
    model = HookedRootModule.wrap(plain, points=POINTS)
    point = model.hook_dict["head.hook_out"]
    model.add_hook("head.hook_out", zero)
    assert model.into_inner() is plain
    after = [(type(module), dict(vars(module))) for module in plain.modules()]
    assert [row[0] for row in before] == [row[0] for row in after]
    assert [row[1].keys() for row in before] == [row[1].keys() for row in after]
    assert plain(x)["logits"].any()
    assert point.fwd_hooks[0].hook.calls == 0
    for act in (lambda: model(x), model.into_inner, model.run_with_cache, lambda: model.config):
        with pytest.raises(fh.HookError, match="given back"):
            act()
    assert repr(model) == "HookedRootModule(<given back>)"


def test_wrapped_models_are_copied_and_saved(x: torch.Tensor) -> None:
    model = HookedRootModule.wrap(Plain(), points=POINTS)
    model.add_hook("head.hook_out", zero)
    model.hook_dict["layers.0.hook_in"].backward_scale = 2
    twin = copy.deepcopy(model)
    assert not twin(x)["logits"].any()
    twin.reset_hooks()
    out, cache = twin.run_with_cache(x)
    assert out["logits"].any()
    assert list(cache) == WRAPPED
    assert not model(x)["logits"].any()
    assert twin.inner is not model.inner
    assert type(twin.into_inner().head) is nn.Linear
    assert copy.copy(model).hook_dict["head.hook_out"] is model.hook_dict["head.hook_out"]

    loaded = pickle.loads(pickle.dumps(model))
    assert loaded(x)["logits"].any()
    assert list(loaded.run_with_cache(x)[1]) == WRAPPED
    assert loaded.hook_dict["layers.0.hook_in"].backward_scale == 2


def test_all_modules_and_patterns_alone(x: torch.Tensor) -> None:
    model = HookedRootModule.wrap(nn.Sequential(nn.Linear(WIDTH, 1), nn.Identity()))
    _, cache = model.run_with_cache(x)
    assert list(cache) == [
        "hook_in",
        "0.hook_in",
        "0.hook_out",
        "1.hook_in",
        "1.hook_out",
        "hook_out",
    ]
    model = HookedRootModule.wrap(Plain(), points=nn.Linear)
    assert len(model.hook_dict) == 6
    model = HookedRootModule.wrap(Plain(), points={"head"})
    assert list(model.hook_dict) == ["head.hook_in", "head.hook_out"]


def test_points_that_the_model_has_are_kept(x: torch.Tensor) -> None:
    inner = Model()
    model = HookedRootModule.wrap(inner, points={"blocks.*": "hook_out"})
    _, cache = model.run_with_cache(x)
    assert set(cache) == {*NAMES, "blocks.0.hook_out", "blocks.1.hook_out"}
    with pytest.raises(fh.HookError, match="the model has a module there"):
        HookedRootModule.wrap(inner, points={"": "hook_out"})
    model.into_inner()
    assert type(inner) is Model
    assert len(inner.run_with_cache(x)[1]) == 4


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_bad_points_are_refused() -> None:
    plain = Plain()
    before = [type(module) for module in plain.modules()]
    with pytest.raises(fh.SelectionError, match="layres"):
        HookedRootModule.wrap(plain, points={"layres.*": "hook_out"})
    for wrong in ("hook_mid", ["hook_in", "x"], 3):
        with pytest.raises(ValueError, match="'hook_in', 'hook_out' or both"):
            HookedRootModule.wrap(plain, points={"head": wrong})
    with pytest.raises(fh.HookTypeError, match=r"nn\.Module"):
        HookedRootModule.wrap("model", points={"head": "hook_out"})
    scripted = nn.Sequential(torch.jit.script(nn.Linear(1, 1)), nn.Linear(1, 1))
    with pytest.raises(fh.HookError, match="TorchScript"):
        HookedRootModule.wrap(scripted, points={"*": "hook_out"})
    assert type(scripted[1]) is nn.Linear
    assert [type(module) for module in plain.modules()] == before


def test_wrapped_model_in_threads(switch_often: None) -> None:
    model = HookedRootModule.wrap(Plain(), points={"head": "hook_out"})
    x, wrong = torch.ones(1, 1, WIDTH), []
    clean = model(x)["logits"]

    def work(number: int) -> None:
        for _ in range(CALLS // 2):
            out = model.run_with_hooks(x, fwd_hooks=[("head.hook_out", adding(number))])
            if not torch.equal(out["logits"], clean + number):
                wrong.append(number)

    in_threads(THREADS, work)
    assert wrong == []


def test_importing_ferrohook_imports_no_points() -> None:
    code = "import sys, ferrohook; assert not {'torch', 'ferrohook.points'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
    assert fh.points is points


@pytest.mark.filterwarnings("error")
def test_nothing_warns_in_an_ordinary_run(model: Model, x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        model.run_with_cache(x, incl_bwd=True)
        model.run_with_hooks(x, fwd_hooks=[(MID, zero)], bwd_hooks=[], reset_hooks_end=True)
