"""Declarations of recorded outputs: forms, selection and storage."""
# ruff: noqa: RUF012 (declarations are dicts of the class, as transformers has them)

from __future__ import annotations

import dataclasses
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from ferrohook.compat.transformers import OutputRecorder, capture_outputs
from support.recording import Attention, Layer, Looped, Model, Output, X, expected, same

# --- A custom model -------------------------------------------------------------------------------


def test_a_custom_model_returns_its_declared_outputs() -> None:
    model = Model()
    states, attentions = expected(model)
    output = model(X, output_hidden_states=True, output_attentions=True)
    assert list(output) == ["last_hidden_state", "hidden_states", "attentions"]
    assert type(output["hidden_states"]) is type(output["attentions"]) is tuple
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)
    assert output["hidden_states"][0] is X
    assert output["hidden_states"][-1] is output["last_hidden_state"]
    assert list(model(X)) == ["last_hidden_state"]
    assert list(model(X, output_attentions=True)) == ["last_hidden_state", "attentions"]


def test_the_initial_state_is_found_among_keywords_in_any_order() -> None:
    class Keywords(nn.Module):
        def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return hidden_states + mask

    class Calls(nn.Module):
        _can_record_outputs = {"hidden_states": Keywords}

        def __init__(self) -> None:
            super().__init__()
            self.layer = Keywords()

        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.layer(mask=torch.ones(4), hidden_states=x)
            return {"last_hidden_state": y}

    output = Calls()(X, output_hidden_states=True)
    assert output["hidden_states"][0] is X
    assert torch.equal(output["hidden_states"][1], X + 1)


def test_recorded_outputs_keep_their_autograd_graph() -> None:
    model = Model()
    state = model(X, output_hidden_states=True)["hidden_states"][1]
    state.sum().backward()
    assert model.layers[0].attention.mix.weight.grad is not None
    assert model.layers[1].attention.mix.weight.grad is None


@dataclasses.dataclass(frozen=True)
class Frozen:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


