"""Random batches against an oracle that computes each row in plain torch.

300 batches, 5,000 with `--whole`, or as many as `--requests` says. A failing case prints its
smallest description, and `check(seed)` of `support.batches.runs` runs it again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from support.amounts import amount
from support.batches import runs, values
from support.batches.cases import WIDTH, Gate, draw

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHES = amount(300, whole=5_000)
PARTS = 4
"""Tests that share the batches, for as many processes."""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_row_and_capture_is_the_oracle_s(part: int, request: pytest.FixtureRequest) -> None:
    wanted = (request.config.getoption("requests") or BATCHES) / PARTS
    seed, batches = part, 0
    while batches < wanted:
        batches += len(draw(seed).steps)
        runs.check(seed)
        seed += PARTS


def test_a_seed_draws_the_same_case() -> None:
    assert [str(draw(seed)) for seed in range(50)] == [str(draw(seed)) for seed in range(50)]


@pytest.mark.parametrize("what", ["rows", "gathered", "positions"])
def test_what_is_wrong_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hands other rows to the product than to the oracle."""
    batch = fh.batch

    def wrong(rows: Any, dim: int = 0, **options: Any) -> Any:
        if what == "rows":
            rows = dict(zip(rows, reversed(rows.values()), strict=True))
        elif isinstance(given := options.get(what), torch.Tensor):
            options[what] = given.flip(0)
        elif isinstance(given, dict):
            options[what] = {
                module: index.flip(0) if isinstance(index, torch.Tensor) else index
                for module, index in given.items()
            }
        return batch(rows, dim, **options)

    monkeypatch.setattr(fh, "batch", wrong)
    assert any(differences(range(100)))


def test_a_wrong_condition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads every gate's element of the vector before it."""

    def wrong(drawn: Gate, at: Any) -> Any:
        element = (drawn.element - 1) % WIDTH
        return gate(dataclasses.replace(drawn, element=element), at)

    gate = values.gate
    monkeypatch.setattr(values, "gate", wrong)
    assert any(differences(range(60)))


def differences(seeds: Sequence[int]) -> list[str]:
    return [wrong for seed in seeds if (wrong := runs.difference(draw(seed)))]
