"""Amounts of random work: a part by day, all of it with `--every-case`."""

from __future__ import annotations

every_case = False
"""Set from the option before tests are imported."""


def by_day(number: int, *, of: int) -> int:
    """Returns how many examples, calls or rounds a test does: `number` by day, else `of`."""
    return of if every_case else number
