"""Copying and pickling of detectors and controllers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.internals import find_registry
from support.interventions import Model, X, double


class Importable(fi.Detector):
    def __init__(self, name: str) -> None:
        super().__init__("pre_forward", hook_id=name)
        self.name = name

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:
        self.metadata["seen"] = True


def test_pickled_hooks_refer_to_functions_by_importable_names() -> None:
    layers = fi.Layers(Model())
    hook = fi.FunctionController("head", double, "pre_forward", "mine")
    detector = fi.LayerActivationDetector(0, "kept", torch.float64, fh.data.MemoryStore())
    detector.set_context(lambda: "cannot be pickled")
    layers.register_hook("head", hook)
    layers.register_hook("head", detector)
    detector.disable()
    layers.model(X)
    again = pickle.loads(pickle.dumps(hook))
    assert again.function is double
    assert (again.id, again.hook_type, again.layer_signature) == ("mine", "pre_forward", "head")
    assert again.layer is None
    kept = pickle.loads(pickle.dumps(detector))
    assert kept.target_dtype == torch.float64
    assert kept.store is kept.context is None
    assert not kept.enabled
    assert not kept.metadata
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(fi.FunctionController("head", lambda x: x))


def test_layers_are_pickled_with_their_picklable_hooks() -> None:
    model = Model()
    layers = fi.Layers(model)
    layers.register_hook("head", fi.FunctionController("head", lambda x: x * 5, hook_id="left out"))
    layers.register_hook("head", fi.FunctionController("head", double, hook_id="mine"), priority=3)
    layers.register_hook("layers.0", Importable("name"))
    layers.register_hook("layers.1", Importable("cleared"))
    fh.clear(model.layers[1])
    with fh.scope() as scope:
        layers.register_hook("head", Importable("scoped"), scope=scope)
        in_scope = pickle.loads(pickle.dumps(layers))
    assert [hook.id for hook in in_scope.get_hooks()] == ["mine", "name"]
    again = pickle.loads(pickle.dumps(layers))
    assert [hook.id for hook in again.get_hooks()] == ["mine", "name"]
    head = find_registry(again.model.head)
    assert head is not None
    assert head.list()[0][3] == 3
    layers.disable_hook("left out")
    assert torch.equal(again.model(X), model(X))
    assert again.get_detectors()[0].metadata == {"seen": True}
    buffer = io.BytesIO()
    torch.save(model, buffer)  # hooks do not prevent saving
    buffer.seek(0)
    plain = torch.load(buffer, weights_only=False)
    assert find_registry(plain.head) is None


def test_a_copy_of_a_model_has_hooks_of_its_own() -> None:
    model = Model()
    layers = fi.Layers(model)
    controller = fi.FunctionController("head", double)
    detector = fi.LayerActivationDetector("head", store=fh.data.MemoryStore())
    layers.register_hook("head", controller)
    layers.register_hook("head", detector)
    copied = copy.deepcopy(model)
    expected = model(X)
    detector.clear_captured()
    assert torch.equal(copied(X), expected)
    assert detector.get_captured() is None
    controller.disable()
    assert torch.equal(copied(X), expected)
    assert torch.equal(model(X) * 2, expected)
    other = copy.deepcopy(layers)
    assert other.model is not model
    assert other.get_hooks() == []
    assert torch.equal(other.model(X) * 2, expected)  # the copy is disabled like the original


def test_a_copied_hook_is_not_registered() -> None:
    store = fh.data.MemoryStore()
    hook = fi.LayerActivationDetector("head", store=store)
    hook.set_context("context")
    (layers := fi.Layers(Model())).register_hook("head", hook)
    for copied in (copy.deepcopy(hook), copy.copy(hook)):
        assert not layers.unregister_hook(copied)
        assert copied.layer is None
        assert copied.id == hook.id
        copied.disable()
        assert hook.enabled
    assert copy.deepcopy(hook).store is store
    assert copy.deepcopy(hook).context == "context"