@pytest.mark.parametrize("kind", [Output, Frozen, Slotted, dict, UserDict])
def test_any_dict_or_dataclass_can_be_the_output(kind: Any) -> None:
    class Returns(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
            return kind(last_hidden_state=self.norm(x))

    model = Returns()
    states, _ = expected(model)
    output = model(X, output_hidden_states=True)
    assert type(output) is kind
    given = output["hidden_states"] if kind in {dict, UserDict} else output.hidden_states
    assert same(given, states)
    as_tuple = model(X, output_hidden_states=True, return_dict=False)
    assert type(as_tuple) is tuple
    assert len(as_tuple) == 2
    assert torch.equal(as_tuple[0], states[-1])
    assert same(as_tuple[1], states)
    assert type(model(X, return_dict=False)) is tuple


def test_flags_come_from_any_config_and_keywords_take_precedence() -> None:
    class Config:
        output_hidden_states = True
        return_dict = False

    model = Model()
    model.config = Config()
    assert len(model(X)) == 2
    assert list(model(X, return_dict=True)) == ["last_hidden_state", "hidden_states"]
    assert len(model(X, output_hidden_states=False)) == 1
    # As in transformers, None counts as a keyword.
    assert len(model(X, output_hidden_states=None)) == 1


def test_the_last_state_is_tied_by_default() -> None:
    class Untied(Model):
        @capture_outputs(tie_last_hidden_states=False)
        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
            return {"last_hidden_state": self.norm(x)}

    class Config:
        tie_last_hidden_states = True

    model = Untied()
    output = model(X, output_hidden_states=True)
    assert not torch.equal(output["hidden_states"][-1], output["last_hidden_state"])
    model.config = Config()
    output = model(X, output_hidden_states=True)
    assert output["hidden_states"][-1] is output["last_hidden_state"]

    class Vision(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
            return {"vision_hidden_states": x * 2, "last_hidden_state": x}

    output = Vision()(X, output_hidden_states=True)
    assert output["hidden_states"][-1] is output["vision_hidden_states"]


class Crossed(nn.Module):
    """A layer with two attentions of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = Attention(), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cross_attn(self.self_attn(x)[0])[0]


class Decoder(nn.Module):
    _can_record_outputs: Any = {
        "attentions": OutputRecorder(Attention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(Attention, index=1, layer_name=".cross_attn"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Crossed() for _ in range(2))

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        return {"x": x, "cross_attentions": None}


def weights_of_each_kind(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    x, own, cross = X, [], []
    for layer in model.layers:
        y, weights = layer.self_attn(x)
        own.append(weights)
        cross.append(layer.cross_attn(y)[1])
        x = layer(x)
    return own, cross


@pytest.mark.parametrize(
    "declared",
    [
        Decoder._can_record_outputs,
        # A list of two recorders: a layer's self- and its cross-attention, alternating.
        {
            "attentions": [
                OutputRecorder(None, index=1, class_name="self_attn"),
                OutputRecorder(None, index=1, class_name="cross_attn"),
            ]
        },
    ],
    ids=["by layer_name", "a list of two by path"],
)
def test_attentions_cover_cross_attentions(declared: Any) -> None:
    class Declares(Decoder):
        _can_record_outputs = declared

    model = Declares()
    own, cross = weights_of_each_kind(model)
    output = model(X, output_attentions=True)
    assert same(output["attentions"], own)
    assert same(output["cross_attentions"], cross)


def test_a_list_of_two_is_one_key_where_the_output_has_no_cross_attentions() -> None:
    class Declares(Decoder):
        _can_record_outputs = {
            "attentions": [
                OutputRecorder(None, index=1, class_name="self_attn"),
                OutputRecorder(None, index=1, class_name="cross_attn"),
            ]
        }

        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            for layer in self.layers:
                x = layer(x)
            return {"x": x}

    model = Declares()
    own, cross = weights_of_each_kind(model)
    output = model(X, output_attentions=True)
    assert list(output) == ["x", "attentions"]
    assert same(output["attentions"], [own[0], cross[0], own[1], cross[1]])


def test_output_attentions_includes_mask_decoder_attentions() -> None:
    class Mask(Model):
        _can_record_outputs = {"mask_decoder_attentions": Attention}

    model = Mask()
    _, attentions = expected(model)
    assert same(model(X, output_attentions=True)["mask_decoder_attentions"], attentions)
    assert "mask_decoder_attentions" not in model(X, output_mask_decoder_attentions=True)


@pytest.mark.parametrize("declared", ["Layer", "ayer", [Layer], OutputRecorder(Layer)])
def test_ways_to_declare(declared: Any) -> None:
    class Declares(Model):
        _can_record_outputs = {"hidden_states": declared}

    model = Declares()
    assert same(model(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


def test_several_classes_under_one_key_are_recorded_in_the_order_of_their_calls() -> None:
    class Other(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Two(nn.Module):
        _can_record_outputs = {"hidden_states": [nn.Linear, Other]}

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), Other()

        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"x": self.a(self.b(self.a(x)))}

    model = Two()
    a = model.a(X)
    states = model(X, output_hidden_states=True)["hidden_states"]
    # The linear layer inside `b` does not run.
    assert same(states, [X, a, a * 2, model.a(a * 2)])


def test_a_state_of_none_is_left_out_and_the_initial_state_is_optional() -> None:
    class Gives(nn.Module):
        def forward(self, x: torch.Tensor, *, skip: bool = False) -> Any:
            return (None if skip else x, x)

    class Some(nn.Module):
        _can_record_outputs = {
            "hidden_states": OutputRecorder(Gives, capture_initial_hidden_state=False)
        }

        def __init__(self) -> None:
            super().__init__()
            self.gives = Gives()

        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            self.gives(x, skip=True)
            return {"x": self.gives(x=x)[1]}

    states = Some()(X, output_hidden_states=True)["hidden_states"]
    assert same(states, [X])


# --- Storage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "places"),
    [
        ([0, -1], {0, 3}),
        (range(1, 3), {1, 2}),
        (2, {2}),
        (torch.tensor(2), {2}),
        ([-2], {2}),
        ([7, 1], {1}),
        (True, {0, 1, 2, 3}),
    ],
    ids=repr,
)
def test_selected_states_are_recorded_and_the_others_are_none(asked: Any, places: set[int]) -> None:
    model = Model()
    states, _ = expected(model)
    given = model(X, output_hidden_states=asked)["hidden_states"]
    assert len(given) == 4
    for place, (state, wanted) in enumerate(zip(given, states, strict=True)):
        assert (state is None) == (place not in places)
        assert state is None or torch.equal(state, wanted)


def test_negative_indices_use_the_layer_count_of_the_config() -> None:
    class Config:
        depth = 3

    class Declares(Model):
        _can_record_outputs = {
            "hidden_states": OutputRecorder(Layer, num_hidden_layers_key="depth")
        }

    model = Declares()
    model.config = Config()
    kept = [s is not None for s in model(X, output_hidden_states=[-1])["hidden_states"]]
    assert kept == [False, False, False, True]
    Config.depth = 2
    kept = [s is not None for s in model(X, output_hidden_states=[-1])["hidden_states"]]
    assert kept == [False, False, True, False]


@pytest.mark.parametrize(("model", "count"), [(Model(), 4), (Looped(), 7)])
def test_negative_indices_without_a_layer_count_in_the_config(model: Model, count: int) -> None:
    model.config = type("Config", (), {"num_hidden_layers": None})()
    states = model(X, output_hidden_states=[-1, 1, -8])["hidden_states"]
    assert [state is not None for state in states] == [
        place in {1, count - 1} for place in range(count)
    ]


def test_unselected_states_are_freed() -> None:
    alive: list[list[bool]] = []
    refs: list[weakref.ref[torch.Tensor]] = []

    class Big(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            refs.append(weakref.ref(y))
            return y

    class Deep(Model):
        _can_record_outputs = {"hidden_states": Big}

        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            for layer in self.layers:
                x = layer(x)
            alive.append([ref() is not None for ref in refs])
            return {"x": x}

    model = Deep()
    model.layers = nn.ModuleList(Big() for _ in range(4))
    model(X, output_hidden_states=[2])
    assert alive == [[False, True, False, True]]  # the last one is a local variable


def test_each_recorder_sets_detach_dtype_and_device() -> None:
    class Declares(Model):
        _can_record_outputs = {
            "hidden_states": OutputRecorder(Layer, detach=True, dtype=torch.float16),
            "attentions": OutputRecorder(Attention, index=1, device="meta"),
        }

    model = Declares()
    x = X.clone().requires_grad_()
    output = model(x, output_hidden_states=True, output_attentions=True)
    *states, last = output["hidden_states"]
    assert [state.dtype for state in states] == [torch.float16] * 3
    assert not any(state.requires_grad for state in states)
    assert same([last], [output["last_hidden_state"].half()])
    assert not last.requires_grad
    assert [each.device.type for each in output["attentions"]] == ["meta"] * 3
