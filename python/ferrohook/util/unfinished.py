"""Values that a call leaves at one place for another that runs later in the same call."""

from __future__ import annotations

from typing import Final, TypeVar

T = TypeVar("T")
_MOST: Final = 64
"""Calls of a request at a time between two places."""


def leave(values: dict[int, T], sequences: int, value: T) -> None:
    """Leaves a value under the id of a call's sequences, and drops those of calls that ended early.

    Args:
        values: the values that wait, the oldest first.
        sequences: id of the call's sequences.
        value: the value.
    """
    values[sequences] = value
    for each in [*values][:-_MOST]:
        values.pop(each, None)
