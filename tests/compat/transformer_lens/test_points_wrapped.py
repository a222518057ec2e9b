"""`HookedRootModule.wrap`: hook points of an existing model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat.transformer_lens import HookedRootModule
from support.points import (
    BATCH,
    CALLS,
    NAMES,
    POS,
    THREADS,
    WIDTH,
    Model,
    adding,
    compiled_for,
    zero,
)
from support.threads import in_threads


class Layer(nn.Module):
    """Takes a keyword and returns a tuple, as many layers do."""

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


def test_wrap_adds_points_to_modules(x: torch.Tensor) -> None:
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


@pytest.mark.parametrize("kind", ["hook_in", "hook_out"])
def test_a_hook_replaces_the_first_of_several_places_of_a_tensor(
    x: torch.Tensor, kind: str
) -> None:
    class Pair(nn.Module):
        def forward(self, one: torch.Tensor, other: torch.Tensor) -> Any:
            return one, other

    model = HookedRootModule.wrap(Pair(), points={"": kind})
    one, other = model.run_with_hooks(x, x, fwd_hooks=[(kind, zero)])
    assert not one.any()
    assert other is x


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


def test_gradients_are_cached_in_a_wrapped_model(x: torch.Tensor) -> None:
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


def test_a_wrapped_model_is_transparent(x: torch.Tensor) -> None:
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


def test_into_inner_restores_the_model(x: torch.Tensor) -> None:
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
        with pytest.raises(fh.HookError, match="already returned"):
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


def test_wrap_keeps_existing_points(x: torch.Tensor) -> None:
    inner = Model()
    model = HookedRootModule.wrap(inner, points={"blocks.*": "hook_out"})
    _, cache = model.run_with_cache(x)
    assert set(cache) == {*NAMES, "blocks.0.hook_out", "blocks.1.hook_out"}
    with pytest.raises(fh.HookError, match="the model already has a module"):
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
