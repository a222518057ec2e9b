"""Declarations, flags and outputs that recording refuses."""
# ruff: noqa: RUF012 (declarations are dicts of the class, as transformers has them)

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat.transformers import (
    OutputRecorder,
    capture_outputs,
    merge_with_config_defaults,
    uninstall,
)
from support.compiling import compiled
from support.recording import Attention, Layer, Model, Outer, Output, X


def declaring(**declared: Any) -> Model:
    return type("Declares", (Model,), {"_can_record_outputs": declared})()


def test_a_recorder_with_wrong_arguments_is_refused() -> None:
    with pytest.raises(fh.HookTypeError, match="needs a target_class or a class_name"):
        OutputRecorder(None)
    with pytest.raises(
        fh.HookTypeError, match=r"target_class must be a subclass of nn.Module, got the"
    ):
        OutputRecorder(int)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="index must be an int, got str"):
        OutputRecorder(Layer, index="1")  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="index must be an int, got bool"):
        OutputRecorder(Layer, index=True)
    with pytest.raises(fh.HookTypeError, match=r"dtype must be a torch.dtype, got str"):
        OutputRecorder(Layer, dtype="half")  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="num_hidden_layers_key must be a str, got int"):
        OutputRecorder(Layer, num_hidden_layers_key=3)  # type: ignore[arg-type]
    for name in ("capture_initial_hidden_state", "detach"):
        with pytest.raises(fh.HookTypeError, match=f"{name} must be a bool, got str"):
            OutputRecorder(Layer, **{name: "no"})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        OutputRecorder(Layer, device="nowhere")


@pytest.mark.parametrize("given", [3, None, "", int, Layer(), {}])
def test_a_declaration_of_the_wrong_type_names_its_key(given: Any) -> None:
    model = declaring(hidden_states=given)
    with pytest.raises(fh.HookTypeError, match=r"_can_record_outputs\['hidden_states'\]"):
        model(X, output_hidden_states=True)
    model._can_record_outputs = [Layer]
    with pytest.raises(fh.HookTypeError, match="_can_record_outputs must be a dict"):
        model(X)


@pytest.mark.parametrize("index", [2, -3])
def test_an_index_out_of_range_names_its_key(index: int) -> None:
    model = declaring(attentions=OutputRecorder(Attention, index=index))
    with pytest.raises(fh.SelectionError, match=rf"attentions.* no output_index {index}.*tuple"):
        model(X, output_attentions=True)
    assert list(model(X)) == ["last_hidden_state"]


def test_a_declaration_that_matches_no_module_names_its_key_and_the_closest() -> None:
    model = declaring(hidden_states="Lajer", attentions=nn.Conv2d)
    with pytest.raises(
        fh.SelectionError, match=r"'hidden_states' for Lajer.*closest classes are Layer"
    ):
        model(X, output_hidden_states=True)
    with pytest.raises(fh.SelectionError, match="'attentions' for Conv2d"):
        model(X, output_attentions=True)
    assert list(model(X)) == ["last_hidden_state"]
    # Requested by a config: an empty tuple, as in transformers.
    model.config = type("Config", (), {"output_attentions": True})()
    assert model(X)["attentions"] == ()


def test_an_unknown_flag_names_the_closest() -> None:
    model = Model()
    with pytest.raises(
        fh.HookTypeError, match=r"not know 'output_hiden_states'.*output_hidden_states"
    ):
        model(X, output_hiden_states=True)
    # False requests nothing.
    assert list(model(X, output_hiden_states=False)) == ["last_hidden_state"]
    with pytest.raises(
        fh.HookTypeError, match="must be a bool, an index or a list of indices, got 'all'"
    ):
        model(X, output_hidden_states="all")


class Encoder(Model):
    _can_record_outputs = {"attentions": Attention}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Model()

    def forward(self, x: torch.Tensor, **flags: Any) -> Any:
        return self.decoder(self.encoder(x, **flags)["last_hidden_state"], **flags)


def test_a_flag_passed_on_to_a_sub_model_is_accepted() -> None:
    assert "hidden_states" in Both()(X, output_hidden_states=True)
    with pytest.raises(fh.HookTypeError, match="output_hiden_states"):
        Both()(X, output_hiden_states=True)


def test_a_flag_of_a_sub_model_added_later_is_accepted() -> None:
    class Passes(Outer):
        _can_record_outputs = {}

    class Brings(Model):
        _can_record_outputs = {"attentions": Attention, "layers": Layer}

        @capture_outputs
        def forward(self, x: torch.Tensor, **_flags: Any) -> dict[str, Any]:
            return {"last_hidden_state": self.layers[0](x)}

    model = Passes()
    with pytest.raises(fh.HookTypeError, match="does not know 'output_layers'"):
        model(X, output_layers=True)
    model.inner = Brings()
    assert len(model(X, output_layers=True)["inner"]["layers"]) == 1


@compiled
def test_flags_are_validated_compiled() -> None:
    both = Both()

    def call(x: torch.Tensor, **flags: Any) -> Any:
        return both(x, **flags)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert "hidden_states" in compiled(X, output_hidden_states=True)
    # Dynamo wraps exceptions raised during tracing.
    with pytest.raises(Exception, match=r"not know 'output_hiden_states'.*output_attentions"):
        compiled(X, output_hiden_states=True)


@pytest.mark.parametrize("returned", [X, (X,), Output])
def test_an_output_that_cannot_hold_recorded_values_is_refused(returned: Any) -> None:
    class Returns(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> Any:
            self.layers[0](x)
            return returned

    with pytest.raises(fh.HookTypeError, match=r"hidden_states was recorded.* dict or a dataclass"):
        Returns()(X, output_hidden_states=True)
    assert Returns()(X, return_dict=False) is returned

    class NoField(Model):
        _can_record_outputs = {"layers": Layer}

        @capture_outputs
        def forward(self, x: torch.Tensor) -> Any:
            return Output(self.layers[0](x))

    with pytest.raises(
        fh.HookTypeError, match="Output has no field for these recorded outputs: layers"
    ):
        NoField()(X, output_layers=True)


def test_recorders_of_one_key_with_different_options_are_refused() -> None:
    model = declaring(hidden_states=[OutputRecorder(Layer, detach=True), OutputRecorder(Attention)])
    with pytest.raises(fh.HookError, match="'hidden_states' differ in detach"):
        model(X, output_hidden_states=True)


def test_a_layer_that_cannot_be_instrumented_is_refused() -> None:
    class Scripted(Model):
        _can_record_outputs = {"hidden_states": torch.jit.ScriptModule}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Scripted()
        model.layers[0] = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(fh.HookError, match=r"hidden_states.*TorchScript"):
        model(X, output_hidden_states=True)
    assert list(model(X)) == ["last_hidden_state"]


def test_decorators_and_uninstall_refuse_arguments_of_a_wrong_type() -> None:
    with pytest.raises(fh.HookTypeError, match="capture_outputs must decorate a forward, got"):
        capture_outputs(3)  # type: ignore[call-overload]
    with pytest.raises(
        fh.HookTypeError, match="merge_with_config_defaults must decorate a forward"
    ):
        merge_with_config_defaults(3)  # type: ignore[type-var]
    with pytest.raises(fh.HookTypeError, match=r"uninstall needs an instance of nn.Module, got"):
        uninstall(3)  # type: ignore[arg-type]
