"""Names, hooks, options and models that hook points refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import ferrohook as fh
from ferrohook.compat import transformer_lens as points
from ferrohook.compat.transformer_lens import HookedRootModule, HookPoint
from support.points import MID, Model, observe


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
        with pytest.raises(ValueError, match="dir must be 'fwd'"):
            act()
    assert model.list_hooks() == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "blocks.0.hook_mdi",
            r"Model has no hook point 'blocks.0.hook_mdi'.*closest.*'blocks.0.hook_mid'",
        ),
        ("blocks.0.linear", r"'blocks.0.linear' is a Linear in Model, not a hook point"),
        ("", "no hook point ''"),
    ],
)
def test_an_unknown_name_is_refused(model: Model, x: torch.Tensor, name: str, message: str) -> None:
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
        with pytest.raises(fh.HookTypeError, match="a name or a predicate"):
            model.add_hook(wrong, observe)
    for wrong in ([MID], (MID, observe), MID, [(MID, observe, 1)], 3):
        with pytest.raises(fh.HookTypeError, match="pairs"):
            model.run_with_hooks(x, fwd_hooks=wrong)
    with pytest.raises(fh.HookTypeError, match="cache must be a dict"):
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
def test_hooks_that_accept_the_point_are_accepted(hook: Any) -> None:
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
def test_a_hook_that_cannot_take_the_point_is_refused(model: Model, hook: Any) -> None:
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
        with pytest.raises(fh.HookTypeError, match="level must be an int"):
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
def test_a_non_numeric_backward_scale_is_refused(scale: Any) -> None:
    point = HookPoint()
    with pytest.raises(fh.HookTypeError, match="backward_scale must be a number"):
        point.backward_scale = scale
    assert point.backward_scale == 1


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_non_finite_backward_scale_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        HookPoint().backward_scale = scale


def test_a_conversion_without_revert_is_refused() -> None:
    class Half:
        def convert(self, value: Any) -> Any:
            return value

    point = HookPoint()
    with pytest.raises(fh.HookTypeError, match="Half has no revert"):
        point.enable_reshape(Half())
    with pytest.raises(fh.HookTypeError, match="int has no convert and no revert"):
        point.hook_conversion = 3
    assert point.hook_conversion is None


def test_a_model_without_setup_raises_a_clear_error(x: torch.Tensor) -> None:
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
def test_layer_of_a_name_without_one_raises(name: str | None) -> None:
    point = HookPoint()
    point.name = name
    with pytest.raises(ValueError, match="layer"):
        point.layer()


def test_a_named_point_that_never_ran_warns(model: Model, x: torch.Tensor) -> None:
    model.hook_spare = HookPoint()
    model.setup()
    with pytest.warns(fh.errors.NeverFiredWarning, match="'hook_spare' was selected and never ran"):
        _, cache = model.run_with_cache(x, names_filter=["hook_spare", MID])
    assert list(cache) == [MID]
    model.run_with_cache(x)
    model.run_with_cache(x, names_filter=lambda name: name == "hook_spare")


def test_gradients_of_a_non_scalar_output_are_refused(model: Model, x: torch.Tensor) -> None:
    model.forward = lambda x: model.hook_out(x * 1)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="scalar"):
        model.run_with_cache(x.requires_grad_(), incl_bwd=True)
    assert not model.hook_out.has_hooks()
