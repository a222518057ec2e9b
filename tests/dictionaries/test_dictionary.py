"""`fh.Dictionary` against its formulas, written out for each token and feature."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import ferrohook as fh
from ferrohook.dictionaries.formulas import Rounding
from ferrohook.errors import HookTypeError
from support.compiling import compiled
from support.dictionaries import (
    D_IN,
    D_SAE,
    KINDS,
    NORMALIZATIONS,
    K,
    dictionary_of,
    normalized_by_hand,
    values_by_hand,
    weights_of,
)


@pytest.mark.parametrize("subtracts", [False, True])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_autoencoder(kind: str, normalization: str, subtracts: bool) -> None:
    weights = weights_of(kind)
    dictionary = dictionary_of(
        kind, normalize_activations=normalization, apply_b_dec_to_input=subtracts
    )
    x = torch.randn(6, D_IN, generator=torch.Generator().manual_seed(1)) * 3
    values = dictionary.encode(x)
    assert values.dtype == torch.float32
    for token, found in zip(x, values, strict=True):
        h, scale, shift = normalized_by_hand(normalization, token)
        h = h - weights["b_dec"] if subtracts else h
        expected = values_by_hand(kind, weights, h)
        assert 0 < (expected != 0).sum() < D_SAE
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        rows = weights["W_dec"]
        if "rescaled" in kind:
            rows = rows / rows.square().sum(-1, keepdim=True).sqrt()
        decoded = sum(value * row for value, row in zip(expected, rows, strict=True))
        decoded = (decoded + weights["b_dec"]) * scale + shift
        torch.testing.assert_close(dictionary.decode(found, token), decoded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", ["relu", "jumprelu", "topk"])
def test_a_transcoder_does_not_undo_the_norm_and_skips_the_raw_input(
    kind: str, skip: bool, normalization: str
) -> None:
    weights = weights_of(kind, d_out=7)
    more: dict[str, Any] = {"W_skip": torch.randn(7, D_IN)} if skip else {}
    dictionary = fh.Dictionary(
        **weights,
        **more,
        **KINDS[kind],
        activation=kind,
        transcoder=True,
        normalize_activations=normalization,
    )
    x = torch.randn(2, 3, D_IN)
    values = dictionary.encode(x)
    h, _, _ = normalized_by_hand(normalization, x[1, 2])
    torch.testing.assert_close(values[1, 2], values_by_hand(kind, weights, h))
    expected = values @ weights["W_dec"] + weights["b_dec"]
    if skip:
        expected += x @ more["W_skip"].T
    torch.testing.assert_close(dictionary.decode(values, x), expected)


def test_autocast_changes_no_bit() -> None:
    weights, more = weights_of("relu", d_out=7), {"W_skip": torch.randn(7, D_IN)}
    rounding = Rounding(linear_encoder=True)
    dictionary = fh.Dictionary(**weights, **more, transcoder=True, rounding=rounding)
    x = torch.randn(2, D_IN)
    values, skipped = dictionary.encode(x), dictionary.skip(x)
    decoded = dictionary.decode(values, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dictionary.encode(x), values)
        assert torch.equal(dictionary.decode(values, x), decoded)
        torch.testing.assert_close(dictionary.skip(x), skipped, rtol=0, atol=0)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dictionary_that_never_ran_compiles(kind: str, dtype: torch.dtype) -> None:
    dictionary, x = dictionary_of(kind), torch.randn(6, D_IN, dtype=dtype)
    run = torch.compile(
        lambda x: dictionary.decode(dictionary.encode(x), x), backend="eager", fullgraph=True
    )
    found = run(x)
    assert torch.equal(found, dictionary.decode(dictionary.encode(x), x))


def test_a_threshold_is_strict() -> None:
    weights = weights_of("jumprelu")
    x = torch.randn(D_IN)
    weights["threshold"] = (x @ weights["W_enc"] + weights["b_enc"]).abs()
    assert not fh.Dictionary(**weights, activation="jumprelu").encode(x).any()
    weights["threshold"] = weights["threshold"].nextafter(torch.tensor(0.0))
    assert fh.Dictionary(**weights, activation="jumprelu").encode(x).any()


def test_negative_thresholds_make_jump_and_jumprelu_differ() -> None:
    weights = weights_of("relu") | {"threshold": torch.full((D_SAE,), -1.0)}
    x = torch.randn(50, D_IN)
    jump, relu = (fh.Dictionary(**weights, activation=it).encode(x) for it in ("jump", "jumprelu"))
    assert ((jump > -1) & (jump < 0)).any()
    assert torch.equal(jump.relu(), relu)


def test_heads_lie_side_by_side() -> None:
    dictionary = dictionary_of("relu", normalize_activations="layer_norm")
    x = torch.randn(2, 3, 4, D_IN // 4)
    values = dictionary.encode(x)
    assert torch.equal(values, dictionary.encode(x.flatten(-2)))
    decoded = dictionary.decode(values, x)
    assert decoded.shape == x.shape
    assert torch.equal(decoded.flatten(-2), dictionary.decode(values, x.flatten(-2)))


def test_the_input_is_cast_to_the_weights() -> None:
    weights = {name: it.to(torch.bfloat16) for name, it in weights_of("relu").items()}
    values = fh.Dictionary(**weights).encode(torch.randn(3, D_IN, dtype=torch.float64))
    assert values.dtype == torch.bfloat16


@pytest.mark.parametrize("inference", [False, True])
def test_weights_get_no_gradients_but_inputs_do(inference: bool) -> None:
    with torch.inference_mode(inference):
        weights = weights_of("topk rescaled")
        if not inference:
            weights = {name: it.requires_grad_() for name, it in weights.items()}
        dictionary = fh.Dictionary(**weights, activation="topk", **KINDS["topk rescaled"])
        feature = fh.Feature(dictionary, 1, scale=2.0)
    x = torch.randn(2, D_IN, requires_grad=True)
    dictionary.decode(dictionary.encode(x) + feature.apply(x).sum()).sum().backward()
    feature.apply(x.double()).sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert weights["W_enc"].grad is None


def test_equal_by_content() -> None:
    one = dictionary_of("topk", reads="@resid_post.1", max_activations=torch.ones(D_SAE))
    others = [
        dictionary_of("topk"),
        dictionary_of("topk", reads="@resid_post.1"),
        dictionary_of("topk", seed=1, reads="@resid_post.1", max_activations=torch.ones(D_SAE)),
        dictionary_of("topk", reads="@resid_post.1", max_activations=torch.ones(D_SAE) * 2),
        dictionary_of("abstopk", reads="@resid_post.1", max_activations=torch.ones(D_SAE)),
    ]
    assert len({one, *others}) == 1 + len(others)
    x = torch.randn(3, D_IN)
    for same in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert same == one
        assert hash(same) == hash(one)
        assert torch.equal(same.encode(x), one.encode(x))
    assert repr(one) == f"Dictionary(topk, {D_IN} -> {D_SAE}, reads='@resid_post.1')"


NAN = torch.full((D_SAE,), torch.nan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "softmax"}, "activation must be one of relu, jumprelu"),
        ({"activation": "topk"}, "topk needs k"),
        ({"k": 3}, "relu has no k"),
        ({"activation": "topk", "k": 0}, "k must be at least 1"),
        ({"activation": "topk", "k": D_SAE + 1}, "k must be at most the number of features, 40"),
        ({"activation": "groupmax", "k": 7}, "and divide it, got 7"),
        ({"activation": "jumprelu"}, "jumprelu needs threshold"),
        ({"activation": "gated"}, "gated has no b_enc"),
        ({"threshold": torch.ones(D_SAE)}, "relu has no threshold"),
        ({"activation": "jumprelu", "threshold": NAN}, "threshold must not have NaN"),
        ({"b_enc": NAN}, "b_enc must not have NaN or infinities"),
        ({"b_enc": torch.ones(D_SAE, dtype=torch.float64)}, "one dtype of .*float64 for b_enc"),
        ({"W_enc": torch.ones(D_IN, D_SAE, dtype=torch.int64)}, "one dtype"),
        ({"W_enc": torch.ones(D_IN)}, "W_enc must be a matrix"),
        ({"W_dec": torch.ones(D_SAE, 0)}, "W_dec must be a matrix"),
        ({"W_dec": torch.ones(D_SAE, 7)}, r"W_dec must have the shape \(40, 12\)"),
        ({"b_dec": torch.ones(7)}, r"b_dec must have the shape \(12,\), got \(7,\)"),
        ({"rescale_acts_by_decoder_norm": True}, "is for topk and abstopk, not for relu"),
        ({"transcoder": True, "apply_b_dec_to_input": True}, "not for transcoders"),
        ({"W_skip": torch.ones(D_IN, D_IN)}, "W_skip is for transcoders"),
        ({"writes": "@mlp_out.1"}, "writes is for transcoders"),
        ({"normalize_activations": "rms"}, "normalize_activations must be one of none"),
        ({"max_activations": torch.ones(3)}, r"of shape \(40,\), got"),
        ({"max_activations": NAN}, "max_activations must not have NaN"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fh.Dictionary(**(weights_of("relu") | changes))


def test_rescaling_by_a_row_of_zeros_is_refused() -> None:
    weights = weights_of("topk")
    weights["W_dec"][3] = 0
    with pytest.raises(ValueError, match="a row of zeros"):
        fh.Dictionary(**weights, activation="topk", k=K, rescale_acts_by_decoder_norm=True)


@pytest.mark.parametrize(
    "name", ["W_enc", "reads", "transcoder", "k", "name", "activation", "rounding"]
)
def test_wrong_types_are_refused(name: str) -> None:
    arguments: dict[str, Any] = {"activation": "topk", "k": 3, **weights_of("topk")}
    with pytest.raises(HookTypeError, match=name):
        fh.Dictionary(**(arguments | {name: ["x"]}))


def test_tensors_of_other_shapes_are_refused() -> None:
    dictionary = dictionary_of("relu", normalize_activations="layer_norm")
    for x in (torch.ones(3, 5), torch.ones(D_IN, dtype=torch.int64), torch.tensor(1.0), [1.0]):
        with pytest.raises(HookTypeError, match="reads"):
            dictionary.encode(x)  # type: ignore[arg-type]
    for values in (torch.ones(3, 5), torch.ones(D_SAE, dtype=torch.int64)):
        with pytest.raises(HookTypeError, match=r"\(\.\.\., 40\)"):
            dictionary.decode(values)
    with pytest.raises(HookTypeError, match="decode needs x"):
        dictionary.decode(torch.ones(D_SAE))


def test_weights_that_are_trained_on_are_copied() -> None:
    weights = torch.randn(4, 8, requires_grad=True)
    decoder = torch.randn(8, 4, requires_grad=True)
    made = fh.Dictionary(weights, decoder, b_enc=torch.zeros(8), b_dec=torch.zeros(4))
    x = torch.randn(3, 4)
    before = made.encode(x)
    with torch.no_grad():
        weights.add_(1)
        decoder.add_(1)
    assert torch.equal(made.encode(x), before)
    assert not made.encode(x).requires_grad
