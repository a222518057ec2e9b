"""Scenes that are the same in every engine with a cache of prefixes: a function asks the engine."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

import ferrohook as fh
from support.engines import Change, Job
from support.serving import LAYERS, WIDTH, Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

NEW = 12
PROMPT = [*range(10, 110)]
VECTOR = torch.linspace(-2, 2, WIDTH)
HOSTILE = {
    "scale": fh.Plan(fh.on("model.layers.1", fh.Scale(1e38))),
    "mlp": fh.Plan(fh.on("model.layers.2.mlp", fh.Scale(3e38))),
    "add": fh.Plan(fh.on("model.layers.1", fh.Add(torch.full((WIDTH,), 3e38), scale=2.0))),
    "keys": fh.Plan(fh.on("model.layers.1.self_attn.qkv_proj", fh.Scale(1e37))),
    "generated": fh.Plan(fh.on("model.layers.1", fh.Scale(1e38), at="generated")),
    "logits": fh.Plan(fh.on("model.norm", fh.Add(torch.full((WIDTH,), 9e29)))),
    "hidden": fh.Plan(
        fh.on("model.layers.1", fh.Scale(3e38), at="generated"), fh.on("model.norm", fh.Zero())
    ),
    "hidden keys": fh.Plan(
        fh.on("model.layers.1.self_attn.qkv_proj", fh.Scale(1e35)),
        fh.on("model.layers.1.self_attn.o_proj", fh.Zero()),
    ),
}
"""Plans that make rows of their requests NaN or infinite, or too large."""
_numbers = itertools.count(1)
POSITIONS_FROM_THE_END: list[Any] = [-1, "last_prompt", "generated", "prompt", slice(-4, None)]


class Given(NamedTuple):
    """An engine's answer to one request."""

    tokens: list[int]
    acts: Mapping[str, Tensor]
    positions: Mapping[str, Tensor]
    cached: int
    """Tokens of the prompt that were read from the cache."""


Ask: TypeAlias = "Callable[[list[int], fh.Plan | None, int], Given]"
"""Serves one request: its prompt, its plan, its number of new tokens."""


def steering(at: Any = None, layer: int = 1) -> Job:
    """A request of `PROMPT` that is steered."""
    return Job(PROMPT, (Change(layer, fh.Add(VECTOR), at),))


def new_jobs() -> dict[str, Job]:
    """Returns requests whose plans are not prepared yet."""
    steered = (Change(1, fh.Add(VECTOR, scale=1 + next(_numbers) / 1000), None),)
    kept = f"model.layers.{next(_numbers) % LAYERS}"
    return {
        "steered": Job(PROMPT, steered),
        "kept": Job(PROMPT[:20], kept=(kept,)),
        "both": Job(PROMPT[:50], steered, ("model.layers.1", "model.norm")),
        "plain": Job(PROMPT[:30]),
    }


def _check(model: Any, job: Job, given: Given) -> None:
    job.check(model, Answer(given.tokens, dict(given.acts)), NEW)


def a_cache_is_shared_within_a_plan_only(model: Any, ask: Ask) -> None:
    """Asks an engine whose cache is empty."""
    cached = []
    for job in (steering(), Job(PROMPT), steering(), steering(layer=2), Job(PROMPT)):
        given = ask(job.prompt, job.plan, NEW)
        _check(model, job, given)
        cached.append(given.cached)
    assert cached[0] == cached[1] == cached[3] == 0
    assert cached[2] > 0
    assert cached[4] > 0


