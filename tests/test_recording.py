"""Recording: what a model of one's own declares, and the faults of transformers' gone."""
# ruff: noqa: RUF012 (declarations are dicts of the class, as transformers has them)

from __future__ import annotations

import asyncio
import contextvars
import copy
import dataclasses
import gc
import io
import pickle
import sys
import sysconfig
import textwrap
import threading
import warnings
import weakref
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from threaded import in_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

import ferrohook as fh
from ferrohook._core import active_scopes
from ferrohook.instrumentation import registry_of
from ferrohook.recording import (
    OutputRecorder,
    capture_outputs,
    merge_with_config_defaults,
    uninstall,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 60.0
"""Seconds that any wait of these tests may take."""

no_compile = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")) and sys.version_info < (3, 14),
    reason="torch.compile does not support free-threaded CPython 3.13",
)


# --- A model of one's own -------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(x @ x.mT, -1)
        return self.mix(weights @ x), weights


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.attention(x)[0])


class Model(nn.Module):
    _can_record_outputs: Any = {"hidden_states": Layer, "attentions": Attention}

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(4)

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        return {"last_hidden_state": self.norm(x)}


X = torch.linspace(-1, 1, 24).view(2, 3, 4)


def expected(model: Any, x: torch.Tensor = X) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The states and the attentions, computed layer by layer."""
    states, attentions = [x], []
    for layer in model.layers:
        attentions.append(layer.attention(states[-1])[1])
        states.append(layer(states[-1]))
    states[-1] = model.norm(states[-1])
    return states, attentions


def same(ours: Any, theirs: Any) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_a_model_of_ones_own_returns_what_it_declares() -> None:
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


def test_what_is_recorded_is_on_the_tape_of_autograd() -> None:
    model = Model()
    state = model(X, output_hidden_states=True)["hidden_states"][1]
    state.sum().backward()
    assert model.layers[0].attention.mix.weight.grad is not None
    assert model.layers[1].attention.mix.weight.grad is None


@dataclasses.dataclass
class Output:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


@pytest.mark.parametrize("kind", [Output, Frozen, Slotted, dict, UserDict])
def test_any_dict_or_dataclass_takes_it_up(kind: Any) -> None:
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


def test_flags_come_from_any_config_and_keywords_go_first() -> None:
    class Config:
        output_hidden_states = True
        return_dict = False

    model = Model()
    model.config = Config()
    assert len(model(X)) == 2
    assert list(model(X, return_dict=True)) == ["last_hidden_state", "hidden_states"]
    assert len(model(X, output_hidden_states=False)) == 1
    # As in transformers: None is a keyword too.
    assert len(model(X, output_hidden_states=None)) == 1


def test_the_last_state_is_tied_unless_it_is_told_otherwise() -> None:
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
    """One layer with two attentions of one class."""

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
        # A list of two: of a layer's self- and its cross-attention, in turn.
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


def test_mask_decoder_attentions_come_with_attentions() -> None:
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


def test_a_state_that_is_none_is_left_out_and_a_first_one_is_not_wanted() -> None:
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


# --- What is kept -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "places"),
    [
        ([0, -1], {0, 3}),
        (range(1, 3), {1, 2}),
        (2, {2}),
        ([-2], {2}),
        ([7, 1], {1}),
        (True, {0, 1, 2, 3}),
    ],
    ids=repr,
)
def test_selected_states_are_kept_and_none_stands_for_the_others(
    asked: Any, places: set[int]
) -> None:
    model = Model()
    states, _ = expected(model)
    given = model(X, output_hidden_states=asked)["hidden_states"]
    assert len(given) == 4
    for place, (state, wanted) in enumerate(zip(given, states, strict=True)):
        assert (state is None) == (place not in places)
        assert state is None or torch.equal(state, wanted)


def test_negative_indices_count_by_the_config() -> None:
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


def test_negative_indices_where_a_config_leaves_the_count_of_layers_open() -> None:
    model = Model()
    model.config = type("Config", (), {"num_hidden_layers": None})()
    kept = [s is not None for s in model(X, output_hidden_states=[-1])["hidden_states"]]
    assert kept == [False, False, False, True]


def test_states_not_selected_are_not_kept_alive() -> None:
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
    assert alive == [[False, True, False, True]]  # the last is the local variable


def test_each_recorder_says_how_its_tensors_are_kept() -> None:
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
    assert last is output["last_hidden_state"]
    assert [each.device.type for each in output["attentions"]] == ["meta"] * 3


# --- Lifecycle ----------------------------------------------------------------------------------


def test_a_model_is_touched_by_its_first_recording_and_given_back() -> None:
    model = Model()
    before = [(type(module), set(vars(module))) for module in model.modules()]
    model(X)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    model(X, output_hidden_states=True)
    assert type(model.layers[0]) is not Layer
    assert model.layers[0].__class__ is Layer
    uninstall(model)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    uninstall(model)
    assert len(model(X, output_hidden_states=True)["hidden_states"]) == 4


def test_uninstalling_leaves_what_others_instrumented_and_takes_out_sub_models() -> None:
    outer = nn.Sequential(Model())
    with fh.instrument(outer):
        seen: list[Any] = []
        outer[0].layers[0].register_forward_hook(lambda *args: seen.append(args))
        outer[0](X, output_hidden_states=True)
        uninstall(outer)
        assert "_ferrohook_recording" not in vars(outer[0])
        outer(X)
        assert len(seen) == 2
    assert type(outer[0].layers[0]) is Layer


def test_a_recorded_model_is_copied_saved_and_pickled() -> None:
    model = Model()
    states, _ = expected(model)
    model(X, output_hidden_states=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        copy.deepcopy(model),
        copy.copy(model),
    ]
    for copied in copies[:3]:
        assert type(copied.layers[0]) is Layer
        assert vars(copied).keys() == vars(Model()).keys()
    for each in (*copies, model):
        assert same(each(X, output_hidden_states=True)["hidden_states"], states)
        assert same(each(X, output_hidden_states=True)["hidden_states"], states)


def test_a_copy_with_hooks_of_the_users_records_for_itself() -> None:
    model = Model()
    fh.instrument(model)
    model.layers[0].register_forward_hook(lambda *_: None)
    model(X, output_hidden_states=True)
    copied = copy.deepcopy(model)
    assert len(copied(X, output_hidden_states=True)["hidden_states"]) == 4
    assert len(model(X, output_hidden_states=True)["hidden_states"]) == 4


def test_layers_that_come_later_are_recorded() -> None:
    model = Model(1)
    model(X, output_hidden_states=True, output_attentions=True)
    model.layers.append(Layer())
    model.layers.insert(0, Layer())
    states, attentions = expected(model)
    output = model(X, output_hidden_states=True, output_attentions=True)
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)
    model.layers[1] = Layer()
    del model.layers[0]
    model.layers[0].attention = Attention()
    states, attentions = expected(model)
    output = model(X, output_hidden_states=True, output_attentions=True)
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)


def _in_a_new_dict_of_the_same(layers: nn.ModuleList) -> None:
    layers._modules = dict(layers._modules)
    layers._modules["1"] = Layer()


def _in_a_new_state(layers: nn.ModuleList) -> None:
    layers.__dict__ = {**vars(layers), "_modules": {**layers._modules, "1": Layer()}}


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers.append(Layer()),
        lambda layers: layers.__setitem__(0, Layer()),
        lambda layers: layers.__delitem__(0),
        lambda layers: setattr(layers, "0", Layer()),
        lambda layers: layers._modules.__setitem__("0", Layer()),
        lambda layers: layers._modules.update({"0": Layer(), "1": Layer()}),
        lambda layers: layers._modules.popitem(),
        lambda layers: setattr(layers, "_modules", {"0": Layer(), "1": Layer()}),
        lambda layers: vars(layers).__setitem__("_modules", {"0": Layer()}),
        lambda layers: vars(layers).update(_modules={"0": Layer()}),
        _in_a_new_dict_of_the_same,
        _in_a_new_state,
    ],
)
def test_a_change_of_the_layers_is_seen_however_it_is_made(
    change: Callable[[nn.ModuleList], object],
) -> None:
    model = Model(4)
    for _ in range(3):
        model(X, output_hidden_states=True)
        before = [*model.layers]
        change(model.layers)
        assert [*model.layers] != before
        states, attentions = expected(model)
        for _ in range(3):  # what was found the same is remembered
            output = model(X, output_hidden_states=True, output_attentions=True)
            assert same(output["hidden_states"], states)
            assert same(output["attentions"], attentions)


def test_a_layer_in_the_place_and_at_the_address_of_one_that_is_gone() -> None:
    model = Model(1)
    for _ in range(20):
        assert len(model(X, output_attentions=True)["attentions"]) == 1
        del model.layers[0]
        model.layers.append(Layer())
        model.layers[0].attention = Attention()


def test_a_layer_inside_one_that_had_none_is_recorded() -> None:
    model = Model(1)
    assert len(model(X, output_attentions=True)["attentions"]) == 1
    mix = model.layers[0].attention.mix
    mix.inner = Attention()
    mix.register_forward_pre_hook(lambda module, args: (module.inner(args[0])[0],))
    assert len(model(X, output_attentions=True)["attentions"]) == 2


def test_a_layer_that_outlives_its_model_is_given_back() -> None:
    layer = Layer()
    for _ in range(3):
        model = Model(1)
        model.layers[0] = layer
        assert len(model(X, output_hidden_states=True)["hidden_states"]) == 2
        del model
        gc.collect()
        assert type(layer) is Layer
        assert "_ferrohook_dispatcher" not in vars(layer)


def instrumented(model: nn.Module) -> list[bool]:
    return ["_ferrohook_dispatcher" in vars(module) for module in model.modules()]


def test_a_model_that_records_is_instrumented_throughout_until_uninstall() -> None:
    model = Model()
    plain = {module: type(module) for module in model.modules()}
    model(X)
    assert not any(instrumented(model))
    model(X, output_hidden_states=True)
    assert all(instrumented(model))
    model.layers.append(Layer())
    model(X, output_hidden_states=True)
    assert all(instrumented(model))
    uninstall(model)
    assert not any(instrumented(model))
    assert all(type(module) is cls for module, cls in plain.items())


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_cannot_be_instrumented_is_left_as_it_is() -> None:
    model = Model()
    model.register_module("scripted", torch.jit.script(nn.ReLU()))
    states = expected(model)[0]
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)
    *others, scripted = instrumented(model)
    assert all(others)
    assert not scripted


def test_two_models_share_a_layer() -> None:
    one, other = Model(2), Model(2)
    other.layers[1] = one.layers[0]
    for _ in range(2):
        for model in (one, other):
            states, attentions = expected(model)
            output = model(X, output_hidden_states=True, output_attentions=True)
            assert same(output["hidden_states"], states)
            assert same(output["attentions"], attentions)
    uninstall(one)
    assert same(other(X, output_hidden_states=True)["hidden_states"], expected(other)[0])


def test_a_context_that_outlives_its_call_records_nothing_more() -> None:
    contexts: list[contextvars.Context] = []

    class Keeps(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts.append(contextvars.copy_context())
            return super().forward(x)

    model = Model(1)
    model.layers[0] = Keeps()
    model(X, output_hidden_states=True)
    result = weakref.ref(contexts[0].run(model.layers[0], X * 2))
    assert result() is None


def test_a_declaration_that_changes_is_followed() -> None:
    model = Model()
    model(X, output_hidden_states=True)
    model._can_record_outputs = {"hidden_states": Attention}
    first = model.layers[0].attention(X)[0]
    states = model(X, output_hidden_states=True)["hidden_states"]
    assert torch.equal(states[1], first)


def test_an_exception_leaves_nothing_active() -> None:
    class Fails(Layer):
        broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                msg = "layer"
                raise KeyboardInterrupt(msg)
            return super().forward(x)

    model = Model()
    model.layers[1] = Fails()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="layer"):
            model(X, output_hidden_states=True)
    assert active_scopes.get() == ()
    Fails.broken = False
    assert list(model(X)) == ["last_hidden_state"]
    assert len(model(X, output_hidden_states=True)["hidden_states"]) == 4


def test_what_was_recorded_goes_with_the_output() -> None:
    model = Model()
    output = model(X, output_hidden_states=True, output_attentions=True)
    refs = [weakref.ref(each) for each in (*output["hidden_states"][1:], *output["attentions"])]
    gc.disable()
    try:
        del output
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


def test_what_a_call_recorded_that_raised_goes_with_it() -> None:
    refs: list[weakref.ref[torch.Tensor]] = []
    contexts: list[contextvars.Context] = []

    class Notes(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts.append(contextvars.copy_context())
            y = super().forward(x)
            refs.append(weakref.ref(y))
            return y

    class Fails(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    model = Model()
    model.layers[0] = model.layers[1] = Notes()
    model.layers[2] = Fails()
    with pytest.raises(ZeroDivisionError):
        model(X, output_hidden_states=True, output_attentions=True)
    gc.collect()
    # A context that somebody keeps keeps nothing of the call that was made in it.
    assert len(contexts) == len(refs) == 2
    assert [ref() for ref in refs] == [None, None]


def test_a_context_that_is_kept_keeps_nothing_that_was_recorded() -> None:
    contexts: list[contextvars.Context] = []

    class Keeps(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts.append(contextvars.copy_context())
            return super().forward(x)

    model = Model()
    model.layers = nn.ModuleList(Keeps() for _ in range(3))
    output = model(X, output_hidden_states=True, output_attentions=True)
    refs = [weakref.ref(each) for each in (*output["hidden_states"][1:], *output["attentions"])]
    del output
    gc.collect()
    assert len(contexts) == 3
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_recorded_model_goes_with_its_last_reference() -> None:
    model = Model()
    model(X, output_hidden_states=True)
    refs = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_importing_ferrohook_does_not_import_recording() -> None:
    assert "recording" not in vars(fh) or "ferrohook.recording" in sys.modules
    import subprocess  # noqa: PLC0415 (only here)

    code = "import sys, ferrohook; print([m for m in sys.modules if 'ferrohook.rec' in m])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b"[]"


def test_the_end_of_the_interpreter_is_silent() -> None:
    import subprocess  # noqa: PLC0415 (only here)

    code = textwrap.dedent("""
        import ferrohook.instrumentation, torch
        from ferrohook.recording import capture_outputs
        class Model(torch.nn.Module):
            _can_record_outputs = {"states": torch.nn.Linear}
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 2)
            @capture_outputs
            def forward(self, x, **kwargs):
                return {"output": self.layer(x)}
        model = Model()
        model(torch.ones(1, 2), output_states=True)
        # Goes when that module has lost its variables.
        ferrohook.instrumentation._MODEL = model
        """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stderr == b""


class Checkpointed(Model):
    reentrant = False

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return {"last_hidden_state": self.norm(x)}


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_is_recorded_once(*, reentrant: bool) -> None:
    model = Checkpointed()
    model.reentrant = reentrant
    states, attentions = expected(model)
    calls: list[int] = []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    x = X.clone().requires_grad_()
    output = model(x, output_hidden_states=True, output_attentions=True)
    output["last_hidden_state"].sum().backward()
    assert len(calls) == 2
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)


def test_a_backward_that_runs_layers_again_is_not_another_calls_helper() -> None:
    in_forward, done = threading.Event(), threading.Event()

    class Waits(Model):
        waiting = False

        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
                if self.waiting and threading.current_thread() is not threading.main_thread():
                    in_forward.set()
                    assert done.wait(LIMIT)
            return {"last_hidden_state": self.norm(x)}

    model = Waits()
    states, _ = expected(model)
    loss = model(X.clone().requires_grad_())["last_hidden_state"].sum()
    model.waiting = True
    with ThreadPoolExecutor(1) as pool:
        recorded = pool.submit(model, X.clone().requires_grad_(), output_hidden_states=True)
        assert in_forward.wait(LIMIT)
        # A new thread, as autograd's for GPUs are.
        backward = threading.Thread(target=loss.backward)
        backward.start()
        backward.join(LIMIT)
        done.set()
        assert same(recorded.result(LIMIT)["hidden_states"], states)


# --- Nested models --------------------------------------------------------------------------------


class Outer(nn.Module):
    _can_record_outputs: Any = {"hidden_states": nn.Linear}

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(2)
        self.last = nn.Linear(4, 4)

    @capture_outputs
    def forward(self, x: torch.Tensor, **flags: Any) -> dict[str, Any]:
        inner = self.inner(x, **flags)
        return {"x": self.last(inner["last_hidden_state"]), "inner": inner}


def test_a_sub_model_with_a_decorated_forward_records_for_itself() -> None:
    model = Outer()
    for _ in range(2):
        output = model(X, output_hidden_states=True)
        inner = output["inner"]
        assert len(inner["hidden_states"]) == 3
        assert same(inner["hidden_states"], expected(model.inner)[0])
        assert same(output["hidden_states"], [inner["last_hidden_state"], output["x"]])


def test_a_sub_model_that_was_not_asked_gives_its_parent_nothing() -> None:
    class Asks(Outer):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            inner = self.inner(x)
            return {"x": self.last(inner["last_hidden_state"]), "inner": inner}

    output = Asks()(X, output_hidden_states=True)
    assert "hidden_states" not in output["inner"]
    assert len(output["hidden_states"]) == 2


def test_a_sub_model_goes_by_its_own_declaration() -> None:
    class Undecorated(nn.Module):
        _can_record_outputs = {"hidden_states": Layer}

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Around(nn.Module):
        _can_record_outputs = {"hidden_states": nn.Linear}

        def __init__(self) -> None:
            super().__init__()
            self.below, self.last = Undecorated(), nn.Linear(4, 4)

        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"x": self.last(self.below(x))}

    model = Around()
    output = model(X, output_hidden_states=True)
    one = model.below.layers[0](X)
    two = model.below.layers[1](one)
    assert same(output["hidden_states"], [X, one, two, output["x"]])


def test_a_hook_that_runs_another_models_layer_records_it_for_nobody() -> None:
    model, other = Model(), Model()
    states, _ = expected(model)
    other(X, output_hidden_states=True)
    model.layers[1].register_forward_hook(lambda *_: (other.layers[0](X), None)[1])
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)
    # Nor for that model's call, if one is in progress.
    outer, inner = Model(), Model()
    inner(X, output_hidden_states=True)
    outer.layers[0].register_forward_hook(lambda *_: (inner(X), inner.layers[0](X), None)[2])
    assert same(outer(X, output_hidden_states=True)["hidden_states"], expected(outer)[0])


# --- Threads and contexts -------------------------------------------------------------------------

FLAGS = [
    {},
    {"output_hidden_states": True},
    {"output_attentions": True},
    {"output_hidden_states": True, "output_attentions": True},
]


def wrong_calls(model: Any, called: Any, rounds: int = 100) -> list[str]:
    """How many of 4 threads' calls with different flags are not what they are alone."""
    inputs = [X + number for number in range(4)]
    with torch.no_grad():
        right = [expected(model, x) for x in inputs]
    wrong: list[str] = []
    ready = threading.Barrier(4)

    def run(number: int) -> None:
        ready.wait(LIMIT)
        for place in range(rounds):
            flags = FLAGS[(place + number) % 4]
            with torch.no_grad():
                output = called(inputs[number], **flags)
            states, attentions = right[number]
            given = output.get("hidden_states", ()), output.get("attentions", ())
            wanted = (
                states if "output_hidden_states" in flags else (),
                attentions if "output_attentions" in flags else (),
            )
            if not all(same(a, b) for a, b in zip(given, wanted, strict=True)):
                wrong.append(f"thread {number}, call {place}: {list(output)}")

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run, number) for number in range(4)]:
            future.result(LIMIT)
    return wrong


