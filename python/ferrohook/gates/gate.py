"""A gate: a number read from each token, on which hooks of a plan depend."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

from ferrohook._core import needs_prompt
from ferrohook.gates.aggregation import aggregation
from ferrohook.tokens.positions import native_at

if TYPE_CHECKING:
    from ferrohook.gates.aggregation import Aggregate, By, Over
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

    @cached_property
    def aggregate(self) -> Aggregate:
        """Makes its values from its readings."""
        return aggregation(self.over, self.by)

    @cached_property
    def counts_from_prompt(self) -> bool:
        """True if the tokens that it reads depend on the length of the prompt."""
        return self.at is not None and bool(needs_prompt(native_at(self.at)))