def positions_from_the_prompts_end_are_not_cached_for_longer_prompts(
    model: Any, ask: Ask, at: Any
) -> None:
    """Asks an engine whose cache is empty.

    Args:
        model: of transformers.
        ask: asks the engine.
        at: one of `POSITIONS_FROM_THE_END`.
    """
    first = Job(PROMPT[:64], (Change(1, fh.Add(VECTOR), at),))
    given = ask(first.prompt, first.plan, 40)
    longer = Job([*PROMPT[:64], *given.tokens[:-1]], first.changes)
    again = ask(longer.prompt, longer.plan, NEW)
    if at == -1 or isinstance(at, slice):
        absolute = "last_prompt" if at == -1 else slice(len(longer.prompt) - 4, 10**6)
        longer = Job(longer.prompt, (Change(1, fh.Add(VECTOR), absolute),))
    _check(model, longer, again)


def a_capture_runs_cached_positions_again(model: Any, ask: Ask) -> None:
    """A request that captures only generated tokens need not."""
    name = "model.layers.2"
    ask(PROMPT, None, NEW)
    job = Job(PROMPT, (), (name,))
    given = ask(PROMPT, job.plan, NEW)
    _check(model, job, given)
    assert given.cached == 0
    later = ask(PROMPT, fh.Plan(fh.keep(name, at="generated")), NEW)
    assert later.cached > 0
    rows = len(given.tokens) - 1
    torch.testing.assert_close(later.acts[name], given.acts[name][-rows:], rtol=1e-3, atol=1e-3)
    assert later.positions[name].tolist() == [*range(len(PROMPT), len(PROMPT) + rows)]


def spoilt_plans(number: int) -> list[str]:
    """Returns plans as text with a part cut out, replaced or repeated."""
    rng = random.Random(5)  # noqa: S311 (tests)
    plan = fh.Plan(fh.on("model.layers.1", fh.Add(VECTOR)), fh.keep(["model.layers.1", "@z.1"]))
    whole = plan.to_json()

    def spoilt() -> str:
        first, last = sorted(rng.randrange(len(whole)) for _ in range(2))
        junk = rng.choice(
            ["", "NaN", "1e999", '"', "[" * 5000, "null", "\\ud800", "-1", "{}", "\x00"]
        )
        return rng.choice([whole[:first] + junk + whole[last:], junk, whole[:first] + whole])

    return [spoilt() for _ in range(number)]


def check_fuzzed(statuses: list[int]) -> None:
    """Checks the statuses of answers to `spoilt_plans`: few of them are plans."""
    assert {*statuses} <= {200, 400}, sorted({*statuses})
    assert statuses.count(400) > 0.8 * len(statuses)


class Stops(NamedTuple):
    """A request that its plan ends."""

    prompt: list[int]
    plan: fh.Plan
    text: list[int]
    """Its answer."""
    value: float
    """Value of the gate at the last token that was read."""


def random_stops(ask: Ask, number: int, seed: int = 0) -> list[Stops]:
    """Draws requests that end after any number of tokens, by their answers without an end."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    generator = torch.Generator().manual_seed(seed)
    found: list[Stops] = []
    while len(found) < number:
        prompt = [rng.randrange(10, 110) for _ in range(rng.randint(1, 40))]
        gate = fh.gate("the end", "model.layers.1", fh.Dot(torch.randn(WIDTH, generator=generator)))
        keep = fh.keep("@gate.the end")
        plain = ask(prompt, fh.Plan(gate, keep), NEW)
        values = dict(
            zip(
                plain.positions["@gate.the end"].tolist(),
                plain.acts["@gate.the end"].tolist(),
                strict=True,
            )
        )
        # The largest one up to a random token: the first beyond the limit.
        last = rng.randint(len(prompt) - 1, max(values))
        seen = {at: it for at, it in values.items() if len(prompt) - 1 <= at <= last}
        end = max(seen, key=seen.__getitem__)
        others = [it for at, it in seen.items() if at < end]
        if others and seen[end] - max(others) < 0.01:
            continue  # rows differ in rounding
        limit = seen[end] - 0.005
        plan = fh.Plan(gate, fh.stop(when=fh.above("the end", limit)), keep)
        found.append(Stops(prompt, plan, plain.tokens[: end + 1 - len(prompt)], seen[end]))
    return found
