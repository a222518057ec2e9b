"""Containers, which have no `forward`: left out of globs and refused by name."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from ferrohook.compat.transformer_lens import HookedRootModule, HookPoint
from ferrohook.data import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

X = torch.ones(1, 2)


class Called(nn.ModuleList):
    """A list that the model calls."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


class Holder(nn.Module):
    """A container of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.called = Called([nn.ReLU()])
        self.named = nn.ModuleDict({"a": nn.ModuleList([nn.Identity()])})
        self.holder = Holder()
        self.weights = nn.ParameterList([torch.ones(2)])
        self.given = nn.Module()
        self.given.forward = lambda x: x  # type: ignore[method-assign]
        self.point = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder.layer:  # type: ignore[union-attr]
            x = layer(x)
        x = self.named["a"][0](self.called(x))  # type: ignore[index]
        return self.point(self.given(self.holder.inner(x) * self.weights[0]))


CALLED = [
    "",
    "encoder.layer.0",
    "encoder.layer.1",
    "called",
    "called.0",
    "named.a.0",
    "holder.inner",
    "given",
    "point",
]
CONTAINERS = {
    "encoder": "Module, which has no forward and is never called: select the modules in it, "
    "'encoder.*.*'",
    "encoder.layer": "ModuleList, which has no forward and is never called: select the modules in "
    "it, 'encoder.layer.*'",
    "named": "ModuleDict, which has no forward and is never called: select the modules in it, "
    "'named.*.*'",
    "holder": "Holder, which has no forward and is never called: select the modules in it, "
    "'holder.*'",
    "weights": "ParameterList, which has no forward and is never called",
}


def noop(*_: Any) -> None:
    """A hook that changes nothing."""


ENTRANCES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "capture": fh.capture,
    "register": lambda model, what: fh.register(model, what, noop),
    "a scope": lambda model, what: fh.register(model, what, noop, scope=fh.scope()),
    "run with hooks": lambda model, what: fh.run(model, X, hooks={what: noop}),
    "run with a capture": lambda model, what: fh.run(model, X, capture=what),
    "collect": lambda model, what: fh.collect(model, [X], what, MemoryStore()),
    "select": lambda model, what: fh.select(model, what, called=True),
    "hook points": HookedRootModule.wrap,
    "a layer": lambda model, what: fi.Layers(model).register_hook(
        what, fi.LayerActivationDetector(what)
    ),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_refused_by_name(entrance: str, name: str) -> None:
    model = Model()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(fh.SelectionError) as caught:
        ENTRANCES[entrance](model, name)
    assert str(caught.value) == f"{name!r} is a {CONTAINERS[name]}"
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("everything", [None, "**", re.compile(""), nn.Module, lambda *_: True])
def test_a_capture_of_everything_leaves_containers_out(everything: Any) -> None:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fh.capture(model, everything) as acts:
            model(X)
    assert {*acts} == {*CALLED}


def test_globs_of_hooks_leave_containers_out() -> None:
    model = Model()
    with fh.register(model, "**", noop) as handles:
        model(X)
    assert handles.names == [name for name, _ in model.named_modules() if name in CALLED]
    assert fh.register(model, "*", noop).names == ["called", "given", "point"]
    with pytest.raises(fh.SelectionError, match=r"'encoder.layer' is a .*, 'encoder.layer.\*'$"):
        fh.register(model, "encoder.*", noop)
    with pytest.raises(fh.SelectionError, match="'named' is a ModuleDict"):
        fh.register(model, nn.ModuleDict, noop)
    with pytest.raises(fh.SelectionError, match="'holder' is a Holder"):
        fh.register(model, ["called", "holder"], noop)


def test_the_model_itself_is_selected_if_it_has_a_forward() -> None:
    assert [*fh.select(Model(), "", called=True)] == [""]
    blocks = nn.ModuleList([nn.Linear(2, 2)])
    assert [*fh.select(blocks, called=True)] == ["0"]
    with pytest.raises(fh.SelectionError, match=r"^\(model\) is a ModuleList, .* '\*'$"):
        fh.capture(blocks, "")
    with pytest.raises(fh.SelectionError, match=r"never called$"):
        fh.capture(nn.ModuleList())


def test_containers_inside_wrappers_are_known() -> None:
    model = nn.Sequential(nn.Identity())
    model.blocks = fh.HookedModule(nn.ModuleList([nn.Identity()]))
    model.wrapped = fh.HookedModule(nn.Identity())
    assert [*fh.select(model, "*", called=True)] == ["0", "wrapped"]
    with fh.instrument(model):
        assert [*fh.select(model, "*", called=True)] == ["0", "wrapped"]


def test_select_names_containers_too() -> None:
    model = Model()
    assert fh.select(model) == dict(model.named_modules())
    assert [*fh.select(model, "encoder.layer")] == ["encoder.layer"]
