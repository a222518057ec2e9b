"""Small models of transformers with attention of many kinds, of random weights."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

_COMMON = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}

KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": (
        "LlamaForCausalLM",
        _COMMON | {"num_key_value_heads": 2},
        "model.layers.{}.self_attn",
    ),
    "qwen3": ("Qwen3ForCausalLM", _COMMON | _GROUPED, "model.layers.{}.self_attn"),
    "gemma2": (
        "Gemma2ForCausalLM",
        _COMMON
        | _GROUPED
        | {
            "sliding_window": 3,
            "attn_logit_softcapping": 0.5,
            "query_pre_attn_scalar": 11,
            "attention_bias": True,
        },
        "model.layers.{}.self_attn",
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        _COMMON
        | _GROUPED
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
        "model.layers.{}.self_attn",
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", _COMMON, "gpt_neox.layers.{}.attention"),
    "gpt2": (
        "GPT2LMHeadModel",
        _COMMON | {"scale_attn_by_inverse_layer_idx": True},
        "transformer.h.{}.attn",
    ),
    "bert": ("BertModel", _COMMON, "encoder.layer.{}.attention.self"),
}
"""Class, arguments of its configuration and path of an attention module, by kind."""


def attention_model(kind: str, **changed: Any) -> Any:
    """Makes a model whose weights are large enough that attention is far from uniform.

    `changed` are other arguments of its configuration.
    """
    transformers = pytest.importorskip("transformers")
    name, options, _ = KINDS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**(options | changed))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
            else:
                parameter.add_(torch.randn_like(parameter) / 3)
    return model.requires_grad_(requires_grad=False)


def attention_of(model: nn.Module, kind: str, layer: int) -> nn.Module:
    """Returns the attention module of a layer."""
    return model.get_submodule(KINDS[kind][2].format(layer))


@contextlib.contextmanager
def implemented(model: Any, name: str) -> Iterator[None]:
    """Makes a model compute its attention by another function."""
    former = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(former)


@contextlib.contextmanager
def registered(name: str, function: Callable[..., Any], mask: str) -> Iterator[None]:
    """Adds an attention function to transformers, with the masks of another one."""
    interfaces = pytest.importorskip("transformers.modeling_utils").AttentionInterface
    masks = pytest.importorskip("transformers.masking_utils").AttentionMaskInterface
    interfaces.register(name, function)
    masks.register(name, masks._global_mapping[mask])
    try:
        yield
    finally:
        del interfaces._global_mapping[name], masks._global_mapping[name]
