"""`fh.keep(place, features=...)`: values of features in place of the tensor."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from ferrohook.errors import HookTypeError
from support.dictionaries import D_SAE, KINDS, dictionary_of
from support.language_models import language_model
from support.modules import Echo

pytest.importorskip("transformers")

WIDTH = 8
LAYER = "@resid_post.0"
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names of older versions


@functools.cache
def model() -> Any:
    return language_model("llama", WIDTH).requires_grad_(requires_grad=False)


@functools.cache
def dictionary(kind: str = "jumprelu") -> fh.Dictionary:
    return dictionary_of(kind, width=WIDTH, name="mine", normalize_activations="layer_norm")


def hidden(ids: Tensor = IDS) -> Tensor:
    return fh.run(model(), ids, capture=LAYER).acts[LAYER]


def run(plan: fh.Plan, ids: Tensor = IDS) -> Tensor:
    return fh.run(model(), ids, plan=plan).acts[LAYER]


@pytest.mark.parametrize("kind", KINDS)
def test_features_by_number(kind: str) -> None:
    own = dictionary(kind)
    index = [3, 17, 0]
    found = run(fh.Plan(fh.keep(LAYER, features=own, index=index)))
    torch.testing.assert_close(found, own.encode(hidden())[..., index])
    assert found.shape == (2, 5, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_values_and_their_features(kind: str) -> None:
    own = dictionary(kind)
    found = run(fh.Plan(fh.keep(LAYER, features=own, top=4)))
    assert found.shape == (2, 5, 4, 2)
    values, numbers = found.unbind(-1)
    every = own.encode(hidden())
    torch.testing.assert_close(values, every.gather(-1, numbers.long()))
    size = torch.abs if "abs" in kind else torch.clone
    ranked = size(every).sort(dim=-1, descending=True).values[..., :4]
    torch.testing.assert_close(size(values), ranked)
    assert all(len({*row.tolist()}) == 4 for row in numbers.flatten(0, 1))


def test_the_changes_before_it_are_seen() -> None:
    own, feature = dictionary(), fh.Feature(dictionary(), 3, set=40.0)
    keep = fh.keep(LAYER, features=own, index=3)
    changed = run(fh.Plan(fh.on(LAYER, feature), keep))
    torch.testing.assert_close(changed, own.encode(feature.apply(hidden()))[..., [3]])
    before = run(fh.Plan(keep, fh.on(LAYER, feature)))
    torch.testing.assert_close(before, own.encode(hidden())[..., [3]])
    assert not torch.allclose(changed, before)


def test_at_positions_and_in_a_batch() -> None:
    own = dictionary("topk")
    plans = [
        fh.Plan(fh.keep(LAYER, features=own, top=2, at=slice(1, 3))),
        fh.Plan(fh.keep(LAYER, features=own, index=[5])),
    ]
    requests = [plan.open(model()) for plan in plans]
    with fh.batch({requests[0]: slice(0, 1), requests[1]: slice(1, 2)}, size=2):
        model()(IDS)
    every = own.encode(hidden())
    values, numbers = requests[0].acts[LAYER].reshape(2, 2, 2).unbind(-1)
    torch.testing.assert_close(values, every[0, 1:3].gather(-1, numbers.long()))
    torch.testing.assert_close(values, every[0, 1:3].topk(2).values)
    torch.testing.assert_close(requests[1].acts[LAYER], every[1:, :, [5]])


def test_steps_of_generation_are_joined() -> None:
    own = dictionary()
    plan = fh.Plan(fh.keep(LAYER, features=own, top=3, at=slice(0, None)))
    with plan.open(model()) as request:
        tokens = model().generate(IDS[:1], max_new_tokens=4, do_sample=False)
    found = request.acts[LAYER]
    assert found.shape == (8, 3, 2)
    expected = own.encode(hidden(tokens[:, :-1]))[0].topk(3).values
    torch.testing.assert_close(found[..., 0], expected, rtol=1e-4, atol=1e-4)


def test_heads_count_together() -> None:
    heads = fh.run(model(), IDS, capture="@z.0").acts["@z.0"].flatten(-2)
    own = dictionary_of("relu", width=heads.shape[-1])
    plan = fh.Plan(fh.keep("@z.0", features=own, index=[3]))
    found = fh.run(model(), IDS, plan=plan).acts["@z.0"]
    torch.testing.assert_close(found, own.encode(heads)[..., [3]])
    plan = fh.Plan(fh.keep("@z.0.1", features=dictionary(), index=[3]))
    with pytest.raises(HookTypeError, match=r"reads the whole tensor of a module, but @z.0.1 is a"):
        plan.prepare(model())


def test_dtypes() -> None:
    own, x = dictionary(), torch.randn(3, WIDTH, dtype=torch.float64)
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        with fh.Plan(fh.keep("", features=own, index=[3])).open(module := Echo()) as request:
            module(x.to(dtype))
        assert request.acts[""].dtype == kept
    plan = fh.Plan(fh.keep("", features=own, index=[3], dtype=torch.float16))
    with plan.open(module := Echo()) as request:
        module(x)
    assert request.acts[""].dtype == torch.float16


def test_gradients_pass_if_they_are_wanted() -> None:
    own, x = dictionary(), torch.randn(3, WIDTH, requires_grad=True)
    with fh.Plan(fh.keep("", features=own, index=[3], detach=False)).open(m := Echo()) as request:
        m(x)
    request.acts[""].sum().backward()
    other = x.detach().clone().requires_grad_()
    own.encode(other)[:, 3].sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_as_data() -> None:
    own = dictionary()
    for options in ({"top": 4, "at": "generated"}, {"index": [3, 5]}, {"index": 3}):
        plan = fh.Plan(fh.keep(LAYER, features=own, label="f", **options))
        text = plan.to_json()
        assert fh.Plan.from_json(text, dictionaries={"mine": own}) == plan
        assert pickle.loads(pickle.dumps(plan)) == plan
        with pytest.raises(ValueError, match="no dictionary named 'mine' was passed"):
            fh.Plan.from_json(text)
    assert fh.keep(LAYER, features=own, top=4) != fh.keep(LAYER, features=own, top=5)
    assert fh.keep(LAYER, features=own, top=4).needs == {"features"}


@pytest.mark.parametrize(
    "change",
    [
        {"features": None},
        {"features": 3},
        {"features": "other"},
        {"top": None},
        {"top": 0},
        {"top": 1.5},
        {"top": True},
        {"top": 41},
        {"index": [3]},
        {"top": None, "index": [40]},
        {"top": None, "index": ["3"]},
        {"top": None, "index": {"tuple": [3]}},
        {"top": None, "index": [3] * 2000},
        {"grads": True},
    ],
)
def test_hostile_json(change: dict[str, Any]) -> None:
    entry = {"type": "keep", "what": LAYER, "features": "mine", "top": 4} | change
    with pytest.raises(ValueError, match=r"entries\[0\]"):
        fh.Plan.from_json({"version": 1, "entries": [entry]}, dictionaries={"mine": dictionary()})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, HookTypeError, "features= needs top=, the number of largest values, or index="),
        ({"top": 4, "index": [3]}, HookTypeError, "needs top=.* or index="),
        ({"features": "mine", "top": 4}, HookTypeError, "features must be a Dictionary, got str"),
        ({"features": None, "top": 4}, HookTypeError, "features must be a Dictionary"),
        ({"top": D_SAE + 1}, ValueError, "top must be at most the number of features, 40, got 41"),
        ({"top": 0}, ValueError, "top must be at least 1"),
        ({"index": [40]}, ValueError, "index of keep must be numbers from 0 to 39"),
        ({"top": 4, "slice": 0}, HookTypeError, "values of features, not the tensor: .* slice="),
        ({"top": 4, "grads": True}, HookTypeError, "leave out grads="),
        ({"top": 4, "copy": "clone"}, HookTypeError, "leave out copy="),
        ({"top": 4, "dtype": torch.float16}, HookTypeError, "leave out dtype, with top="),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fh.keep(LAYER, **({"features": dictionary()} | options))


def test_gates_have_no_features() -> None:
    with pytest.raises(HookTypeError, match=r"one number for each token .* leave out features"):
        fh.keep("@gate.g", features=dictionary(), top=4)


def test_a_tensor_of_another_width_fails_its_call() -> None:
    module = Echo()
    plan = fh.Plan(fh.keep("", features=dictionary(), top=4))
    with pytest.raises(HookTypeError, match="reads tensors"), plan.open(module):
        module(torch.ones(2, 9))
