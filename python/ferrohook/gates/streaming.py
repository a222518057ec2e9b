"""Values of gates on their way to a client, while the request runs."""

from __future__ import annotations

import sys
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GateValues: TypeAlias = dict[str, dict[str, list[Any]]]
"""Values as JSON, by the name of the gate: `"positions"` of its tokens and the `"values"` there.

null stands for NaN; infinities, which JSON lacks, are strings.
"""


class GateStream:
    """Values of the kept gates of one sequence; each is taken once, in order of position."""

    def __init__(self) -> None:
        self._noted: dict[str, dict[int, float]] = {}
        """Values by gate and position."""
        self._next: dict[str, int] = {}
        """First position that was not taken yet, by gate."""

    def note(self, gate: str, positions: Sequence[int], values: Sequence[float]) -> None:
        """Notes values; tokens that run again after theirs were taken are ignored."""
        first = self._next.get(gate, 0)
        read = zip(positions, values, strict=True)
        self._noted.setdefault(gate, {}).update(it for it in read if it[0] >= first)

    def take_back(self, position: int) -> None:
        """Drops the values from a position on: tokens there can be noted and taken again."""
        for gate, noted in self._noted.items():
            self._noted[gate] = {at: value for at, value in noted.items() if at < position}
            self._next[gate] = min(self._next.get(gate, 0), position)

    def take(self, end: int = sys.maxsize) -> GateValues:
        """Returns the values before a position that were not taken yet."""
        found: GateValues = {}
        for gate, noted in self._noted.items():
            if positions := sorted(position for position in noted if position < end):
                values = [_for_json(noted.pop(position)) for position in positions]
                found[gate] = {"positions": positions, "values": values}
                self._next[gate] = positions[-1] + 1
        return found


def extend(values: GateValues, further: GateValues) -> None:
    """Appends further values of the same sequence."""
    for gate, lists in further.items():
        for key, each in lists.items():
            values.setdefault(gate, {}).setdefault(key, []).extend(each)


def numbers_of(values: Mapping[str, Sequence[Any]]) -> list[float]:
    """Returns the values of one gate as numbers."""
    return [float("nan") if value is None else float(value) for value in values["values"]]


def _for_json(value: float) -> float | str | None:
    if isfinite(value):
        return value
    return None if isnan(value) else "Infinity" if value > 0 else "-Infinity"