@pytest.mark.usefixtures("switch_often")
def test_no_thread_sees_what_another_records() -> None:
    model = Model()
    assert wrong_calls(model, model) == []


@pytest.mark.usefixtures("switch_often")
def test_threads_that_record_first_at_once_install_once() -> None:
    def hooks(model: Model) -> list[int]:
        return [len(registry_of(layer).list()) for layer in model.layers]

    alone = Model()
    alone(X, output_hidden_states=True, output_attentions=True)
    for _ in range(20):
        model = Model()
        states, attentions = expected(model)

        def record(_: int, model: Model = model, right: Any = (states, attentions)) -> None:
            output = model(X, output_hidden_states=True, output_attentions=True)
            assert same(output["hidden_states"], right[0])
            assert same(output["attentions"], right[1])

        in_threads(4, record, LIMIT)
        assert hooks(model) == hooks(alone)


@pytest.mark.usefixtures("switch_often")
def test_threads_that_install_uninstall_and_record_at_once() -> None:
    model = Model()
    states, _ = expected(model)
    stop = threading.Event()

    def uninstalling() -> None:
        while not stop.is_set():
            uninstall(model)

    def recording() -> list[int]:
        return [len(model(X, output_hidden_states=True)["hidden_states"]) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        taking = pool.submit(uninstalling)
        counts = [pool.submit(recording) for _ in range(3)]
        try:
            assert [count.result(LIMIT) for count in counts] == [[4] * 50] * 3
        finally:
            stop.set()
        taking.result(LIMIT)
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)
    uninstall(model)
    assert type(model.layers[0]) is Layer


