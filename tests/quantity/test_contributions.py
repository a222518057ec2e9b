"""Contributions against hooks that were written by hand for each architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from support.zoo import make, token_ids

IDS = token_ids()
BLOCK = 1
LLAMA = ("model.layers.1", "self_attn", "mlp")
SANDWICH = ("model.layers.1", "post_attention_layernorm", "post_feedforward_layernorm")
ADDED: dict[str, tuple[str, str, str]] = {
    "bert": ("bert.encoder.layer.1", "attention.output.dense", "output.dense"),
    "bloom": ("transformer.h.1", "self_attention.dense", "mlp.dense_4h_to_h"),
    "cohere": LLAMA,
    "deepseek_v3": LLAMA,
    "falcon": ("transformer.h.1", "self_attention", "mlp"),
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "gpt_neox": ("gpt_neox.layers.1", "attention", "mlp"),
    "gpt_oss": LLAMA,
    "granite": LLAMA,
    "llama4_text": ("model.layers.1", "self_attn", "feed_forward"),
    "mpt": ("transformer.blocks.1", "attn", "ffn.down_proj"),
    "olmo2": SANDWICH,
    "phi": ("model.layers.1", "self_attn", "mlp"),
    "qwen3_moe": LLAMA,
}
"""Block, and the modules in it whose output is added to the stream."""
FACTORS = {"granite": 0.7}


@pytest.mark.parametrize("kind", ADDED)
def test_contributions_are_those_of_hooks_by_hand(kind: str) -> None:
    model = make(kind)
    block, *modules = ADDED[kind]
    seen: list[Tensor] = []

    def see(_module: Any, _args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        seen.append(tensor.clone())  # Falcon adds to it in place

    handles = [
        model.get_submodule(f"{block}.{each}").register_forward_hook(see) for each in modules
    ]
    names = [f"@attn_out.{BLOCK}", f"@mlp_out.{BLOCK}"]
    with torch.no_grad(), fh.capture(model, names, copy="clone") as acts:
        output = model(IDS, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    for name, expected in zip(names, seen, strict=True):
        scaled = expected * FACTORS.get(kind, 1.0)
        torch.testing.assert_close(acts[name], scaled.view_as(acts[name]))
    if kind == "bert":
        return  # norms stand between the sums
    before, after = output.hidden_states[BLOCK : BLOCK + 2]
    total = before + sum(acts[name].view_as(before) for name in names)
    torch.testing.assert_close(total, after, rtol=1e-4, atol=1e-4)


def test_a_state_space_model_has_neither_attention_nor_mlp() -> None:
    model = make("mamba")
    with torch.no_grad(), fh.capture(model, ["@mixer_out.1", "backbone.layers.1.mixer"]) as acts:
        model(IDS)
    assert torch.equal(acts["@mixer_out.1"], acts["backbone.layers.1.mixer"])
    with pytest.raises(
        fh.SelectionError, match=r"not proved.*of this kind; the block adds 1 mixer"
    ):
        fh.capture(model, "@attn_out.1")


@pytest.mark.parametrize("kind", ["phi", "cohere", "gpt_neox"])
def test_a_parallel_block_has_no_middle(kind: str) -> None:
    with pytest.raises(fh.SelectionError, match="parallel block"):
        fh.capture(make(kind), "@resid_mid.1")


@pytest.mark.parametrize(
    ("kind", "last"), [("llama", "self_attn.o_proj"), ("gpt_oss", "self_attn.o_proj")]
)
def test_z_is_what_the_last_projection_takes_by_head(kind: str, last: str) -> None:
    model = make(kind)
    path = f"model.layers.1.{last}"
    with torch.no_grad():
        _, acts = fh.run(model, IDS, capture=["@z.1", "@z.1.2"])
        with fh.capture(model, path, inputs=True) as inputs:
            model(IDS)
    assert torch.equal(acts["@z.1"].flatten(2), inputs[path])
    assert torch.equal(acts["@z.1.2"], acts["@z.1"][:, :, 2])


def test_a_head_is_written_alone() -> None:
    model = make("llama")
    plan = fh.Plan(fh.on("@z.1.2", fh.Zero()), fh.keep("@z.1"), fh.keep("@attn_out.1"))
    with torch.no_grad():
        _, acts = fh.run(model, IDS, plan=fh.Plan.from_json(plan.to_json()))
        _, plain = fh.run(model, IDS, capture="@z.1")
    expected = plain["@z.1"].clone()
    expected[:, :, 2] = 0
    assert torch.equal(acts["@z.1"], expected)
    projection = model.model.layers[1].self_attn.o_proj
    torch.testing.assert_close(acts["@attn_out.1"], projection(expected.flatten(2)))


def test_an_unknown_head_and_a_cut_of_one_are_refused() -> None:
    model = make("llama")
    with pytest.raises(fh.SelectionError, match=r"@z.1.9 names no head: @z.1 has heads 0 to 3"):
        fh.capture(model, "@z.1.9")
    with (
        pytest.raises(fh.HookTypeError, match="slice= and a head"),
        fh.capture(model, "@z.1.2", slice=(..., 0)),
    ):
        pass
