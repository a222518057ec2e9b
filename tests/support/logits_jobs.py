"""Plans whose gates read the logits from which an engine samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from support.serving import VOCABULARY, WIDTH

if TYPE_CHECKING:
    import random

    from torch import Tensor

ALL = slice(-1, None)
"""All tokens that have logits."""


def plan_of(rng: random.Random) -> fh.Plan:
    """A plan that reads the logits, and may steer the next token by them."""
    ids = rng.sample(range(VOCABULARY), 3)
    reading = rng.choice([fh.TokenProbability(ids), fh.MaxProbability(), fh.Entropy()])
    over: Any
    at: Any
    over, at = rng.choice(
        [
            *((over, ALL) for over in ("token", "so_far", "prompt", fh.window(2), fh.ema(0.6))),
            ("token", "generated"),
            ("prompt", "last_prompt"),
        ]
    )
    lag = 0 if over == "prompt" else rng.choice([0, 1])
    by: Any = rng.choice(["max", "min", "mean"])
    gate = fh.gate("g", "@logits", reading, over=over, at=at, by=by, lag=lag)
    kept = fh.Plan(gate, fh.keep("@gate.g"))
    if not lag:
        return kept
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
    strength = fh.ramp("g", -1.0, 3.0)
    return kept + fh.Plan(
        fh.on("model.layers.1", fh.Add(vector), at="generated", strength=strength)
    )


@torch.no_grad()
def values_alone(model: Any, plan: fh.Plan, prompt: list[int], text: list[int]) -> Tensor:
    """Values of the gate in the request by itself, one token after the other."""
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    with plan.prepare(model).open(prompt=len(prompt)) as request:
        for ids in [prompt, *([token] for token in text[:-1])]:
            model(torch.tensor([ids]), past_key_values=cache)
    values: Tensor = request.acts["@gate.g"]
    return values


SURE = fh.Plan(
    fh.gate("sure", "@logits", fh.MaxProbability(), at=ALL),
    fh.keep("@gate.sure"),
)
"""A plan that keeps the probability of each next token."""


def stops_at(values: Tensor) -> dict[str, fh.Plan]:
    """Plans that end an answer at tokens, by `stops-` and their number; `values`: `SURE`'s."""
    plans: dict[str, fh.Plan] = {}
    for place, value in enumerate(values.tolist()):
        if value > float(values[:place].max() if place else 0) + 1e-4:
            plans[f"stops-{place}"] = SURE + fh.Plan(fh.stop(when=fh.above("sure", value - 5e-5)))
    return plans


def gated(**options: Any) -> Any:
    """A gate at the logits."""
    what, reading = options.pop("what", "@logits"), options.pop("reading", fh.MaxProbability())
    return fh.gate("g", what, reading, **{"at": "generated", **options})


WATCHED = fh.Plan(
    gated(at=ALL),
    fh.gate("early", "model.layers.1", fh.Norm()),
    fh.keep("@gate.g"),
    fh.keep("@gate.early"),
)
"""A plan that reads a layer and the logits."""
REFUSED = [
    (gated(at=None), "gate 'g' reads @logits at at=None.*only from the last token of the prom"),
    (gated(at=None, over="prompt"), "give the gate at='generated'"),
    (gated(at="prompt", over="prompt"), "at='prompt'.*only from the last token"),
    (gated(at=slice(-2, None)), "only from the last token of the prompt"),
    (gated(at=20), "only from the last token of the prompt"),
    (
        gated(reading=fh.TokenProbability([10**6])),
        "gate 'g' does not fit .*token id 1000000 .*out of range",
    ),
    (gated(reading=fh.Dot(torch.ones(3))), "width 3, got"),
    (gated(inputs=True), "one tensor at a fixed place"),
    (gated(what=["@logits", "model.layers.1"]), "only for the tokens that it samples from"),
    (fh.keep("@logits", at="generated"), "only for the tokens that it samples from"),
    (fh.on("@logits", fh.Scale(2.0)), "only for the tokens that it samples from"),
]
"""Entries that need other logits, and the reason for which engines refuse them."""
