"""`fh.Feature` against its formula written out: calls, positions, plans, batches, JSON."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

import ferrohook as fh
from ferrohook.dictionaries import features
from ferrohook.dictionaries.features import NUMBERS
from ferrohook.errors import HookTypeError
from support.dictionaries import (
    D_IN,
    D_SAE,
    KINDS,
    NORMALIZATIONS,
    dictionary_of,
    normalized_by_hand,
    values_by_hand,
    weights_of,
)
from support.modules import Echo

SIZES = {"rtol": 1e-4, "atol": 1e-4}


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, D_IN, generator=torch.Generator().manual_seed(seed)) * 3


def by_hand(hook: fh.Feature, kind: str, x: Tensor, *, normalization: str = "none") -> Tensor:
    """The formula of `Feature` for one token, without `b_dec` in the encoder."""
    weights = weights_of(kind)
    h, scale, _ = normalized_by_hand(normalization, x)
    values = values_by_hand(kind, weights, h)
    _, index, *numbers, only_active, unit = hook.values
    changed = x.clone()
    for place, feature in enumerate(index):
        value = values[feature]
        new_set, add, factor, low, high = (each[place] for each in numbers)
        size = float(hook.dictionary.max_activations[feature]) if unit == "max" else 1.0  # type: ignore[index]
        new = value * (1 if factor is None else factor) + (add or 0) * size
        new = new if low is None else max(new, torch.tensor(low * size))
        new = new if high is None else min(new, torch.tensor(high * size))
        new = new if new_set is None else torch.tensor(new_set * size)
        if only_active and value == 0:
            new = value
        row = weights["W_dec"][feature]
        if "rescaled" in kind:
            row = row / row.norm()
        changed = changed + (new - value) * row * scale
    return changed


EDITS: dict[str, dict[str, Any]] = {
    "set": {"set": 5.0},
    "add": {"add": -1.5},
    "scale": {"scale": 0.0},
    "range": {"low": 0.5, "high": 1.5},
    "all but set": {"scale": -2.0, "add": 1.0, "low": -3.0},
    "where active": {"set": 5.0, "only_active": True},
    "in maxima": {"set": 2.0, "unit": "max"},
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_formula(kind: str, normalization: str, edit: str) -> None:
    dictionary = dictionary_of(
        kind, normalize_activations=normalization, max_activations=torch.rand(D_SAE) + 0.5
    )
    x, module = inputs(5), Echo()
    # One that is active and one that is not, for some token.
    active = dictionary.encode(x) != 0
    index = [int(active[0].int().argmax()), int((~active[0]).int().argmax())]
    for chosen in (index[0], index):
        hook = fh.Feature(dictionary, chosen, **EDITS[edit])
        with fh.register(module, "", hook):
            changed = module(x)
        expected = torch.stack(
            [by_hand(hook, kind, token, normalization=normalization) for token in x]
        )
        torch.testing.assert_close(changed, expected, **SIZES)
        assert not torch.equal(changed, x)


def test_each_feature_has_numbers_of_its_own() -> None:
    dictionary, x, module = dictionary_of("relu"), inputs(4), Echo()
    hook = fh.Feature(
        dictionary, [7, 3, 0], set=[4.0, None, None], scale=[None, 2.0, 3.0], high=[None, 1.0, None]
    )
    with fh.register(module, "", hook):
        changed = module(x)
    expected = torch.stack([by_hand(hook, "relu", token) for token in x])
    torch.testing.assert_close(changed, expected, **SIZES)


def test_what_is_not_reconstructed_stays() -> None:
    """The difference of `x` and the result is in the span of the decoder row."""
    dictionary, x = dictionary_of("jumprelu"), inputs(6)
    changed = fh.Feature(dictionary, 3, set=5.0).apply(x)
    row = weights_of("jumprelu")["W_dec"][3]
    along = (changed - x) @ row / row.square().sum()
    torch.testing.assert_close(changed - x, along[:, None] * row)
    torch.testing.assert_close(along, 5 - dictionary.encode(x)[:, 3], **SIZES)


def test_setting_a_feature_outside_the_top_k_takes_the_place_of_none() -> None:
    dictionary, x = dictionary_of("topk"), inputs(1)
    before = dictionary.encode(x)[0]
    outside = int((before == 0).int().argmax())
    changed = fh.Feature(dictionary, outside, set=9.0).apply(x)
    torch.testing.assert_close(changed, x + 9 * weights_of("topk")["W_dec"][outside])


@pytest.mark.parametrize("kind", ["relu", "topk"])
def test_an_unchanged_value_leaves_all_bits(kind: str) -> None:
    dictionary = dictionary_of(kind, normalize_activations="layer_norm")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = inputs(5).to(dtype)
        hook = fh.Feature(dictionary, [1, 2], scale=1.0)
        assert torch.equal(hook.apply(x), x)


def test_half_precision_is_computed_in_float32() -> None:
    dictionary, x = dictionary_of("jumprelu"), inputs(50).to(torch.bfloat16)
    changed = fh.Feature(dictionary, [3, 5], set=2.0).apply(x)
    exact = fh.Feature(dictionary, [3, 5], set=2.0).apply(x.float())
    assert torch.equal(changed, exact.to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        again = fh.Feature(dictionary, [3, 5], set=2.0).apply(x.float())
    assert torch.equal(again, exact)


def test_gradients_pass() -> None:
    dictionary, x = dictionary_of("relu"), inputs(4).requires_grad_()
    module = Echo()
    with fh.register(module, "", fh.Feature(dictionary, [3, 5], scale=0.5, add=1.0)):
        module(x).square().sum().backward()
    other = x.detach().clone().requires_grad_()
    weights = weights_of("relu")
    values = (other @ weights["W_enc"] + weights["b_enc"]).relu()[:, [3, 5]]
    (other + (1 - 0.5 * values) @ weights["W_dec"][[3, 5]]).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, **SIZES)


def test_propagation_of_shapes_leaves_nothing_fake() -> None:
    x = torch.randn(2, D_IN)
    for kind in ("relu", "topk"):
        feature, same = (fh.Feature(dictionary_of(kind), 1, set=2.0) for _ in range(2))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert isinstance(feature.apply(mode.from_tensor(x)), FakeTensor)
        assert torch.equal(feature.apply(x), same.apply(x))


def test_heads_count_together() -> None:
    dictionary = dictionary_of("relu")
    x = inputs(2, 3)
    hook = fh.Feature(dictionary, 3, set=5.0)
    heads = x.unflatten(-1, (3, 4))
    assert torch.equal(hook.apply(heads), hook.apply(x).unflatten(-1, (3, 4)))


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D_IN, D_IN), nn.Linear(D_IN, D_IN))


@pytest.mark.parametrize("kind", ["relu", "gated", "topk", "topk rescaled", "groupmax"])
def test_members_of_a_batch_get_what_they_get_alone(kind: str) -> None:
    model = model_of()
    one = dictionary_of(kind, normalize_activations="layer_norm")
    other = dictionary_of(kind, seed=1)
    hooks = [
        fh.Feature(one, [3, 9], set=[5.0, None], scale=[None, 2.0]),
        fh.Feature(one, 4, set=5.0),
        fh.Feature(other, 4, add=1.0),
        fh.Feature(one, list(range(20)), scale=0.0),
        fh.Add(torch.ones(D_IN)),
    ]
    x = inputs(12, 3)
    rows = [slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 10), slice(10, 11)]
    plain = model(x)
    plans = [fh.Plan(fh.on("0", hook), fh.keep("0")) for hook in hooks]
    requests = [plan.open(model) for plan in plans]
    with fh.batch(dict(zip(requests, rows, strict=True)), size=len(x)):
        together = model(x)
    for plan, request, own in zip(plans, requests, rows, strict=True):
        with plan.open(model) as alone:
            expected = model(x[own])
        torch.testing.assert_close(together[own], expected, **SIZES)
        torch.testing.assert_close(request.acts["0"], alone.acts["0"], **SIZES)
        assert not torch.allclose(together[own], plain[own])
    assert torch.equal(together[11:], plain[11:])


@pytest.mark.parametrize("kind", ["relu", "topk"])
@pytest.mark.parametrize("edit", [*NUMBERS, "only_active"])
def test_members_with_one_dictionary_are_read_once(
    kind: str, edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dictionary, sizes = model_of(), dictionary_of(kind), []
    plain = features.encode

    def counted(formula: Any, weights: Any, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return plain(formula, weights, x)

    monkeypatch.setattr(features, "encode", counted)
    numbers: dict[str, Any] = {edit: 0.5} if edit in NUMBERS else {"add": 0.5, edit: True}
    plans = [fh.Plan(fh.on("0", fh.Feature(dictionary, n, **numbers))) for n in range(3)]
    requests = [plan.open(model) for plan in plans]
    x = inputs(6, 2)
    with fh.batch({it: slice(2 * n, 2 * n + 2) for n, it in enumerate(requests)}, size=6):
        together = model(x)
    assert sizes == [6]
    for n, plan in enumerate(plans):
        with plan.open(model):
            torch.testing.assert_close(together[2 * n : 2 * n + 2], model(x[2 * n : 2 * n + 2]))


def test_an_infinite_feature_of_another_member_changes_nothing() -> None:
    weights = weights_of("relu")
    weights["W_enc"][:, 7] = torch.finfo(torch.float32).max
    dictionary = fh.Dictionary(**weights)
    model, x = nn.Sequential(Echo()), inputs(2).abs() + 1
    assert dictionary.encode(x)[:, 7].isinf().all()
    plans = [fh.Plan(fh.on("0", fh.Feature(dictionary, n, add=1.0))) for n in (3, 7)]
    with fh.batch({plan.open(model): slice(n, n + 1) for n, plan in enumerate(plans)}, size=2):
        together = model(x)
    torch.testing.assert_close(together[:1], fh.Feature(dictionary, 3, add=1.0).apply(x[:1]))
    assert together[1:].isnan().all()


def test_a_member_whose_tensor_does_not_fit_fails_alone() -> None:
    model = model_of()
    bad = fh.Plan(fh.on("0", fh.Feature(dictionary_of("topk", width=9), 3, set=5.0)))
    with pytest.raises(HookTypeError, match="has a width of 9, but the output of '0'"):
        bad.open(model)
    echo = nn.Sequential(Echo())
    good = fh.Plan(fh.on("0", fh.Feature(dictionary_of("topk"), 3, set=5.0)))
    requests = [bad.open(echo), good.open(echo)]
    x = inputs(4)
    with fh.batch({requests[0]: slice(0, 2), requests[1]: slice(2, 4)}, size=4):
        changed = echo(x)
    with good.open(echo):
        torch.testing.assert_close(changed[2:], echo(x[2:]))
    assert requests[1].error is None
    assert "reads tensors of floating point, of shape (..., 9)" in str(requests[0].error)


def test_scopes_and_pickles() -> None:
    model, dictionary = model_of(), dictionary_of("topk", name="mine")
    hook = fh.Feature(dictionary, [3, 5], set=2.0, only_active=True)
    for same in (pickle.loads(pickle.dumps(hook)), copy.deepcopy(hook)):
        assert same == hook
        assert hash(same) == hash(hook)
    others = [
        fh.Feature(dictionary, [5, 3], set=2.0, only_active=True),
        fh.Feature(dictionary, [3, 5], set=2.0),
        fh.Feature(dictionary, [3, 5], add=2.0, only_active=True),
        fh.Feature(dictionary_of("topk", seed=1), [3, 5], set=2.0, only_active=True),
        fh.Feature(dictionary, [3, 5], set=2.0, only_active=True, output_index=0),
    ]
    assert len({hook, *others}) == 1 + len(others)
    assert "index=[3, 5], set=2.0, only_active=True" in repr(hook)
    with pytest.raises(AttributeError, match="immutable"):
        hook.values = ()
    x = inputs(3)
    with fh.scope(), fh.register(model, "0", hook):
        changed = model[0](x)
    assert torch.equal(changed, hook.apply(model[0](x)))
    assert not torch.equal(changed, model[0](x))


def test_members_of_batches_are_freed() -> None:
    dictionary, model, last = dictionary_of("relu"), nn.Sequential(Echo()), None
    seen = []
    for number in range(10):
        new = fh.Feature(dictionary, number, set=1.0)
        seen.append(weakref.ref(new._edit))
        requests = [
            fh.Plan(fh.on("0", each)).open(model) for each in (new, last) if each is not None
        ]
        with fh.batch({it: slice(n, n + 1) for n, it in enumerate(requests)}, size=len(requests)):
            model(inputs(len(requests)))
        last = new
    del new, requests
    gc.collect()
    assert [reference() is not None for reference in seen] == [False] * 9 + [True]
    assert last is not None


def test_a_dictionary_is_freed_with_its_features() -> None:
    dictionary = dictionary_of("topk")
    hook = fh.Feature(dictionary, 3, set=5.0)
    hook.apply(inputs(2))
    gone = weakref.ref(dictionary)
    del dictionary, hook
    gc.collect()
    assert gone() is None


def test_part_of_an_output() -> None:
    module, x = Echo(), inputs(3)
    hook = fh.Feature(dictionary_of("relu"), 3, set=5.0, output_index=1)
    with fh.register(module, "", hook):
        first, second = module((x, x))
    assert torch.equal(first, x)
    assert torch.equal(second, hook.apply((x, x))[1])
    whole = fh.Feature(dictionary_of("relu"), 3, set=5.0)
    assert torch.equal(second, whole.apply(x))


def test_json() -> None:
    dictionary = dictionary_of("topk", name="mine", max_activations=torch.ones(D_SAE))
    plan = fh.Plan(
        fh.on("0", fh.Feature(dictionary, 3, set=5.0), at="generated"),
        fh.on(
            "1",
            fh.Feature(dictionary, [3, 4], scale=[2.0, None], add=1, unit="max", output_index=0),
        ),
    )
    text = plan.to_json()
    assert len(text) < 600
    assert fh.Plan.from_json(text, dictionaries={"mine": dictionary}) == plan
    for dictionaries, message in (
        ({}, "no dictionary named 'mine' was passed as dictionaries="),
        ({"mine": dictionary_of("topk", name="other")}, "got the name 'other'"),
        ({"mine": dictionary_of("relu", name="mine")}, "needs max_activations"),
    ):
        with pytest.raises(ValueError, match=message):
            fh.Plan.from_json(text, dictionaries=dictionaries)
    with pytest.raises(ValueError, match="this one has none: pass name= to Dictionary"):
        fh.Plan(fh.on("0", fh.Feature(dictionary_of("topk"), 3, set=5.0))).to_json()
    two = [
        fh.on("0", fh.Feature(dictionary_of(it, name="one"), 3, set=5.0)) for it in ("relu", "topk")
    ]
    with pytest.raises(
        ValueError, match=r"entries\[1\]: the plan has two dictionaries named 'one'"
    ):
        fh.Plan(*two).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"index": 40},
        {"index": "3"},
        {"index": [3] * 2000},
        {"index": []},
        {"index": None},
        {"set": [1.0] * 2000},
        {"set": {"dtype": "float32"}},
        {"set": 1e999},
        {"set": True},
        {"only_active": 1},
        {"unit": "min"},
        {"dictionary": 3},
        {"dictionary": ["mine"]},
        {"more": 1},
        {"output_index": 1.5},
    ],
)
def test_hostile_json(change: dict[str, Any]) -> None:
    hook = {"type": "Feature", "dictionary": "mine", "index": 3, "set": 1.0}
    plan = {"version": 1, "entries": [{"type": "on", "what": "0", "hook": hook | change}]}
    with pytest.raises(ValueError, match=r"entries\[0\]"):
        fh.Plan.from_json(plan, dictionaries={"mine": dictionary_of("topk", name="mine")})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "feature 3 needs set, or some of add, scale, low and high, got none"),
        ({"set": 1.0, "scale": 2.0}, "got set, scale"),
        ({"set": float("nan")}, "set of Feature must be finite, got nan"),
        ({"low": float("-inf")}, "low of Feature must be finite"),
        ({"low": 2.0, "high": 1.0}, "low must not exceed high"),
        ({"index": -1, "set": 1.0}, "numbers from 0 to 39, each once, got -1"),
        ({"index": 40, "set": 1.0}, "numbers from 0 to 39"),
        ({"index": [3, 3], "set": 1.0}, "each once"),
        ({"index": [], "set": 1.0}, "each once"),
        ({"index": [3, 4], "set": [1.0]}, "set of Feature must have a number for each of 2"),
        ({"index": [3, 4], "set": [1.0, None]}, "feature 4 needs set"),
        ({"set": 1.0, "unit": "max"}, "unit='max' needs max_activations"),
        ({"set": 1.0, "unit": "min"}, "unit of Feature must be one of raw, max"),
    ],
)
def test_wrong_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fh.Feature(dictionary_of("relu"), **({"index": 3} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dictionary": torch.ones(3)}, "dictionary of Feature must be a Dictionary"),
        ({"index": "3"}, "index of Feature must be an int or a list of ints"),
        ({"index": [True]}, "index of Feature must be an int"),
        ({"set": "5"}, "set of Feature must be a number"),
        ({"only_active": 1}, "only_active of Feature must be a bool"),
        ({"output_index": 1.5}, "output_index of Feature"),
    ],
)
def test_wrong_types_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"dictionary": dictionary_of("relu"), "index": 3, "set": 1.0} | arguments
    with pytest.raises(HookTypeError, match=message):
        fh.Feature(**given)


def test_a_maximum_of_zero_is_no_unit() -> None:
    maxima = torch.ones(D_SAE)
    maxima[4] = 0
    dictionary = dictionary_of("relu", max_activations=maxima)
    fh.Feature(dictionary, 3, set=1.0, unit="max")
    with pytest.raises(ValueError, match="a largest value above 0, and feature 4 has none"):
        fh.Feature(dictionary, [3, 4], set=1.0, unit="max")


def test_integers_and_complex_numbers_are_refused() -> None:
    hook = fh.Feature(dictionary_of("relu"), 3, set=1.0)
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(HookTypeError, match="Feature only works on"):
            hook.apply(torch.ones(2, D_IN, dtype=dtype))


def test_a_dictionary_without_a_place_does_not_mean_all_modules() -> None:
    dictionary = dictionary_of("relu")
    assert dictionary.reads is None
    with pytest.raises(HookTypeError, match="name its module or quantity, not None"):
        fh.on(dictionary.reads, fh.Feature(dictionary, 3, set=1.0))
    with pytest.raises(HookTypeError, match="name its module or quantity, not None"):
        fh.keep(dictionary.reads, features=dictionary, top=2)
