"""Rows of the benchmarks of engines: requests alike, as ratios to an engine without ferrohook."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT, NEW = 16, 48
SIZES = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
REQUESTS = (16, 64)
ROUNDS = 11
GATED = "a layer steered where a gate allows it, to the same without gates"
MODEL = f"Llama of {SIZES['num_hidden_layers']} layers, width {SIZES['hidden_size']}"


class Round(NamedTuple):
    """Requests that were served."""

    seconds: float
    """CPU time."""
    texts: list[list[int]]
    """Tokens of the answers, in the order of the requests."""


def print_rows(
    requests: int,
    rounds: int,
    measure: Callable[[list[Any]], Round],
    without: Callable[[Callable[[], Round]], Round],
) -> None:
    """Prints medians of paired rounds, and the spread.

    Args:
        requests: number of requests.
        rounds: number of rounds.
        measure: serves requests with these plans.
        without: runs with the engine as it is without ferrohook.

    Raises:
        RuntimeError: gates that always allow a change give other texts than the change.
    """
    import ferrohook as fh  # noqa: PLC0415

    steered = steering(requests)
    variants: dict[str, list[Any]] = {
        "attached, no plans": [None] * requests,
        "all steered in all layers": steered,
        "all layers captured for all": [fh.Plan(fh.keep("model.layers.*"))] * requests,
    }
    ratios: dict[str, list[float]] = {name: [] for name in (*variants, GATED)}
    gates = gating(requests)
    changes = [plan.entries[1] for plan in gates]
    without_gates = [fh.Plan(fh.on(it.what, it.hook)) for it in changes]
    texts = [measure(plans).texts for plans in (steered, gates, without_gates)]
    if texts[1] != texts[2] or texts[0] == texts[1]:
        msg = "gates that always allow a change give other texts than the change"
        raise RuntimeError(msg)
    for _ in range(rounds):
        plain = without(lambda: measure([None] * requests)).seconds
        for name, plans in variants.items():
            ratios[name].append(measure(plans).seconds / plain)
        ratios[GATED].append(measure(gates).seconds / measure(without_gates).seconds)
    print_ratios(requests, ratios)


def gating(requests: int) -> list[Any]:
    """Returns a plan for each request, which changes a layer wherever an earlier one allows it."""
    import ferrohook as fh  # noqa: PLC0415

    generator = torch.Generator().manual_seed(2)
    plans = []
    for _ in range(requests):
        read, added = torch.randn(2, SIZES["hidden_size"], generator=generator) * 0.3
        gate = fh.gate("g", "model.layers.2", fh.Cosine(read), over="so_far")
        always = fh.above("g", -2)
        plans.append(fh.Plan(gate, fh.on("model.layers.6", fh.Add(added), when=always)))
    return plans


def print_ratios(requests: int, ratios: dict[str, list[float]]) -> None:
    """Prints medians, and the spread."""
    for name, found in ratios.items():
        low, high = min(found), max(found)
        print(
            f"  {requests} requests, {name}: {statistics.median(found):.3f} ({low:.2f}-{high:.2f})",
            flush=True,
        )


def steering(requests: int) -> list[Any]:
    """Returns a plan for each request, each adding another vector in all layers."""
    import ferrohook as fh  # noqa: PLC0415

    generator = torch.Generator().manual_seed(1)
    width = SIZES["hidden_size"]
    vectors = (torch.randn(width, generator=generator) * 0.1 for _ in range(requests))
    return [fh.Plan(fh.on("model.layers.*", fh.Add(vector))) for vector in vectors]


def requests_of(plans: list[Any]) -> list[tuple[list[int], str | None]]:
    """Returns a different prompt for each plan, and the plan as JSON, written once for all."""
    texts: dict[int, str] = {}
    return [
        (
            [3 + (number * 7 + place) % 500 for place in range(PROMPT)],
            None if plan is None else texts.setdefault(id(plan), plan.to_json()),
        )
        for number, plan in enumerate(plans)
    ]
