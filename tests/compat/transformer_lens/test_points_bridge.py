"""TransformerLens' bridge models on our hook points, compared with theirs.

The models are small and random: the classes are under test, and nothing is downloaded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from ferrohook.compat.transformer_lens import HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("transformer_lens", reason="transformer_lens is not installed: no bridges")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformer_lens import hook_points as lens_points  # noqa: E402 (after the importorskip)
from transformer_lens.model_bridge.sources import build_bridge_from_module  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
KINDS: dict[str, Callable[[], Any]] = {
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_inner=64, n_positions=32, vocab_size=50
    ),
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    ),
    "GPTNeoXForCausalLM": lambda: transformers.GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        max_position_embeddings=32,
    ),
}


def bridge(kind: str) -> Any:
    torch.manual_seed(0)
    config = KINDS[kind]()
    config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config).eval()
    return build_bridge_from_module(model, kind, hf_config=config)


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest) -> Callable[..., tuple[Any, Any]]:
    """Results of a function of a model on our hook points, and on TransformerLens'."""

    def run(act: Callable[[Any], Any]) -> tuple[Any, Any]:
        theirs = act(bridge(request.param))
        original = lens_points.HookPoint
        with pytest.MonkeyPatch.context() as patch:
            for name, module in list(sys.modules.items()):
                has_it = vars(module).get("HookPoint") is original
                if has_it and name.startswith("transformer_lens"):
                    patch.setattr(module, "HookPoint", HookPoint)
            model = bridge(request.param)
            ours = act(model)
            assert all(isinstance(point, HookPoint) for point in model.hook_dict.values())
        return ours, theirs

    return run


def expect_equal(ours: Any, theirs: Any) -> None:
    """Asserts equal names and bit-equal tensors."""
    assert list(ours.keys()) == list(theirs.keys())
    assert len(ours) > 0
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def scaled(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    hook.ctx["seen"] = hook.name
    return tensor * 0.5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"names_filter": ["blocks.0.attn.q.hook_out", "blocks.1.hook_out"]},
        {"names_filter": lambda name: "attn" in name},
        {"pos_slice": -1, "remove_batch_dim": True},
        {"incl_bwd": True, "return_type": "loss"},
        {"stop_at_layer": 1},
    ],
    ids=lambda options: "-".join(options) or "all",
)
def test_caches(both: Any, options: dict[str, Any]) -> None:
    def act(model: Any) -> Any:
        out, cache = model.run_with_cache(IDS, **options)
        assert not any(point.fwd_hooks or point.bwd_hooks for point in model.hook_points())
        return out, cache

    (our_out, our_cache), (their_out, their_cache) = both(act)
    assert torch.equal(our_out, their_out)
    expect_equal(our_cache, their_cache)


@pytest.mark.parametrize(
    "name", ["blocks.0.attn.q.hook_out", "blocks.0.hook_resid_pre", "blocks.1.mlp.hook_out"]
)
def test_hooks(both: Any, name: str) -> None:
    def act(model: Any) -> Any:
        clean = model(IDS)
        outs = [model.run_with_hooks(IDS, fwd_hooks=[(name, scaled)])]
        with model.hooks(fwd_hooks=[(lambda each: each.endswith("mlp.hook_in"), scaled)]):
            outs.append(model(IDS))
        assert not any(torch.equal(out, clean) for out in outs)
        assert torch.equal(model(IDS), clean)
        return outs, {point.name: point.ctx for point in model.hook_points() if point.ctx}

    (our_outs, our_contexts), (their_outs, their_contexts) = both(act)
    assert all(map(torch.equal, our_outs, their_outs))
    assert our_contexts == their_contexts != {}


def test_gradients(both: Any) -> None:
    def act(model: Any) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def hook(gradient: torch.Tensor, hook: Any) -> torch.Tensor:
            seen.append(gradient.clone())
            return gradient * 2

        names = ["blocks.0.hook_out", "blocks.1.attn.v.hook_out"]
        with model.hooks(bwd_hooks=[(name, hook) for name in names]):
            model(IDS, return_type="loss").backward()
        return seen + [p.grad for p in model.original_model.parameters() if p.grad is not None]

    ours, theirs = both(act)
    assert len(ours) == len(theirs) > 2
    assert all(map(torch.equal, ours, theirs))


def test_added_and_permanent_hooks(both: Any) -> None:
    def act(model: Any) -> Any:
        model.add_hook("blocks.0.hook_out", scaled)
        model.add_perma_hook("blocks.1.hook_in", scaled)
        outs = [model(IDS)]
        listed = {name: len(hooks) for name, hooks in model.list_hooks().items()}
        model.reset_hooks()
        outs.append(model(IDS))
        cache = model.add_caching_hooks(["blocks.0.mlp.hook_out"])
        model(IDS)
        outs.append(cache["blocks.0.mlp.hook_out"])
        model.reset_hooks(including_permanent=True)
        return listed, [*outs, model(IDS)]

    (our_list, our_outs), (their_list, their_outs) = both(act)
    assert our_list == their_list != {}
    assert all(map(torch.equal, our_outs, their_outs))


def test_compatibility_mode_has_the_legacy_names(both: Any) -> None:
    def act(model: Any) -> Any:
        model.enable_compatibility_mode(disable_warnings=True, no_processing=True)
        names: list[str] = []

        def hook(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
            names.append(hook.name)
            return tensor * 0.5

        out = model.run_with_hooks(IDS, fwd_hooks=[("blocks.0.attn.hook_q", hook)])
        return names, out, model.run_with_cache(IDS)[1]

    (our_names, our_out, our_cache), (their_names, their_out, their_cache) = both(act)
    assert our_names == their_names != []
    assert torch.equal(our_out, their_out)
    expect_equal(our_cache, their_cache)


def test_points_of_a_bridge_are_scoped(both: Any) -> None:
    def act(model: Any) -> None:
        point = model.hook_dict["blocks.0.hook_out"]
        if isinstance(point, HookPoint):
            clean = model(IDS)
            with fh.scope() as s:
                point.add_hook(scaled, scope=s)
                assert not torch.equal(model(IDS), clean)
            assert torch.equal(model(IDS), clean)

    both(act)
