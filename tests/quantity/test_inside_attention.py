"""Proofs of q, k, v, z and pattern."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from ferrohook.attach.attention import DIMENSIONS, POINTS
from ferrohook.quantity.anatomy.subjects import Example, Subject
from ferrohook.quantity.proofs.attention import look_inside
from support.attention_models import KINDS, attention_model, attention_of, implemented, registered

modeling = pytest.importorskip("transformers.modeling_utils")
ORIGINAL = modeling.AttentionInterface.get_interface
MODELS = functools.cache(attention_model)
IDS = torch.arange(1, 15).reshape(2, 7)


def look(model: Any) -> Any:
    found = look_inside(Subject(model, Example((IDS,), {}, (2, 7))))
    assert modeling.AttentionInterface.get_interface is ORIGINAL
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_all_five_are_proved_readable_and_writable(kind: str) -> None:
    model = MODELS(kind)
    before = {name: {*vars(module)} for name, module in model.named_modules()}
    plain = model(IDS)[0]
    found = look(model)
    assert [*found] == [KINDS[kind][2].format(layer) for layer in (0, 1)]
    for heads in found.values():
        assert not heads.missing
        assert [each.point for each in heads.inside] == [*POINTS]
        for each in heads.inside:
            assert each.writable, each.point
            assert each.residual < 1e-5
            sizes = dict(zip(DIMENSIONS[each.name], each.shape, strict=True))
            assert sizes["batch"] == 2
            assert sizes.get("tokens", sizes.get("queries")) == 7
            assert sizes.get("heads", 4) == 4
    assert torch.equal(model(IDS)[0], plain)
    assert {name: {*vars(module)} for name, module in model.named_modules()} == before


def test_a_function_that_is_no_attention_of_q_and_k_proves_nothing() -> None:
    model = attention_model("llama")
    sdpa = modeling.AttentionInterface._global_mapping["sdpa"]

    def sharper(module: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa(module, q * 1.01, *args, **kwargs)

    with registered("sharper", sharper, "sdpa"), implemented(model, "sharper"):
        for heads in look(model).values():
            assert not heads.inside
            assert all("pattern @ v = z fails by" in reason for reason in heads.missing.values())


def test_a_module_that_attends_twice_has_no_points() -> None:
    model = attention_model("llama")
    attention = attention_of(model, "llama", 1)
    forward = attention.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    vars(attention)["forward"] = twice
    found = look(model)
    assert found["model.layers.0.self_attn"].inside
    assert not found["model.layers.1.self_attn"].inside
    assert "calls 2 attention functions" in found["model.layers.1.self_attn"].missing["q"]


def test_a_model_of_another_library_has_nothing_inside() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    assert look_inside(Subject(layer, Example((torch.ones(1, 3, 16),), {}, None))) == {}
