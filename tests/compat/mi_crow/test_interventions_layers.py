"""`Layers`: registering detectors and controllers on layers of a model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.internals import find_registry
from support.interventions import Model, Seen, Shift, X, double, on
from support.threads import repeating, run_together


def test_hooks_are_found_by_layer_and_type() -> None:
    layers = fi.Layers(Model())
    shift, seen, pre = Shift(), Seen(), Seen("pre_forward", hook_id="pre")
    assert layers.register_hook("head", shift) == shift.id == shift.hook_id
    layers.register_hook("model_head", seen)
    assert layers.register_hook(1, pre) == "pre"
    assert layers.get_hooks() == [shift, seen, pre]
    assert layers.get_hooks("head") == layers.get_hooks("model_head") == [shift, seen]
    assert layers.get_hooks(hook_type=fi.HookType.PRE_FORWARD) == [pre]
    assert layers.get_hooks(1, "forward") == []
    assert layers.get_controllers() == [shift]
    assert layers.get_detectors() == [seen, pre]
    assert pre.context is layers
    assert layers.unregister_hook("pre")
    assert pre.context is None
    assert not layers.unregister_hook("pre")
    assert not layers.unregister_hook(pre)
    assert not layers.enable_hook("pre")
    assert not layers.disable_hook("pre")
    assert layers.get_hooks() == [shift, seen]


def test_names_are_printed_with_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    fi.Layers(Model()).print_layer_names()
    printed = capsys.readouterr().out.splitlines()
    assert "head: torch.Size([3, 4])" in printed
    assert "layers.0: no weight" in printed


def test_layers_follow_changes_of_the_model() -> None:
    model = nn.Sequential(nn.Identity())
    layers = fi.Layers(model)
    model[0] = nn.Linear(4, 4)
    model.append(nn.Identity())
    layers.register_hook(1, seen := Seen())
    layers.register_hook("0", Shift())
    assert torch.equal(model(X), model[0].forward(X) + 1)
    assert len(seen.seen) == 1


def test_a_module_that_contains_itself_has_finitely_many_layers() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].back = model
    assert fi.Layers(model).get_layer_names() == ["0", "0.back"]


def test_an_ambiguous_flat_name_is_refused() -> None:
    model = nn.Module()
    model.a_b = nn.Linear(2, 2)
    model.a = nn.Module()
    model.a.b = nn.Linear(2, 2)
    layers = fi.Layers(model)
    with pytest.raises(fh.SelectionError, match=r"'module_a_b' matches 2 layers .* 'a_b', 'a\.b'"):
        layers.register_hook("module_a_b", Seen())
    layers.register_hook("a.b", seen := Seen())
    assert seen.layer == "a.b"


def test_wrapped_and_instrumented_models_have_layers() -> None:
    for model in (Model(), fh.HookedModule(Model())):
        layers = fi.Layers(model)
        for path in ("head", "", "model_layers_0"):
            layers.register_hook(path, fi.FunctionController(path, double))
        with fh.instrument(model):
            changed = model(X)
        assert torch.equal(model(X), changed)
        layers.disable_all_hooks()
        assert not torch.equal(model(X), changed)


def test_a_hook_can_be_registered_again_after_its_module_was_cleared() -> None:
    layers = on(module := fh.HookedModule(nn.Identity()), hook := Seen())
    module.clear_hooks()
    assert hook.layer is None
    assert "on" not in repr(hook).split(",")[1]
    layers.register_hook("", hook)
    module(X)
    assert len(hook.seen) == 1
    assert layers.get_hooks() == [hook]


def test_a_cleared_hook_can_be_registered_on_another_model() -> None:
    old, new = fi.Layers(Model()), fi.Layers(Model())
    old.register_hook("head", hook := Seen())
    registry = find_registry(old.model.head)  # type: ignore[arg-type]
    assert registry is not None
    registry.clear()
    new.register_hook("head", hook)
    assert old.get_hooks() == []
    assert new.get_hooks() == [hook]
    assert find_registry(old.model.head) is None  # type: ignore[arg-type]


def test_unregistering_the_last_hook_restores_the_module() -> None:
    model = Model()
    layers = fi.Layers(model)
    hooks = [Seen() for _ in range(3)]
    for hook in hooks:
        layers.register_hook("head", hook)
    assert find_registry(model.head) is not None
    for hook in hooks:
        layers.unregister_hook(hook)
    assert find_registry(model.head) is None


def test_hooks_outlive_their_layers_and_nothing_outlives_the_model() -> None:
    module = nn.Identity()
    on(module, seen := Seen())
    gc.collect()
    module(X)
    assert len(seen.seen) == 1
    left = weakref.ref(module), weakref.ref(seen)
    del module, seen
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_registering_from_many_threads_loses_nothing(switch_often: None) -> None:
    model = Model()
    layers = fi.Layers(model)
    shared = Seen()

    def register() -> int:
        taken = 0
        for _ in range(30):
            try:
                layers.register_hook("layers.1", shared)
            except fh.HookError:
                continue
            taken += 1
            own = [Seen(), Shift(), Seen("pre_forward")]
            for hook in own:
                layers.register_hook("layers.0.mlp", hook)
            for hook in own:
                assert layers.unregister_hook(hook)
            assert layers.unregister_hook(shared)
        return taken

    with repeating(lambda: model(X), threads=2):
        assert sum(run_together(*[register] * 4)) >= 1
    assert layers.get_hooks() == []
    assert find_registry(model.layers[0].mlp) is None
    assert find_registry(model.layers[1]) is None
