"""Suggestions for an unknown name."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_SUGGESTIONS = 5
CLOSE = 0.6
"""Lowest similarity of a suggestion, the default of `difflib.get_close_matches`."""


def closest_to(unknown: str, names: Iterable[str]) -> list[str]:
    """Returns the names most similar to the unknown one, by the whole or by the last segment."""
    whole = SequenceMatcher(b=unknown)
    last = SequenceMatcher(b=_last_segment(unknown))

    def similarity(name: str) -> tuple[float, float]:
        whole.set_seq1(name)
        last.set_seq1(_last_segment(name))
        return max(whole.ratio(), last.ratio()), whole.ratio()

    # Not by `get_close_matches`, which returns ties in reverse order.
    ranked = sorted(
        ((name, similarity(name)) for name in names), key=lambda it: it[1], reverse=True
    )
    return [name for name, (best, _) in ranked[:MOST_SUGGESTIONS] if best >= CLOSE]


def _last_segment(name: str) -> str:
    return name.rpartition(".")[2]