def run_into(box: list[torch.Tensor], layer: nn.Module, x: torch.Tensor) -> None:
    box.append(layer(x))


class Helped(Model):
    """Runs its second layer, or all of them, on helper threads."""

    pool: ThreadPoolExecutor | None = None
    helped: tuple[int, ...] = (1,)

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for place, layer in enumerate(self.layers):
            if place not in self.helped:
                x = layer(x)
            elif self.pool is None:
                box: list[torch.Tensor] = []
                thread = threading.Thread(target=run_into, args=(box, layer, x))
                thread.start()
                thread.join(LIMIT)
                x = box[0]
            else:
                x = self.pool.submit(layer, x).result(LIMIT)
        return {"last_hidden_state": self.norm(x)}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("helped", [(1,), (0, 1, 2)])
def test_a_layer_on_a_helper_thread_is_recorded(*, pooled: bool, helped: tuple[int, ...]) -> None:
    model = Helped()
    model.helped = helped
    states, attentions = expected(model)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(LIMIT)  # the thread is older than the call
        if pooled:
            model.pool = pool
        for _ in range(3):
            output = model(X, output_hidden_states=True, output_attentions=True)
            assert same(output["hidden_states"], states)
            assert same(output["attentions"], attentions)
            assert list(model(X)) == ["last_hidden_state"]


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("pooled", [False, True])
def test_helper_threads_of_several_calls_at_once(*, pooled: bool) -> None:
    model = Helped()
    # Of calls that began before the layers were watched, less is known.
    model(X, output_hidden_states=True)
    with ThreadPoolExecutor(2) as pool:
        if pooled:
            model.pool = pool
        assert wrong_calls(model, model, rounds=25) == []


