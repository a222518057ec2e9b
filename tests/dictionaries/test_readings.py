"""Gates that read a feature, and plans that depend on them."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch

import ferrohook as fh
from ferrohook.errors import HookTypeError
from support.dictionaries import D_SAE, dictionary_of, weights_of
from support.language_models import language_model

pytest.importorskip("transformers")

WIDTH = 8
LAYER = "model.layers.0"
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names of older versions


@functools.cache
def model() -> Any:
    return language_model("llama", WIDTH).requires_grad_(requires_grad=False)


@functools.cache
def dictionary(kind: str = "jumprelu", *, seed: int = 0, name: str = "mine") -> fh.Dictionary:
    maxima = torch.rand(D_SAE) + 0.5
    return dictionary_of(kind, seed=seed, width=WIDTH, name=name, max_activations=maxima)


def hidden(ids: torch.Tensor) -> torch.Tensor:
    return fh.run(model(), ids, capture=LAYER).acts[LAYER]


def active(own: fh.Dictionary) -> int:
    """A feature that is active at some tokens and not at others."""
    fires = (own.encode(hidden(IDS[:1]))[0] != 0).float().mean(0)
    return int(((fires > 0) & (fires < 1)).int().argmax())


@pytest.mark.parametrize("unit", ["raw", "max"])
@pytest.mark.parametrize("kind", ["jumprelu", "topk"])
def test_a_gate_reads_what_the_dictionary_encodes(kind: str, unit: str) -> None:
    own = dictionary(kind)
    feature = active(own)
    reading = fh.FeatureActivation(own, feature, unit=unit)
    plan = fh.Plan(fh.gate("g", LAYER, reading), fh.keep("@gate.g"))
    expected = own.encode(hidden(IDS[:1]))[0, :, feature]
    if unit == "max":
        assert own.max_activations is not None
        expected = expected / own.max_activations[feature]
    assert expected.any()
    found = fh.run(model(), IDS[:1], plan=plan).acts["@gate.g"]
    torch.testing.assert_close(found.reshape(-1), expected)


def test_an_intervention_depends_on_a_feature() -> None:
    own = dictionary()
    feature = active(own)
    fires = own.encode(hidden(IDS[:1]))[0, :, feature] > 0
    plan = fh.Plan(
        fh.gate("g", LAYER, fh.FeatureActivation(own, feature)),
        fh.on(LAYER, fh.Feature(own, 5, set=9.0), when=fh.above("g", 0.0)),
        fh.keep(LAYER),
    )
    found = fh.run(model(), IDS[:1], plan=plan).acts[LAYER][0]
    plain = hidden(IDS[:1])[0]
    changed = fh.Feature(own, 5, set=9.0).apply(plain)
    torch.testing.assert_close(found, torch.where(fires[:, None], changed, plain))
    assert fires.any()
    assert not fires.all()


def test_members_of_a_batch_read_features_of_their_own() -> None:
    readings = [
        fh.FeatureActivation(dictionary(), 3),
        fh.FeatureActivation(dictionary(), 4),
        fh.FeatureActivation(dictionary("topk"), 4),
    ]
    ids = torch.cat([IDS, IDS[:1] + 20])
    plans = [fh.Plan(fh.gate("g", LAYER, it), fh.keep("@gate.g")) for it in readings]
    requests = [plan.open(model()) for plan in plans]
    with fh.batch({it: slice(n, n + 1) for n, it in enumerate(requests)}, size=3):
        model()(ids)
    for n, (reading, request) in enumerate(zip(readings, requests, strict=True)):
        expected = reading.dictionary.encode(hidden(ids)[n])[:, reading.index]
        torch.testing.assert_close(request.acts["@gate.g"].reshape(-1), expected)


def test_as_data() -> None:
    own = dictionary()
    reading = fh.FeatureActivation(own, 3, unit="max")
    assert pickle.loads(pickle.dumps(reading)) == reading
    others = [
        fh.FeatureActivation(own, 4, unit="max"),
        fh.FeatureActivation(own, 3),
        fh.FeatureActivation(dictionary("topk"), 3, unit="max"),
    ]
    assert len({reading, *others}) == 4
    plan = fh.Plan(fh.gate("g", LAYER, reading))
    text = plan.to_json()
    assert fh.Plan.from_json(text, dictionaries={"mine": own}) == plan
    with pytest.raises(ValueError, match="no dictionary named 'mine'"):
        fh.Plan.from_json(text)


def test_a_transcoder_can_be_read() -> None:
    weights = weights_of("relu")
    own = fh.Dictionary(**weights, transcoder=True)
    x = torch.randn(5, 12)
    torch.testing.assert_close(fh.FeatureActivation(own, 3)(x), own.encode(x)[:, 3])


def test_what_is_refused() -> None:
    own = dictionary_of("relu")
    with pytest.raises(ValueError, match="index of FeatureActivation must be numbers from 0 to 39"):
        fh.FeatureActivation(own, 40)
    with pytest.raises(ValueError, match="unit='max' needs max_activations"):
        fh.FeatureActivation(own, 3, unit="max")
    with pytest.raises(ValueError, match="unit of FeatureActivation must be one of raw, max"):
        fh.FeatureActivation(own, 3, unit="min")
    for wrong in (("relu", 3), (own, [3]), (own, True)):
        with pytest.raises(HookTypeError, match="of FeatureActivation must be"):
            fh.FeatureActivation(*wrong)  # type: ignore[arg-type]
    with pytest.raises(HookTypeError, match="reads vectors of width 12, got 8"):
        fh.FeatureActivation(own, 3)(torch.ones(2, 8))
