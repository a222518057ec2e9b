"""`fh.Feature` at positions, quantities and heads of a language model, compiled, and at sites."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from ferrohook.errors import HookError, HookTypeError
from support.compiling import compiled
from support.dictionaries import dictionary_of
from support.language_models import language_model

pytest.importorskip("transformers")

WIDTH = 8
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names of older versions


@functools.cache
def model() -> Any:
    return language_model("llama", WIDTH).requires_grad_(requires_grad=False)


def feature(kind: str = "topk", **more: Any) -> fh.Feature:
    dictionary = dictionary_of(kind, width=WIDTH, normalize_activations="layer_norm")
    return fh.Feature(dictionary, [3, 9], **({"set": 5.0} | more))


def kept(plan: fh.Plan, what: str, ids: Tensor = IDS) -> Tensor:
    return fh.run(model(), ids, plan=plan + fh.Plan(fh.keep(what))).acts[what]


def plain(what: str, ids: Tensor = IDS) -> Tensor:
    return fh.run(model(), ids, capture=what).acts[what]


@pytest.mark.parametrize("kind", ["relu", "topk"])
@pytest.mark.parametrize("what", ["model.layers.0", "@resid_post.0", "@mlp_out.0", "@resid_pre.1"])
def test_at_a_place(what: str, kind: str) -> None:
    hook = feature(kind)
    expected = hook.apply(plain(what))
    torch.testing.assert_close(kept(fh.Plan(fh.on(what, hook)), what), expected)


@pytest.mark.parametrize("kind", ["relu", "topk"])
def test_at_positions_and_with_a_strength(kind: str) -> None:
    hook, what = feature(kind), "@resid_post.0"
    before = plain(what)
    changed = hook.apply(before)
    expected = before.clone()
    expected[:, 2:4] = changed[:, 2:4]
    torch.testing.assert_close(kept(fh.Plan(fh.on(what, hook, at=slice(2, 4))), what), expected)
    half = kept(fh.Plan(fh.on(what, hook, strength=0.5)), what)
    torch.testing.assert_close(half, before + (changed - before) / 2)


def test_a_dictionary_of_all_heads_and_one_of_a_head() -> None:
    before = plain("@z.0")
    heads = before.shape[-2:]
    whole = dictionary_of("relu", width=heads.numel())
    hook = fh.Feature(whole, 3, set=5.0)
    expected = hook.apply(before.flatten(-2)).unflatten(-1, heads)
    torch.testing.assert_close(kept(fh.Plan(fh.on("@z.0", hook)), "@z.0"), expected)
    one = fh.Feature(dictionary_of("relu", width=heads[1]), 3, set=5.0)
    expected = before.clone()
    expected[..., 1, :] = one.apply(before[..., 1, :])
    torch.testing.assert_close(kept(fh.Plan(fh.on("@z.0.1", one)), "@z.0"), expected)


def test_another_width_is_refused_where_it_enters() -> None:
    wrong = fh.Feature(dictionary_of("relu", width=9), 3, set=5.0)
    for what in ("@resid_post.0", "@z.0", "model.layers.0.mlp.down_proj"):
        with pytest.raises(HookTypeError, match="has a width of 9"):
            fh.Plan(fh.on(what, wrong)).prepare(model())


def test_requests_at_positions_share_a_forward() -> None:
    shared = dictionary_of("topk", width=WIDTH)
    hooks = [fh.Feature(shared, n, set=4.0 + n) for n in range(2)]
    plans = [
        fh.Plan(fh.on("@resid_post.0", hook, at=at), fh.keep("@resid_post.0"))
        for hook, at in zip(hooks, (slice(1, 3), "prompt"), strict=True)
    ]
    requests = [plan.open(model()) for plan in plans]
    with fh.batch({requests[0]: slice(0, 1), requests[1]: slice(1, 2)}, size=2):
        model()(IDS)
    for n, (plan, request) in enumerate(zip(plans, requests, strict=True)):
        alone = fh.run(model(), IDS[n : n + 1], plan=plan).acts["@resid_post.0"]
        torch.testing.assert_close(request.acts["@resid_post.0"], alone)


def test_while_generating() -> None:
    hook = feature("jumprelu", set=20.0)
    arguments = {"max_new_tokens": 4, "do_sample": False}
    plan = fh.Plan(fh.on("@resid_post.1", hook, at="generated"))
    with plan.open(model()):
        found = model().generate(IDS[:1], **arguments)
    tokens = IDS[:1]
    for step in range(4):
        with plan.open(model(), prompt=5):
            logits = model()(tokens).logits[:, -1]
        assert tokens.shape[1] == 5 + step
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    assert found.tolist() == tokens.tolist()


def test_sites_refuse_it_by_name() -> None:
    with pytest.raises(HookTypeError, match="Feature takes a vector of any shape, but sites hold"):
        fh.rows.sites(model(), "model.layers.0", max_requests=1, max_rows=2, kinds=(fh.Feature,))
    with fh.rows.sites(model(), "model.layers.0", max_requests=1, max_rows=2), torch.no_grad():
        request = fh.Plan(fh.on("model.layers.0", feature())).prepare(model()).open()
        with pytest.raises(HookError, match="add Feature to their kinds="):
            fh.batch({request: slice(0, 1)}, size=1).__enter__()


@compiled
@pytest.mark.parametrize("kind", ["relu", "topk"])
def test_compiled_models_break_their_graph_for_it(kind: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    hook, x = feature(kind), torch.randn(3, WIDTH)
    fh.instrument(module)
    run = torch.compile(module, backend="eager")
    assert torch.equal(run(x), module(x))
    expected = module[1](hook.apply(module[0](x)))
    with fh.register(module, "0", hook):
        torch.testing.assert_close(run(x), expected)
    torch.testing.assert_close(run(x), module(x))