def test_a_layer_called_beside_a_recorded_call_is_not_taken_for_a_part_of_it() -> None:
    model = Model()
    model(X, output_hidden_states=True)
    in_forward, done = threading.Event(), threading.Event()

    def wait(*_args: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            in_forward.set()
            assert done.wait(LIMIT)

    model.layers[0].register_forward_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        recorded = pool.submit(model, X, output_hidden_states=True)
        assert in_forward.wait(LIMIT)
        model.layers[1](X * 5)
        done.set()
        with pytest.raises(fh.UnattributedWarning, match="Layer ran on a thread"):
            recorded.result(LIMIT)  # a warning is an error here


def test_a_copied_context_takes_recording_along() -> None:
    class Copies(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            with ThreadPoolExecutor(1) as pool:
                for layer in self.layers:
                    context = contextvars.copy_context()
                    x = pool.submit(context.run, layer, x * 1).result(LIMIT)
            return {"last_hidden_state": self.norm(x)}

    model = Copies()
    assert same(model(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


def test_a_fresh_context_on_the_same_thread() -> None:
    class Fresh(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            for layer in self.layers:
                x = contextvars.Context().run(layer, x * 1)
            return {"last_hidden_state": self.norm(x)}

    model = Fresh()
    assert same(model(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


def test_no_task_sees_what_another_records() -> None:
    model = Model()
    right = [expected(model, X + number) for number in range(4)]
    calls = 0

    async def task(number: int) -> None:
        nonlocal calls
        states, attentions = right[number]
        for place in range(25):
            flags = FLAGS[(place + number) % 4]
            # In the task's own thread and in another, with the other tasks in between.
            for output in (
                model(X + number, **flags),
                await asyncio.to_thread(model, X + number, **flags),
            ):
                assert ("hidden_states" in output) == ("output_hidden_states" in flags)
                assert ("attentions" in output) == ("output_attentions" in flags)
                assert same(output.get("hidden_states", states), states)
                assert same(output.get("attentions", attentions), attentions)
                calls += 1
            await asyncio.sleep(0)

    async def tasks() -> None:
        await asyncio.gather(*map(task, range(4)))

    asyncio.run(tasks())
    assert calls == 200
    assert active_scopes.get() == ()


def test_a_task_that_outlives_the_call_it_was_made_in_records_nothing_more() -> None:
    later: list[asyncio.Task[weakref.ref[torch.Tensor]]] = []

    class Tasks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            async def again() -> weakref.ref[torch.Tensor]:
                await asyncio.sleep(0)
                return weakref.ref(self.attention(x)[0])

            later.append(asyncio.get_running_loop().create_task(again()))
            return super().forward(x)

    model = Model()
    model.layers = nn.ModuleList(Tasks() for _ in range(3))

    async def call() -> tuple[dict[str, Any], list[weakref.ref[torch.Tensor]]]:
        output = model(X, output_hidden_states=True, output_attentions=True)
        return output, await asyncio.gather(*later)

    output, refs = asyncio.run(call())
    assert [ref() for ref in refs] == [None] * 3
    assert len(output["hidden_states"]) == 4
    assert len(output["attentions"]) == 3


def test_scopes_and_captures_go_on_beside_recording() -> None:
    model = Model()
    states, _ = expected(model)
    with fh.capture(model, "layers.*", keep="all") as acts:
        output = model(X, output_hidden_states=True)
        assert same(output["hidden_states"], states)
    assert torch.equal(acts["layers.0"][0], states[1])
    with fh.scope() as scope:
        fh.register(model, "layers.0", lambda _module, _args, output: output * 0, scope=scope)
        steered = model(X, output_hidden_states=True)["hidden_states"]
    assert not steered[1].any()
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)


# --- torch.compile --------------------------------------------------------------------------------


compiles = [
    no_compile,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


def with_marks(test: Any) -> Any:
    for mark in compiles:
        test = mark(test)
    return test


@with_marks
def test_a_compiled_forward_records_in_its_graph() -> None:
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_()
    states, attentions = expected(model, x)
    output = compiled(x, output_hidden_states=True, output_attentions=True)
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)
    (gradient,) = torch.autograd.grad(output["hidden_states"][1].sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(states[1].sum(), x)[0])
    kept = [s is not None for s in compiled(x, output_hidden_states=[0, -1])["hidden_states"]]
    assert kept == [True, False, False, True]
    assert list(compiled(x)) == ["last_hidden_state"]
    # What changes is traced anew.
    model.layers.append(Layer())
    assert same(compiled(x, output_hidden_states=True)["hidden_states"], expected(model, x)[0])
    uninstall(model)
    assert same(compiled(x, output_hidden_states=True)["hidden_states"], expected(model, x)[0])


@with_marks
@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("broken", [False, True], ids=["fullgraph", "graph breaks"])
def test_no_thread_sees_what_another_records_compiled(*, broken: bool) -> None:
    model = Model()
    if broken:
        model.layers = nn.ModuleList(Breaks() for _ in range(3))
    compiled = torch.compile(model, fullgraph=not broken, backend="eager")
    with torch.no_grad():
        for flags in FLAGS:  # Dynamo compiles once for each thread that finds nothing compiled
            compiled(X, **flags)
    assert wrong_calls(model, compiled) == []


class Breaks(Layer):
    """A layer that breaks the graph of what is around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class BreaksBehind(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x


class Disabled(Model):
    """Runs its layers where Dynamo does not look."""

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = torch.compiler.disable(layer.__call__)(x)
        return {"last_hidden_state": self.norm(x)}


@with_marks
@pytest.mark.parametrize(
    ("kind", "cls", "inside"),
    [
        (Model, Layer, True),
        (Model, Breaks, False),
        (Model, Breaks, True),
        (Model, BreaksBehind, False),
        (Disabled, Layer, False),
        (Disabled, Breaks, True),
    ],
)
def test_layers_that_come_after_compiling_are_recorded(
    kind: type[Model], cls: type[Layer], *, inside: bool
) -> None:
    model = kind()
    model.layers = nn.ModuleList(cls() for _ in range(3))

    def around(x: torch.Tensor, **flags: Any) -> Any:
        return model(x, **flags)

    compiled = torch.compile(around if inside else model, backend="eager")

    def recorded_as_expected() -> bool:
        states, attentions = expected(model)
        output = compiled(X, output_hidden_states=True, output_attentions=True)
        return same(output["hidden_states"], states) and same(output["attentions"], attentions)

    with torch.no_grad():
        assert recorded_as_expected()
        model.layers.append(cls())
        assert recorded_as_expected()
        model.layers[1] = Layer()
        model.layers[0].attention = Attention()
        assert recorded_as_expected()
        uninstall(model)
        assert recorded_as_expected()


@with_marks
def test_an_exception_leaves_nothing_active_compiled() -> None:
    class Fails(Breaks):
        broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                torch._dynamo.graph_break()
                raise ZeroDivisionError
            return super().forward(x)

    model = Model()
    model.layers[1] = Fails()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compiled(X, output_hidden_states=True)
    assert active_scopes.get() == ()
    # A layer that is called next is not taken for a part of it.
    result = weakref.ref(model.layers[0](X))
    assert result() is None
    Fails.broken = False
    assert list(compiled(X)) == list(model(X)) == ["last_hidden_state"]
    for called in (compiled, model):
        assert same(called(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


@with_marks
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_breaks_the_graph_and_is_recorded_once(*, reentrant: bool) -> None:
    model = Checkpointed()
    model.reentrant = reentrant
    x = X.clone().requires_grad_()
    states, attentions = expected(model, x)
    flags = {"output_hidden_states": True, "output_attentions": True}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="checkpoint"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(x, **flags)
    torch._dynamo.reset()
    output = torch.compile(model, backend="aot_eager")(x, **flags)
    output["last_hidden_state"].sum().backward()
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)


@with_marks
def test_a_layer_in_a_branch_that_only_the_graph_takes_raises() -> None:
    class Branches(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"x": torch.cond(x.sum() > 0, self.layers[0], self.layers[1], (x,))}

    compiled = torch.compile(Branches(), backend="eager")
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError):
        compiled(X, output_hidden_states=True)
    assert list(compiled(X)) == ["x"]


@with_marks
def test_a_forward_that_is_one_graph_inside_of_one_that_records_raises() -> None:
    model = Outer()
    model.inner.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(X, output_hidden_states=True)
    assert active_scopes.get() == ()
    assert "hidden_states" in model.inner(X, output_hidden_states=True)


@with_marks
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_returns_what_it_recorded(*, strict: bool) -> None:
    class Exported(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor, **_flags: Any) -> dict[str, Any]:
            for layer in self.layers:
                x = layer(x)
            return {"last_hidden_state": self.norm(x)}

    model = Exported()
    flags = {"output_hidden_states": True}
    exported = torch.export.export(model, (X,), flags, strict=strict).module()
    assert same(exported(X, **flags)["hidden_states"], expected(model)[0])
    assert same(model(X, **flags)["hidden_states"], expected(model)[0])
    assert list(model(X)) == ["last_hidden_state"]


@with_marks
def test_states_that_are_selected_differ_between_calls_of_one_graph() -> None:
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for asked in (1, 2, [0, -1], [1, -1], [-2, -1], (1,), (3,)):
        given, wanted = (
            each(X, output_hidden_states=asked)["hidden_states"] for each in (compiled, model)
        )
        assert [state is None for state in given] == [state is None for state in wanted], asked


@with_marks
def test_a_layer_on_a_helper_thread_of_a_compiled_forward_is_not_dropped_in_silence() -> None:
    model = Helped()
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states = compiled(X, output_hidden_states=True)["hidden_states"]
    told = any(issubclass(each.category, fh.UnattributedWarning) for each in caught)
    assert len(states) == 4 or told


@with_marks
def test_a_layer_in_a_fresh_context_of_what_is_compiled_inside_is_recorded() -> None:
    class Pieces(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            for layer in self.layers:
                run = contextvars.Context().run
                x = torch.compile(lambda x, run=run, layer=layer: run(layer, x), backend="eager")(x)
            return {"last_hidden_state": self.norm(x)}

    model = Pieces()
    assert same(model(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


@with_marks
def test_one_graph_inside_of_a_forward_that_records_is_refused_by_name() -> None:
    model = Outer()
    model.inner.compile(backend="eager", fullgraph=True)
    # And not for a lock of ours, which no traced code is to see.
    told = "a forward that records runs eagerly, and this one is inside of it"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=told) as raised:
        model(X, output_hidden_states=True)
    assert "RLock" not in str(raised.value)


@with_marks
def test_compiled_layers_and_sub_models_in_an_eager_forward() -> None:
    model = Model()
    states, _ = expected(model)
    model.layers[1].compile(backend="eager")
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)
    outer = Outer()
    outer.inner.compile(backend="eager")
    output = outer(X, output_hidden_states=True)
    assert len(output["hidden_states"]) == 2
    assert same(output["inner"]["hidden_states"], expected(outer.inner)[0])
    nested = torch.compile(Outer(), fullgraph=True, backend="eager")
    output = nested(X, output_hidden_states=True)
    assert len(output["hidden_states"]) == 2
    assert len(output["inner"]["hidden_states"]) == 3


@with_marks
def test_how_tensors_are_kept_compiled() -> None:
    class Declares(Model):
        _can_record_outputs = {
            "hidden_states": OutputRecorder(Layer, detach=True, dtype=torch.float16)
        }

    compiled = torch.compile(Declares(), fullgraph=True, backend="eager")
    x = X.clone().requires_grad_()
    *states, _ = compiled(x, output_hidden_states=True)["hidden_states"]
    assert [state.dtype for state in states] == [torch.float16] * 3
    assert not any(state.requires_grad for state in states)


# --- Bad input ------------------------------------------------------------------------------------


def declaring(**declared: Any) -> Model:
    return type("Declares", (Model,), {"_can_record_outputs": declared})()


def test_a_recorder_that_names_neither_class_nor_suffix() -> None:
    with pytest.raises(fh.HookTypeError, match="names a target_class or a class_name"):
        OutputRecorder(None)
    with pytest.raises(fh.HookTypeError, match=r"target_class is a subclass of nn.Module, got the"):
        OutputRecorder(int)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="index is a whole number, got str"):
        OutputRecorder(Layer, index="1")  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match=r"dtype is a torch.dtype, got str"):
        OutputRecorder(Layer, dtype="half")  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="num_hidden_layers_key is a str, got int"):
        OutputRecorder(Layer, num_hidden_layers_key=3)  # type: ignore[arg-type]
    for name in ("capture_initial_hidden_state", "detach"):
        with pytest.raises(fh.HookTypeError, match=f"{name} is a bool, got str"):
            OutputRecorder(Layer, **{name: "no"})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        OutputRecorder(Layer, device="nowhere")


@pytest.mark.parametrize("given", [3, None, "", int, Layer(), {}])
def test_a_declaration_of_the_wrong_type_names_its_key(given: Any) -> None:
    model = declaring(hidden_states=given)
    with pytest.raises(fh.HookTypeError, match=r"_can_record_outputs\['hidden_states'\]"):
        model(X, output_hidden_states=True)
    model._can_record_outputs = [Layer]
    with pytest.raises(fh.HookTypeError, match="_can_record_outputs is a dict"):
        model(X)


@pytest.mark.parametrize("index", [2, -3])
def test_an_index_out_of_range_names_its_key(index: int) -> None:
    model = declaring(attentions=OutputRecorder(Attention, index=index))
    with pytest.raises(fh.SelectionError, match=rf"attentions.* no output_index {index}.*tuple"):
        model(X, output_attentions=True)
    assert list(model(X)) == ["last_hidden_state"]


def test_a_declaration_that_matches_no_module_names_its_key_and_the_closest() -> None:
    model = declaring(hidden_states="Lajer", attentions=nn.Conv2d)
    with pytest.raises(fh.SelectionError, match=r"'hidden_states' of Lajer.*in it are Layer"):
        model(X, output_hidden_states=True)
    with pytest.raises(fh.SelectionError, match="'attentions' of Conv2d"):
        model(X, output_attentions=True)
    assert list(model(X)) == ["last_hidden_state"]
    # Which a config asks for: as transformers has it, nothing.
    model.config = type("Config", (), {"output_attentions": True})()
    assert model(X)["attentions"] == ()


def test_an_unknown_flag_names_the_closest() -> None:
    model = Model()
    with pytest.raises(fh.HookTypeError, match=r"no 'output_hiden_states'.*output_hidden_states"):
        model(X, output_hiden_states=True)
    # Asks for nothing.
    assert list(model(X, output_hiden_states=False)) == ["last_hidden_state"]
    with pytest.raises(fh.HookTypeError, match="is a bool, an index or a list of them, got 'all'"):
        model(X, output_hidden_states="all")


class Encoder(Model):
    _can_record_outputs = {"attentions": Attention}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Model()

    def forward(self, x: torch.Tensor, **flags: Any) -> Any:
        return self.decoder(self.encoder(x, **flags)["last_hidden_state"], **flags)


def test_a_flag_that_a_model_around_it_passes_on_is_known() -> None:
    assert "hidden_states" in Both()(X, output_hidden_states=True)
    with pytest.raises(fh.HookTypeError, match="output_hiden_states"):
        Both()(X, output_hiden_states=True)


def test_a_flag_that_a_sub_model_brings_later_is_known() -> None:
    class Passes(Outer):
        _can_record_outputs = {}

    class Brings(Model):
        _can_record_outputs = {"attentions": Attention, "layers": Layer}

        @capture_outputs
        def forward(self, x: torch.Tensor, **_flags: Any) -> dict[str, Any]:
            return {"last_hidden_state": self.layers[0](x)}

    model = Passes()
    with pytest.raises(fh.HookTypeError, match="no 'output_layers'"):
        model(X, output_layers=True)
    model.inner = Brings()
    assert len(model(X, output_layers=True)["inner"]["layers"]) == 1


@with_marks
def test_flags_are_known_or_refused_compiled() -> None:
    both = Both()

    def call(x: torch.Tensor, **flags: Any) -> Any:
        return both(x, **flags)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert "hidden_states" in compiled(X, output_hidden_states=True)
    # Dynamo wraps what is raised while it traces.
    with pytest.raises(Exception, match=r"no 'output_hiden_states'.*output_attentions"):
        compiled(X, output_hiden_states=True)


@pytest.mark.parametrize("returned", [X, (X,), Output])
def test_an_output_that_nothing_can_be_put_into(returned: Any) -> None:
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

    with pytest.raises(fh.HookTypeError, match="Output has no field for what was recorded: layers"):
        NoField()(X, output_layers=True)


def test_recorders_of_one_key_that_differ_in_how_they_keep() -> None:
    model = declaring(hidden_states=[OutputRecorder(Layer, detach=True), OutputRecorder(Attention)])
    with pytest.raises(fh.HookError, match="'hidden_states' differ in detach"):
        model(X, output_hidden_states=True)


def test_a_layer_that_cannot_be_instrumented() -> None:
    class Scripted(Model):
        _can_record_outputs = {"hidden_states": torch.jit.ScriptModule}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Scripted()
        model.layers[0] = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(fh.HookError, match=r"hidden_states.*TorchScript"):
        model(X, output_hidden_states=True)
    assert list(model(X)) == ["last_hidden_state"]


def test_decorators_and_uninstall_refuse_what_is_no_forward_and_no_module() -> None:
    with pytest.raises(fh.HookTypeError, match="capture_outputs decorates a forward, got"):
        capture_outputs(3)  # type: ignore[call-overload]
    with pytest.raises(fh.HookTypeError, match="merge_with_config_defaults decorates a forward"):
        merge_with_config_defaults(3)  # type: ignore[type-var]
    with pytest.raises(fh.HookTypeError, match=r"uninstall takes an instance of nn.Module, got"):
        uninstall(3)  # type: ignore[arg-type]


# --- merge_with_config_defaults -------------------------------------------------------------------


class Merged(nn.Module):
    @merge_with_config_defaults
    @capture_outputs
    def forward(self, x: Any, use_cache: Any = None, **kwargs: Any) -> Any:
        return {"use_cache": use_cache, **kwargs, "config": vars(self.config).copy()}


class Config:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_defaults_come_from_the_config_and_arguments_go_first() -> None:
    model = Merged()
    model.config = Config(use_cache=True, vision_feature_layer=-2)
    assert model(X)["use_cache"] is True
    assert model(X)["vision_feature_layer"] == -2
    assert model(X, use_cache=None)["use_cache"] is True
    assert model(X, None)["use_cache"] is True
    assert model(X, use_cache=False)["use_cache"] is False
    assert model(X, False)["use_cache"] is False
    with pytest.raises(ValueError, match="one of default, full, got 'all'"):
        model(X, vision_feature_select_strategy="all")


def test_no_cache_while_checkpointing(caplog: pytest.LogCaptureFixture) -> None:
    model = Merged()
    model.config = Config(use_cache=True)
    model.gradient_checkpointing = True
    with caplog.at_level("WARNING", logger="ferrohook"):
        assert model(X)["use_cache"] is False
    assert model.eval()(X)["use_cache"] is True


def test_is_causal_stands_in_the_config_meanwhile() -> None:
    model = Merged()
    model.config = Config(is_causal=True)
    output = model(X, is_causal=False)
    assert output["is_causal"] is False
    assert output["config"]["is_causal"] is False
    assert model.config.is_causal is True
    model.config = Config()
    assert model(X, is_causal=False)["config"] == {"is_causal": False}
    assert vars(model.config) == {}
    assert "is_causal" not in model(X)
