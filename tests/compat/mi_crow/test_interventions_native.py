"""Native interventions on the layers of `Layers`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.compiling import compiled
from support.internals import find_registry
from support.interventions import Model, Returns, Shift, X, on
from support.plans import by_hand

VECTOR = torch.arange(1.0, 5.0)
EACH = [
    fh.Add(VECTOR, 2.0),
    fh.Scale(3.0),
    fh.Ablate(VECTOR),
    fh.Clamp(VECTOR, -0.5, 0.5),
    fh.Replace(VECTOR),
    fh.Zero(),
]


@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
@pytest.mark.parametrize("intervention", EACH, ids=lambda each: type(each).__name__)
def test_an_intervention_on_a_layer(intervention: Any, hook_type: str) -> None:
    linear = nn.Linear(4, 4)
    layers = fi.Layers(nn.Sequential(linear))
    before = hook_type == "pre_forward"
    x = by_hand(intervention, X) if before else X
    expected = linear(x) if before else by_hand(intervention, linear(x))
    hook_id = layers.register_hook("0", intervention, hook_type)
    assert torch.equal(layers.model(X), expected)
    (controller,) = layers.get_controllers()
    assert isinstance(controller, fi.InterventionController)
    assert controller.id == hook_id
    assert controller.intervention is intervention
    assert controller.layer == "0"
    assert controller.hook_type == hook_type
    registry = find_registry(linear)
    assert registry is not None
    assert [row[2] for row in registry.list()] == [intervention]
    layers.disable_hook(hook_id)
    assert torch.equal(layers.model(X), linear(X))
    layers.enable_hook(hook_id)
    assert torch.equal(layers.model(X), expected)
    layers.unregister_hook(hook_id)
    assert torch.equal(layers.model(X), linear(X))
    assert type(linear) is nn.Linear


@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
def test_the_torch_hook_does_the_same(hook_type: str) -> None:
    for intervention in EACH:
        controller = fi.InterventionController("", intervention, hook_type)
        linear = nn.Linear(4, 4)
        expected = on(linear, controller).model(X)
        assert torch.equal(controller.modify_activations(linear, X, X), by_hand(intervention, X))
        plain = copy.deepcopy(linear)
        fh.restore(plain)
        hook = controller.get_torch_hook()
        if hook_type == "forward":
            plain.register_forward_hook(hook)
        else:
            plain.register_forward_pre_hook(hook)
        assert torch.equal(plain(X), expected)


def test_controllers_and_interventions_run_in_the_order_of_registration() -> None:
    layers = fi.Layers(nn.Sequential(nn.Identity()))
    layers.register_hook("0", fh.Scale(2.0))
    layers.register_hook("0", Shift())
    layers.register_hook("0", fh.Scale(3.0))
    detector = fi.LayerActivationDetector("0")
    layers.register_hook("0", detector)
    layers.register_hook("0", fh.Add(VECTOR), priority=1)
    assert torch.equal(layers.model(X), ((X + VECTOR) * 2 + 1) * 3)
    assert torch.equal(detector.get_captured(), ((X + VECTOR) * 2 + 1) * 3)


def test_the_part_of_a_structure_is_named() -> None:
    layers = on(Returns((X, "cache")), fi.InterventionController("", fh.Add(VECTOR)))
    with pytest.raises(fh.HookTypeError, match="output_index"):
        layers.model(X)
    changed, rest = on(
        Returns((X, "cache")), fi.InterventionController("", fh.Add(VECTOR, output_index=0))
    ).model(X)
    assert torch.equal(changed, X + VECTOR)
    assert rest == "cache"


def test_copies_and_pickles() -> None:
    model = Model()
    layers = fi.Layers(model)
    hook_id = layers.register_hook("head", fh.Add(VECTOR[:3]))
    expected = model(X)
    again = pickle.loads(pickle.dumps(layers))
    assert [hook.id for hook in again.get_hooks()] == [hook_id]
    assert torch.equal(again.model(X), expected)
    copied = copy.deepcopy(model)
    layers.unregister_hook(hook_id)
    assert torch.equal(copied(X), expected)
    assert torch.equal(model(X) + VECTOR[:3], expected)


def test_on_error_applies() -> None:
    layers = fi.Layers(nn.Sequential(nn.Identity()))
    hook_id = layers.register_hook("0", fh.Add(torch.ones(9)), on_error="disable")
    assert torch.equal(layers.model(X), X)
    (controller,) = layers.get_hooks()
    assert controller.id == hook_id
    assert not controller.enabled


@pytest.mark.parametrize("wrong", [None, 7, torch.ones(4), fh.Add, Shift()])
def test_what_is_no_intervention_is_refused(wrong: Any) -> None:
    with pytest.raises(fh.HookTypeError, match="intervention must be an Intervention"):
        fi.InterventionController("head", wrong)


@compiled
def test_in_a_graph() -> None:
    layers = fi.Layers(Model())
    plain = copy.deepcopy(layers.model)
    layers.register_hook("head", fh.Ablate(VECTOR[:3]))
    layers.register_hook("layers.0.mlp.0", fh.Scale(2.0), "pre_forward")
    plain.head.register_forward_hook(lambda *call: by_hand(fh.Ablate(VECTOR[:3]), call[-1]))
    plain.layers[0].mlp[0].register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
    y = torch.compile(layers.model, backend="eager", fullgraph=True)(X)
    assert torch.equal(y, plain(X))
