"""Refused hooks, layers and types, and hooks that raise."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.internals import find_registry
from support.interventions import IDS, Model, Seen, X, double, on


class Raises(fi.Detector):
    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:
        raise KeyError(self.id)


def test_unknown_layers_are_refused_with_the_closest_names() -> None:
    layers = fi.Layers(Model())
    for ask in (
        lambda name: layers.register_hook(name, Seen()),
        layers.get_hooks,
    ):
        with pytest.raises(fh.SelectionError, match=r"no layer 'layer\.0\.mlp'.*'layers\.0\.mlp'"):
            ask("layer.0.mlp")
        with pytest.raises(fh.SelectionError, match="'model_head'"):
            ask("model_heads")
        with pytest.raises(fh.SelectionError, match="the first are '', 'layers'"):
            ask("§")
        for index in (-1, 14, 10**30):
            with pytest.raises(fh.SelectionError, match=f"14 layers, numbered from 0, got {index}"):
                ask(index)
    for wrong in (None, True, 1.5, ["head"], Model()):
        with pytest.raises(fh.HookTypeError, match="name or the index of a layer"):
            layers.register_hook(wrong, Seen())  # type: ignore[arg-type]
    assert layers.get_hooks() == []


def test_a_missing_or_wrong_layer_signature_is_refused() -> None:
    with pytest.raises(fh.HookTypeError, match="got NoneType"):
        fi.LayerActivationDetector(None)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="got NoneType"):
        fi.FunctionController(None, double)  # type: ignore[arg-type]
    for wrong in (True, 1.5, b"head"):
        with pytest.raises(fh.HookTypeError, match=type(wrong).__name__):
            Seen(layer_signature=wrong)


def test_unknown_hook_types_are_refused() -> None:
    layers = fi.Layers(Model())
    hook = Seen()
    for ask in (
        Seen,
        lambda kind: fi.FunctionController("head", double, kind),
        lambda kind: layers.register_hook("head", hook, kind),
        lambda kind: layers.get_hooks(hook_type=kind),
        lambda kind: setattr(hook, "hook_type", kind),
    ):
        with pytest.raises(
            ValueError, match="'backward': expected one of 'forward', 'pre_forward'"
        ):
            ask("backward")
        with pytest.raises(fh.HookTypeError, match="got int"):
            ask(3)
    for detector, kind in (
        (fi.ModelInputDetector(), "forward"),
        (fi.ModelOutputDetector(), "pre_forward"),
    ):
        with pytest.raises(ValueError, match=type(detector).__name__):
            layers.register_hook("", detector, kind)
    assert layers.get_hooks() == []
    assert find_registry(layers.model.head) is None  # type: ignore[arg-type]


def test_the_type_of_a_registered_hook_cannot_change() -> None:
    layers = on(nn.Identity(), hook := Seen())
    with pytest.raises(fh.HookError, match="is already registered"):
        hook.hook_type = fi.HookType.PRE_FORWARD
    layers.unregister_hook(hook)
    hook.hook_type = "pre_forward"  # type: ignore[assignment]
    assert hook.hook_type is fi.HookType.PRE_FORWARD


def test_wrong_hooks_and_models_are_refused() -> None:
    layers = fi.Layers(Model())
    for wrong in (double, Seen, None):
        with pytest.raises(fh.HookTypeError, match="a Detector or a Controller"):
            layers.register_hook("head", wrong)  # type: ignore[arg-type]
    for elsewhere in (double, fh.detectors.CallCounter(), fh.ForwardHook(print)):
        with pytest.raises(
            fh.HookTypeError, match=r"register other hooks with ferrohook\.register\(model, layer"
        ):
            layers.register_hook("head", elsewhere)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match=r"instance of nn\.Module, got the class Model"):
        fi.Layers(Model)  # type: ignore[arg-type]
    for act in (layers.unregister_hook, layers.enable_hook, layers.disable_hook):
        with pytest.raises(fh.HookTypeError, match="got int"):
            act(3)  # type: ignore[operator]
    with pytest.raises(fh.HookTypeError, match="hook_id must be a str or None, got int"):
        Seen(hook_id=3)
    for options, error in (
        ({"priority": "high"}, fh.HookTypeError),
        ({"on_error": "no"}, ValueError),
    ):
        with pytest.raises(error):
            layers.register_hook("head", Seen(), **options)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="target_dtype"):
        fi.LayerActivationDetector("head", target_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="encodings must be a mapping"):
        fi.ModelInputDetector().set_inputs_from_encodings(IDS)  # type: ignore[arg-type]
    assert find_registry(layers.model.head) is None  # type: ignore[arg-type]


def test_registering_a_hook_or_an_id_twice_is_refused() -> None:
    layers = fi.Layers(Model())
    layers.register_hook("head", hook := Seen(hook_id="mine"))
    for each in (layers, fi.Layers(layers.model)):
        with pytest.raises(fh.HookError, match="'mine', forward on 'head'> is already registered"):
            each.register_hook("layers.0", hook)
    with pytest.raises(fh.HookError, match="the id 'mine' is already used by"):
        layers.register_hook("layers.0", Seen(hook_id="mine"))
    assert layers.get_hooks() == [hook]
    assert hook.layer == "head"
    assert find_registry(layers.model.layers[0]) is None  # type: ignore[index, arg-type]


def test_wrong_results_of_functions_are_refused() -> None:
    for wrong in (None, "double", 3):
        with pytest.raises(fh.HookTypeError, match=f"function .* got {type(wrong).__name__}"):
            fi.FunctionController("", wrong)  # type: ignore[arg-type]

    def failing(x: Tensor) -> Tensor:
        raise OSError(x.shape)

    for function, error, text in (
        (lambda x: None, fh.HookTypeError, "function must return a tensor, got NoneType"),
        (lambda x: x.tolist(), fh.HookTypeError, "got list"),
        (lambda x: x[:1], ValueError, r"\(2, 4\), got \(1, 4\)"),
        (lambda x: x.sum(), ValueError, r"got \(\)"),
        (failing, OSError, "torch.Size"),
    ):
        for kind in fi.HookType:
            hook = fi.FunctionController("", function, kind, hook_id="mine")  # type: ignore[arg-type]
            layers = on(module := nn.Identity(), hook)
            with pytest.raises(fi.HookError, match=text) as raised:
                module(X)
            assert isinstance(raised.value, fh.HookError)
            assert isinstance(raised.value.original_error, error)
            assert raised.value.__cause__ is raised.value.original_error
            assert (raised.value.hook_id, raised.value.hook_type) == ("mine", kind.value)
            assert "'mine' on the model itself" in str(raised.value)
            layers.unregister_hook(hook)
            assert module(X) is X

    class Wrong(fi.Controller):
        def modify_activations(self, module: Any, inputs: Any, output: Any) -> Any:
            return "no tensor"

    on(module := nn.Identity(), Wrong())
    with pytest.raises(fi.HookError, match="must return a tensor or None, got str"):
        module(X)


def test_the_error_of_a_detector_names_it() -> None:
    model = Model()
    layers = fi.Layers(model)
    for kind in fi.HookType:
        hook = Raises(kind, "mine")
        layers.register_hook("head", hook)
        with pytest.raises(
            fi.HookError, match=f"the {kind} hook 'mine' on 'head' raised KeyError"
        ) as raised:
            model(X)
        assert raised.value.layer == "head"
        again = pickle.loads(pickle.dumps(raised.value))
        assert str(again) == str(raised.value)
        assert again.hook_id == "mine"
        layers.unregister_hook(hook)
    hand = nn.Identity()
    hand.register_forward_hook(Raises(hook_id="mine").get_torch_hook())
    with pytest.raises(fi.HookError, match="the forward hook 'mine' raised KeyError: 'mine'"):
        hand(X)


def test_a_detector_that_raises_can_be_disabled(caplog: pytest.LogCaptureFixture) -> None:
    layers = fi.Layers(module := nn.Identity())
    layers.register_hook("", hook := Raises(hook_id="mine"), on_error="disable")
    with caplog.at_level(logging.WARNING, "ferrohook"):
        assert module(X) is X
        assert module(X) is X
    assert len(caplog.records) == 1
    assert "'mine'" in caplog.text
    assert not hook.enabled
    layers.unregister_hook(hook)
    assert not hook.enabled
