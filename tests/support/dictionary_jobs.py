"""Requests whose plans name dictionaries, and what PyTorch's own hooks compute for each alone."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
from support.dictionaries import D_SAE, dictionary_of, rows_of_values, weights_of
from support.engines import chosen_positions
from support.serving import VOCABULARY, WIDTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from support.engine_scenes import Given

KINDS = ("relu", "groupmax")
"""Kinds of dictionaries; not top-k, where the rounding of a row may choose another feature."""
TOP, KEPT = 3, [1, 7]


def dictionaries(seed: int = 0) -> dict[str, fh.Dictionary]:
    """Dictionaries by kind, and a transcoder; their names do not depend on the seed."""
    places: dict[str, Any] = {"reads": "@mlp_in.2", "writes": "@mlp_out.2"}
    coder: dict[str, Any] = {"transcoder": True, "W_skip": torch.eye(WIDTH), **places}
    return {
        kind: dictionary_of(kind, seed, WIDTH, name=f"sae/{kind}", reads="model.layers.1")
        for kind in KINDS
    } | {"coder": dictionary_of("relu", seed, WIDTH, name="sae/coder", **coder)}


@dataclasses.dataclass(frozen=True)
class FeatureJob:
    """A request that sets features after layer 1, and captures features there.

    It doubles features of layer 2's transcoder.
    """

    prompt: list[int]
    kind: str
    index: list[int]
    number: float
    at: Any
    gated: bool
    """True if a feature after layer 0 tells how far."""
    seed: int = 0
    """Seed of the dictionaries."""

    @property
    def plan(self) -> fh.Plan:
        """Its plan."""
        own = dictionaries(self.seed)
        feature = fh.FeatureActivation(own["relu"], self.index[0])
        hook = fh.Feature(own[self.kind], self.index, set=self.number)
        strength: Any = {"strength": fh.ramp("g", -1.0, 1.0)} if self.gated else {}
        return fh.Plan(
            fh.gate("g", "model.layers.0", feature),
            fh.on("model.layers.1", hook, at=self.at, **strength),
            fh.on("@mlp_out.2", fh.Feature(own["coder"], self.index, scale=2.0), at=self.at),
            fh.keep("@gate.g"),
            fh.keep("model.layers.1", features=own[self.kind], top=TOP),
            fh.keep("model.layers.1", label="own", features=own["relu"], index=KEPT, at=self.at),
        )

    def check(self, model: Any, given: Given) -> None:
        """Compares an answer with transformers' for the request alone."""
        acts: dict[str, Tensor] = {}
        own = {kind: weights_of(kind, WIDTH, self.seed, WIDTH) for kind in KINDS}

        def read(_module: Any, _args: Any, x: Tensor) -> None:
            acts["@gate.g"] = rows_of_values("relu", own["relu"], x)[0, :, self.index[0]]

        def change(_module: Any, _args: Any, x: Tensor) -> Tensor:
            values = rows_of_values(self.kind, own[self.kind], x)[..., self.index]
            difference = (self.number - values) @ own[self.kind]["W_dec"][self.index]
            chosen = chosen_positions(self.at, x.shape[1], len(self.prompt))
            strength = ((acts["@gate.g"] + 1) / 2).clamp(0, 1) if self.gated else 1.0
            x = x + (chosen * strength)[None, :, None] * difference
            acts["all"] = rows_of_values(self.kind, own[self.kind], x)[0]
            acts["own"] = rows_of_values("relu", own["relu"], x)[0, chosen][:, KEPT]
            return x

        def double(_module: Any, args: Any, x: Tensor) -> Tensor:
            values = rows_of_values("relu", own["relu"], args[0])[..., self.index]
            chosen = chosen_positions(self.at, x.shape[1], len(self.prompt))
            return x + chosen[None, :, None] * (values @ own["relu"]["W_dec"][self.index])

        layers = model.model.layers
        hooks = [
            layers[0].register_forward_hook(read),
            layers[1].register_forward_hook(change),
            layers[2].mlp.register_forward_hook(double),
        ]
        try:
            logits = model(torch.tensor([[*self.prompt, *given.tokens[:-1]]])).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        best = logits[len(self.prompt) - 1 :]
        chosen = best.gather(1, torch.tensor(given.tokens)[:, None])[:, 0]
        assert (best.amax(1) - chosen).max() <= 1e-3
        values, numbers = given.acts["model.layers.1"].unbind(-1)
        assert values.shape == (len(logits), TOP)
        _close(values, acts["all"].topk(TOP).values)
        _close(values, acts["all"].gather(1, numbers.long()))
        _close(given.acts["@gate.g"], acts["@gate.g"])
        if len(acts["own"]):
            _close(given.acts["own:model.layers.1"], acts["own"])


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def random_feature_jobs(count: int, seed: int = 0) -> Sequence[FeatureJob]:
    """Requests at random; some begin with the same tokens."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    prefix = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    return [
        FeatureJob(
            [*(prefix if number % 2 else []), *(rng.randrange(3, VOCABULARY) for _ in range(9))],
            KINDS[number % 3 % 2],
            rng.sample(range(D_SAE), 3),
            rng.uniform(2, 6),
            rng.choice([None, "generated", "prompt", slice(1, 4)]),
            gated=number % 4 < 2,
        )
        for number in range(count)
    ]
