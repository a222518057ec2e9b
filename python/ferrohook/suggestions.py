"""Suggestions for a name that is unknown."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_SUGGESTIONS = 5
CLOSE = 0.6
"""How alike a suggestion must be: what `difflib.get_close_matches` asks for."""


def closest_to(unknown: str, names: Iterable[str]) -> list[str]:
    """The names most like the unknown one, as a whole or in the last segment."""
    whole = SequenceMatcher(b=unknown)
    last = SequenceMatcher(b=_last(unknown))

    def likeness(name: str) -> tuple[float, float]:
        whole.set_seq1(name)
        last.set_seq1(_last(name))
        return max(whole.ratio(), last.ratio()), whole.ratio()

    # Not by `get_close_matches`, which lists the equally close backwards.
    ranked = sorted(((name, likeness(name)) for name in names), key=lambda it: it[1], reverse=True)
    return [name for name, (best, _) in ranked[:MOST_SUGGESTIONS] if best >= CLOSE]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
