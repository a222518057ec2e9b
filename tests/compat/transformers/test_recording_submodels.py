"""Recording of models inside other models."""
# ruff: noqa: RUF012 (declarations are dicts of the class, as transformers has them)

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ferrohook.compat.transformers import capture_outputs
from support.recording import Attention, Layer, Model, Outer, X, expected, same


def test_a_sub_model_with_a_decorated_forward_records_its_own_outputs() -> None:
    model = Outer()
    for _ in range(2):
        output = model(X, output_hidden_states=True)
        inner = output["inner"]
        assert len(inner["hidden_states"]) == 3
        assert same(inner["hidden_states"], expected(model.inner)[0])
        assert same(output["hidden_states"], [inner["last_hidden_state"], output["x"]])


def test_a_sub_model_without_flags_records_nothing_for_its_parent() -> None:
    class Asks(Outer):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            inner = self.inner(x)
            return {"x": self.last(inner["last_hidden_state"]), "inner": inner}

    output = Asks()(X, output_hidden_states=True)
    assert "hidden_states" not in output["inner"]
    assert len(output["hidden_states"]) == 2


def test_records_of_the_forward_itself_are_kept_if_the_outer_call_has_none() -> None:
    class Twice(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor, **flags: Any) -> Any:
            return super().forward(x * 2, **flags)

    class Head(nn.Module):
        _can_record_outputs = {"hidden_states": Layer, "attentions": Attention}

        def __init__(self, base: Model) -> None:
            super().__init__()
            self.base = base

        @capture_outputs
        def forward(self, x: torch.Tensor, **flags: Any) -> Any:
            return self.base(x, **flags) | {"attentions": None}

    twice = Twice()
    for model in (twice, Head(twice)):
        output = model(X, output_hidden_states=True, output_attentions=True)
        assert same(output["hidden_states"], expected(twice, X * 2)[0])
    assert output["attentions"] == ()


def test_a_sub_model_records_by_its_own_declaration() -> None:
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


def test_a_layer_of_another_model_run_by_a_hook_is_recorded_by_no_call() -> None:
    model, other = Model(), Model()
    states, _ = expected(model)
    other(X, output_hidden_states=True)
    model.layers[1].register_forward_hook(lambda *_: (other.layers[0](X), None)[1])
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)
    # The other model's own in-flight call does not record it either.
    outer, inner = Model(), Model()
    inner(X, output_hidden_states=True)
    outer.layers[0].register_forward_hook(lambda *_: (inner(X), inner.layers[0](X), None)[2])
    assert same(outer(X, output_hidden_states=True)["hidden_states"], expected(outer)[0])
