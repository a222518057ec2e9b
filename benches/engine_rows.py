"""Rows of the benchmarks of engines: requests alike, as ratios to an engine without ferrohook."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT, NEW = 16, 48
SIZES = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
REQUESTS = (16, 64)
ROUNDS = 11
MODEL = f"Llama of {SIZES['num_hidden_layers']} layers, width {SIZES['hidden_size']}"


def print_rows(
    requests: int,
    rounds: int,
    measure: Callable[[list[Any]], float],
    without: Callable[[Callable[[], float]], float],
) -> None:
    """Prints medians of paired rounds, and the spread.

    Args:
        requests: number of requests.
        rounds: number of rounds.
        measure: returns the CPU seconds of requests with these plans.
        without: runs with the engine as it is without ferrohook.
    """
    import ferrohook as fh  # noqa: PLC0415

    steered = steering(requests)
    variants: dict[str, list[Any]] = {
        "attached, no plans": [None] * requests,
        "all steered in all layers": steered,
        "all layers captured for all": [fh.Plan(fh.keep("model.layers.*"))] * requests,
    }
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    measure(steered)
    for _ in range(rounds):
        plain = without(lambda: measure([None] * requests))
        for name, plans in variants.items():
            ratios[name].append(measure(plans) / plain)
    print_ratios(requests, ratios)


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
