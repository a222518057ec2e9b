"""Small language models of random weights, from transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

LAYERS = {"llama": "model.layers", "gpt2": "transformer.h"}
"""Path of the layers of each kind. Their `mlp` returns the hidden state."""


def language_model(kind: str, width: int, **options: Any) -> Any:
    """Makes a model that never stops generating by itself."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options |= {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None, "vocab_size": 32}
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            **options,
        )
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.GPT2Config(n_embd=width, n_layer=2, n_head=2, n_positions=64, **options)
    return transformers.GPT2LMHeadModel(config).eval()


def encoder_decoder_model(width: int, *, layers: int, heads: int, vocab: int) -> Any:
    """Makes a BART that never stops generating by itself; its padding is token 1."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=vocab,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=width,
        decoder_ffn_dim=width,
        decoder_start_token_id=2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=1,
        forced_eos_token_id=None,
        max_position_embeddings=vocab,
    )
    return transformers.BartForConditionalGeneration(config).eval()
