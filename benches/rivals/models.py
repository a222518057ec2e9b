"""Small random models, as folders of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

WORDS: Final = 64
WIDTH: Final = 32
LAYERS: Final = 3
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Logits that differ, so that no two answers are alike by accident.
    "initializer_range": 0.2,
}
_GPT2: Final = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_positions": 128, "n_inner": 64}


def config_of(kind: str) -> Any:
    """Returns the configuration of a family, such as "llama"."""
    sizes = dict(_SIZES)
    if kind == "gpt2":
        sizes = {key: _SIZES[key] for key in ("vocab_size", "initializer_range")} | _GPT2
        sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(kind, **sizes)


def save(kind: str, folder: Path) -> Path:
    """Makes a model of a family, and its tokenizer of words; returns its folder."""
    from tokenizers import Tokenizer  # noqa: PLC0415 (not for modules alone)
    from tokenizers.models import WordLevel  # noqa: PLC0415 (likewise)
    from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: PLC0415 (likewise)
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (likewise)

    path = folder / kind
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind)).eval()
    with torch.no_grad():  # norms of ones would hide which norm an activation has passed
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or "ln_" in name:
                parameter.add_(torch.rand_like(parameter))
    model.save_pretrained(path)
    unknown = "w0"
    made = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unknown))
    made.pre_tokenizer = WhitespaceSplit()
    names = {"unk_token": unknown, "bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(path)
    return path


def load(folder: Path) -> Any:
    """Loads a model with no library around it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval().requires_grad_(requires_grad=False)


class InPlace(nn.Module):
    """A layer whose output the next module changes in place, as in torchvision's ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the three."""
        result: torch.Tensor = self.last(self.relu(self.first(x)))
        return result


class Branches(nn.Module):
    """A model of which one branch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs one branch."""
        result: torch.Tensor = self.used(x)
        return result
