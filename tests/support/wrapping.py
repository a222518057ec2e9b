"""Modules of the tests of wrapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable


class Tied(nn.Module):
    """Encoder and decoder share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).relu())


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=32,
        max_position_embeddings=16,
    )
    return transformers.BertModel(config).eval()


def x() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(2, 3, 4)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "Linear": (lambda: nn.Linear(4, 4), lambda: (x(),)),
    "Sequential": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lambda: (x(),)),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        lambda: (x(), x(), x()),
    ),
    "LSTM": (lambda: nn.LSTM(4, 4, batch_first=True), lambda: (x(),)),
    "BatchNorm": (lambda: nn.BatchNorm1d(3), lambda: (x(),)),
    "tied": (Tied, lambda: (x(),)),
    "lazy": (lambda: nn.LazyLinear(4), lambda: (x(),)),
    "transformers": (bert, lambda: (torch.arange(6).reshape(2, 3),)),
}


def leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output
    return [leaf for value in values if value is not None for leaf in leaves(value)]


def same(a: Any, b: Any) -> bool:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


Case = tuple[nn.Module, tuple[Any, ...]]
