"""Amounts of random work: a fixed part, or all of it with `--whole`."""

from __future__ import annotations

everything = False
"""Set from the option before tests are imported."""


def amount(part: int, *, whole: int) -> int:
    """Returns how many examples, calls or rounds a test runs: `part`, or `whole` with `--whole`."""
    return whole if everything else part
