"""`HookedRootModule`: hooks by name, levels, and removal at exit."""

from __future__ import annotations

import contextvars
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook._core import frames
from ferrohook.compat.transformer_lens import HookedRootModule, HookPoint
from support.internals import in_no_scope
from support.points import MID, NAMES, Model, adding, noting, observe, zero


def test_setup_finds_and_names_hook_points(model: Model) -> None:
    assert list(model.hook_dict) == NAMES
    assert list(model.hook_points()) == list(model.hook_dict.values())
    assert [point.name for point in model.hook_points()] == NAMES
    assert model.mod_dict["blocks.0.linear"] is model.blocks[0].linear
    assert model.blocks[0].linear.name == "blocks.0.linear"
    assert model.hook_dict[MID].layer() == 0


def test_setup_keeps_a_name_attribute_that_is_not_a_str() -> None:
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


def test_a_refusal_by_check_hooks_to_add_leaves_nothing_behind() -> None:
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


def test_the_level_is_the_number_of_open_contexts(model: Model, x: torch.Tensor) -> None:
    assert model.context_level == 0
    with model.hooks([(MID, observe)]) as same, model.hooks([(MID, observe)]):
        assert same is model
        assert model.context_level == 2
        assert [handle.context_level for handle in model.hook_dict[MID].fwd_hooks] == [1, 2]
        assert Model().context_level == 0
    assert model.context_level == 0


def test_leaving_removes_exactly_the_hooks_of_the_context(model: Model, x: torch.Tensor) -> None:
    # TransformerLens removes by level, so nested contexts leak hooks or remove too many.
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


def test_an_exception_of_the_model_leaves_no_hooks(model: Model, x: torch.Tensor) -> None:
    for run in (model.run_with_hooks, model.run_with_cache):
        with pytest.raises(ArithmeticError, match="the model failed"):
            run(x, fail=True)
    with pytest.raises(ArithmeticError), model.hooks([(MID, zero)], [(MID, zero)]):
        model(x, fail=True)
    assert model.list_hooks() == {}
    assert not any(point.has_hooks() for point in model.hook_points())
    assert not model.is_caching
    assert model.context_level == 0


def test_a_refused_hook_leaves_no_hooks(model: Model, x: torch.Tensor) -> None:
    for last in (True, False):
        with pytest.raises(fh.SelectionError):
            model.run_with_hooks(
                x, fwd_hooks=[(MID, zero), ("hook_nowhere", zero)], reset_hooks_end=last
            )
        assert model.list_hooks() == {}
        assert model.context_level == 0
    assert in_no_scope()


def test_hooks_without_reset_stay_in_their_context(model: Model, x: torch.Tensor) -> None:
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
    assert in_no_scope()


def test_hooks_without_reset_end_with_their_model(x: torch.Tensor) -> None:
    references = []
    for _ in range(3):
        model, hook = Model(), adding(1)
        model.run_with_hooks(x, fwd_hooks=[(MID, hook)], reset_hooks_end=False)
        references.append(weakref.ref(hook))
        del model, hook
        gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert len(frames.get()) == 1  # each call takes out empty frames of other models
    Model().reset_hooks()
    assert in_no_scope()


@pytest.mark.parametrize("by", ["run_with_hooks", "hooks"])
def test_backward_hooks_of_a_block_go_with_the_graphs_recorded_in_it(
    model: Model, x: torch.Tensor, by: str
) -> None:
    log: list[Any] = []
    hook = noting(log, "backward")
    reference = weakref.ref(hook)
    before = model(x)
    fwd = [(MID, noting(log, "forward"))]
    if by == "hooks":
        with model.hooks(fwd, [(MID, hook), ("hook_out", zero)]):
            loss, other = model(x), model(x)
    else:
        loss, other = (
            model.run_with_hooks(x, fwd_hooks=fwd, bwd_hooks=[(MID, hook), ("hook_out", zero)])
            for _ in range(2)
        )
    del hook
    assert log == ["forward", "forward"]
    assert not any(point.has_hooks() for point in model.hook_points())
    after = model(x)
    assert len(log) == 2
    for unhooked in (before, after):
        unhooked.backward()
    assert len(log) == 2
    model.zero_grad()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert log[2:] == ["backward"] * 2
    gradient = model.blocks[0].linear.weight.grad
    assert gradient is not None
    assert not gradient.any()
    del loss
    gc.collect()
    assert reference() is not None
    other.backward()
    assert len(log) == 5
    del other
    gc.collect()
    assert reference() is None


def test_backward_hooks_of_a_block_do_not_reach_later_calls_of_a_copied_context(
    model: Model, x: torch.Tensor
) -> None:
    log: list[Any] = []
    model.add_hook(MID, noting(log, "everywhere"), dir="bwd")
    with model.hooks(bwd_hooks=[(MID, noting(log, "block"))]):
        inside = contextvars.copy_context()
        kept = model(x)  # keeps the hooks
    late = inside.run(model, x)
    assert len(inside.run(lambda: model.hook_dict[MID].bwd_hooks)) == 1
    late.backward()
    assert log == ["everywhere"]
    kept.backward()
    assert log == ["everywhere", "everywhere", "block"]


def test_a_backward_hook_that_was_removed_does_not_fire_after_its_block(
    model: Model, x: torch.Tensor
) -> None:
    log: list[Any] = []
    with model.hooks(bwd_hooks=[(MID, noting(log, "block"))]):
        loss = model(x)
        model.reset_hooks()
    loss.backward()
    assert log == []


def test_clear_contexts_clears_ctx(model: Model, x: torch.Tensor) -> None:
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
