"""A gate: a number read from each token, on which hooks of a plan depend."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ferrohook._core import GateAggregation
from ferrohook.tokens.positions import native_at

if TYPE_CHECKING:
    from ferrohook.gates.aggregation import By, Over
    from ferrohook.gates.readings import Reading
    from ferrohook.tokens.positions import At


@dataclasses.dataclass(frozen=True, eq=False)
class Gate:
    """A gate without its place; see `gate` for its arguments."""

    name: str
    reading: Reading
    at: At
    over: Over
    by: By
    lag: int

    def aggregation(self) -> GateAggregation:
        """Returns what makes its values from its readings."""
        at = None if self.at is None else native_at(self.at)
        return GateAggregation(self.name, at, self.over, self.by, self.lag)
