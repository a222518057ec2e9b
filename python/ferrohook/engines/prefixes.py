"""Prefixes of requests that a cache may share, up to what a plan changes or reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ferrohook.gates.conditions import Ramp
from ferrohook.plans.entries import GateEntry, HookEntry, KeepEntry, gates_of
from ferrohook.tokens.positions import first_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ferrohook.engines.model.cache_reach import CacheReach
    from ferrohook.engines.model.modules import ModuleTable
    from ferrohook.gates.gate import Gate
    from ferrohook.plans import Plan


class Prefix(NamedTuple):
    """Positions from which a plan takes part in its request."""

    changed: int | None
    """The first one whose keys and values may differ from those without the plan; None if none
    does. Blocks that end before it are the same for every request."""
    read: int | None
    """The first one whose rows the plan has to see, so that it must run; None if there is none."""
    gated: int | None
    """The first one that a gate reads; None if there is none. A gate must read all rows itself,
    while answers to one prompt may share its captures."""


def prefix_of(plan: Plan, prompt: int, modules: ModuleTable, reach: CacheReach) -> Prefix:
    """Returns where a plan first changes and first reads a request.

    - `on` changes from its first position on, and with `when` or `strength` not before its gates
      have values: with `over="prompt"` from the last token of the prompt on, with `lag=1` from the
      first generated token on. After the last attention it changes no keys and values, but the
      hidden states that the check of a step sees.
    - `keep` and gates read from their first position on. `keep("@gate.NAME")` and `stop` read what
      their gates read.

    Args:
        plan: the plan, rewritten.
        prompt: length of the request's prompt.
        modules: modules of the model.
        reach: which of their changes reach keys and values.
    """
    gates = gates_of(plan.entries)
    changes = [
        (first, reach.includes(entry, modules))
        for entry in plan.entries
        if isinstance(entry, HookEntry)
        and (first := _first_change(entry, gates, prompt)) is not None
    ]
    changed = None
    if any(reaches for _, reaches in changes):
        changed = min(first for first, _ in changes) if reach.causal else 0
    reading = [it for it in plan.entries if isinstance(it, GateEntry | KeepEntry) and it.has_places]
    gates_read = [it for it in reading if isinstance(it, GateEntry)]
    read, gated = (
        _earliest(first_of(it.at, prompt) for it in found) for found in (reading, gates_read)
    )
    return Prefix(changed, read, gated)


def _first_change(entry: HookEntry, gates: Mapping[str, Gate], prompt: int) -> int | None:
    """Returns the first position that an entry may change; None if there is none."""
    needed = [first_of(entry.at, prompt)]
    when, strength = entry.options.get("when"), entry.options.get("strength")
    if when is not None:  # may be true as soon as one of its gates has a value
        needed.append(_earliest(_first_value(gates[name], prompt) for name in when.gates()))
    if isinstance(strength, Ramp):
        needed.append(_first_value(gates[strength.gate], prompt))
    known = [position for position in needed if position is not None]
    return max(known) if len(known) == len(needed) else None


def _first_value(gate: Gate, prompt: int) -> int | None:
    """Returns the first position at which a gate may have a value; None if it has none."""
    read = first_of(gate.at, prompt)
    if read is None:
        return None
    if gate.over == "prompt":
        return prompt - 1
    return max(read, prompt) if gate.lag else read


def _earliest(positions: Iterable[int | None]) -> int | None:
    return min((it for it in positions if it is not None), default=None)
