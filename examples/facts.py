"""A transformer of four layers that knows the colour of six things; it learns them in seconds.

`docs/plotting.md` draws it. A text is such as "the sky in the town has colour blue".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

COLOURS = {
    "sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "gold": "yellow",
}
PLACES = ("town", "field", "hill")
WORDS = ("the", "in", "has", "colour", *PLACES, *COLOURS, *COLOURS.values())
WIDTH = 32
LAYERS = 4
LONGEST = 8
STEPS = 60


class Reader(nn.Module):
    """A causal language model of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH) / 2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, nhead=4, dim_feedforward=64, dropout=0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(WORDS))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits of the words that come next."""
        length = ids.shape[1]
        hidden = self.words(ids) + self.positions[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.to_logits(hidden)

    def to_logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden states to logits."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def encode(text: str) -> Tensor:
    """Returns the ids of a text's words, as a batch of one."""
    return torch.tensor([[WORDS.index(word) for word in text.split()]])


def train() -> Reader:
    """Makes a model and teaches it the facts."""
    torch.manual_seed(0)
    model = Reader()
    texts = [
        f"the {thing} in the {place} has colour {colour}"
        for thing, colour in COLOURS.items()
        for place in PLACES
    ]
    ids = torch.cat([encode(text) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(requires_grad=False)
