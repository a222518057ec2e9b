"""Small language models of random weights, from transformers, and a real one."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from filelock import FileLock

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = Path(__file__).parents[2] / "target"
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


def random_llama(width: int, seed: int) -> Any:
    """Makes a Llama with larger weights than `language_model`, without gradients."""
    model = language_model("llama", width)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.requires_grad_(False)


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


def remember_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets transformers read SmolLM2 as it was converted before, in a second and not in twenty."""
    transformers = pytest.importorskip("transformers")
    for auto in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(auto, "from_pretrained", _remembered(auto))


def _remembered(auto: Any) -> Callable[..., Any]:
    load = auto.from_pretrained

    def from_pretrained(*args: Any, gguf_file: str | None = None, **options: Any) -> Any:
        if gguf_file is None or options:
            given = {} if gguf_file is None else {"gguf_file": gguf_file}
            return load(*args, **given, **options)
        versions = "-".join(map(version, ("torch", "transformers", "tokenizers")))
        kept = TARGET / f"{gguf_file}-{auto.__name__}-{versions}"
        with FileLock(TARGET / "smollm2.lock"):
            if not kept.exists():
                unfinished = kept.with_suffix(".unfinished")
                torch.save(load(*args, gguf_file=gguf_file), unfinished)
                unfinished.rename(kept)
        return torch.load(kept, weights_only=False, mmap=True)

    return from_pretrained
