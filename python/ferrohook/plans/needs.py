"""Features that a plan entry needs, and checks for back ends that support only some."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from ferrohook.captures.convert import keeps_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ferrohook.names.places import Place
    from ferrohook.plans.entries import PlanEntry

CHANGES: Final = frozenset({"add", "change"})
"""Needs of interventions: one that adds its vector, and any other."""
_HOOKS: Final = {
    *("inputs", "native detector", "not finite", "python", "route", "table", "trained"),
    "transcoder",
}
_OF_ON: Final = {"always_call", "on_error", "prepend", "priority", "with_kwargs"}
_OF_KEEP: Final = {
    *("calls", "copy", "detach", "device", "dtype", "features", "max_bytes", "slice", "stop")
}
_BOTH: Final = {"at", "at function", "cut rows", "gradients", "output_index"}
GATES: Final = frozenset({"gate", "stop when", "strength", "when"})
"""Needs of gates: reading, hooks that depend on one or have a strength, ends of requests."""
NEEDS: Final = CHANGES | GATES | _HOOKS | _OF_ON | _OF_KEEP | _BOTH
"""Every feature that an entry can need: option names, changes of interventions, and features that
follow from an option's value. A slice that does not keep all rows in place needs `cut rows`."""


def needs_at(place: Place) -> Iterator[str]:
    """Yields the features that an entry at the place of a quantity needs, see `BackEnd`."""
    if place.quantity is None:
        return
    if place.inputs:
        yield "inputs"
    if place.part is not None:
        yield "output_index"
    if place.by_keyword:
        yield "python"


@dataclasses.dataclass(frozen=True)
class BackEnd:
    """Plan entries that a back end serves: an engine, sites, or a batcher."""

    serves: frozenset[str]
    """Needs that are served, out of `NEEDS`; all others are refused."""
    reasons: Mapping[str, str]
    """Reasons for refusing needs; a need without one is named with the list of served needs."""

    def refusal(
        self, entry: PlanEntry, dim: int = 0, needs: frozenset[str] | None = None
    ) -> str | None:
        """Returns why an entry is refused, None if it is served.

        Args:
            entry: of a plan.
            dim: dimension of the rows.
            needs: its needs in a model, see `Prepared.needs`; None for the entry's own only.
        """
        refused = (entry.needs if needs is None else needs) - self.serves
        if "cut rows" not in self.serves and not keeps_rows(entry.options.get("slice", ...), dim):
            refused |= {"cut rows"}
        if not refused:
            return None
        need = min(refused, key=lambda each: (each not in self.reasons, each))
        others = f"{need} is not supported, only {', '.join(sorted(self.serves))}"
        return self.reasons.get(need, others)
