"""Requests whose plans change and capture at the borders of an engine's blocks."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
from support.engines import Change, Gated, Job, chosen_positions
from support.serving import LAYERS, VOCABULARY, WIDTH

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 32
LONGEST = 160
"""Tokens of a prompt, at most."""
BORDERS: Sequence[Any] = (
    *(None, "prompt", "generated", "generated", "last_prompt", 0, 31, 32, 33, 63, 64, -1, -33),
    *(slice(31, None), slice(32, None), slice(33, 70), slice(64, None), slice(95, None)),
    *(slice(-5, None), slice(-32, None), slice(96, 97)),
)


def border_jobs(number: int, seed: int) -> list[Job]:
    """Requests of which a third have no plan; all begin with one of three prefixes."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    generator = torch.Generator().manual_seed(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(least, most))]

    def change() -> Change:
        vector = torch.randn(WIDTH, generator=generator)
        hooks = [fh.Add(vector, scale=2.0), fh.Add(vector), fh.Scale(0.5), fh.Ablate(vector)]
        return Change(rng.randrange(LAYERS), rng.choice(hooks), rng.choice(BORDERS))

    prefixes = [tokens(length, length) for length in (64, 100, 131)]
    plans = [tuple(change() for _ in range(rng.randint(1, 2))) for _ in range(4)]
    names = [*(f"model.layers.{layer}" for layer in range(LAYERS)), "model.norm"]
    jobs: list[Job] = []
    while len(jobs) < number:
        earlier = [
            job for job in jobs[-16:-2] if first_changed(job) < 2 * BLOCK and not job.captures
        ]
        if earlier and rng.random() < 1 / 4:  # a next turn
            job = rng.choice(earlier)
            jobs.append(Job([*job.prompt, *tokens(0, 9)][:LONGEST], job.changes))
            continue
        prefix = rng.choice(prefixes)
        prompt = [*prefix[: rng.choice([len(prefix), len(prefix), 65, 33])], *tokens(0, 29)]
        if rng.random() < 1 / 3:
            jobs.append(Job(prompt))
            continue
        changes: tuple[Change, ...] = ()
        if rng.random() < 3 / 4:  # most of them of a plan that others have too
            changes = rng.choice(plans) if rng.random() < 3 / 4 else (change(),)
        gated = Gated.drawn(rng, generator, LAYERS, WIDTH) if rng.random() < 1 / 5 else None
        least = rng.choice([0, 0, 1]) if changes or gated else 1
        kept = tuple(rng.sample(names, rng.choice([least, least, 2])))
        jobs.append(Job(prompt, changes, kept, gated=gated, kept_at=rng.choice(BORDERS)))
    return jobs


def first_changed(job: Job) -> float:
    """Returns the first position whose keys and values the plan of a job changes, or infinity."""
    prompt, length = len(job.prompt), 2 * LONGEST
    found = [math.inf]
    for each in job.changes:
        if each.layer < LAYERS - 1:  # else it is after the last attention
            found += chosen_positions(each.at, length, prompt).nonzero().flatten().tolist()[:1]
    if (gated := job.gated) is not None and gated.changed < LAYERS - 1:
        readings = [0.0] * length
        values = (gated.value(readings, position, prompt) for position in range(length))
        found += [position for position, value in enumerate(values) if not math.isnan(value)][:1]
    return min(found)
