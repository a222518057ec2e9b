"""Callables of prepared plans that the core calls: a gate's reader, and the choice of tokens."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from ferrohook._core import store_rows
from ferrohook.gates.conditions import Condition, Ramp, Values
from ferrohook.gates.state import GateTokens
from ferrohook.util.never_trace import never_trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from ferrohook._core import Collector
    from ferrohook.gates.gate import Gate
    from ferrohook.gates.state import GateStates
    from ferrohook.names.places import Place


class GatedRequest(Protocol):
    """A request whose plan has gates."""

    gates: GateStates

    def collector(self, capture: int, *, complete: bool = True) -> Collector:
        """Returns the collector of one of the plan's captures."""
        ...


class GateReader:
    """Reads the tokens of a call for a gate, and stores its values for the plan's captures.

    Args:
        gate: the gate.
        place: where it reads.
        followed: a strength follows it, so gradients go through its values.
    """

    def __init__(self, gate: Gate, place: Place, *, followed: bool = False) -> None:
        self._gate, self._followed = gate, followed
        self._head, self._multiplier = place.head, place.multiplier
        self.kept: list[int] = []
        """Captures of its values, by their indices in the plan."""
        self.__qualname__ = f"gate {gate.name!r}"

    def __call__(self, request: GatedRequest, vectors: Tensor, given: tuple[Any, ...]) -> None:
        """Reads the vectors of some tokens, (tokens, ...)."""
        tokens = GateTokens(*given)
        if self._multiplier != 1:
            vectors = vectors * self._multiplier
        if self._head is not None:
            vectors = self._head.of(vectors)
        readings = self._gate.reading(vectors)
        request.gates.add(self._gate, tokens, readings if self._followed else readings.detach())
        if not self.kept:
            return
        values, known = request.gates.values(self._gate, tokens)
        values = values.detach().masked_fill(~known, float("nan"))
        for capture in self.kept:
            collector = request.collector(capture, complete=False)
            store_rows(collector, [(0, values)], tokens.positions, tokens.rows, tokens.sequences)


class TokenChoice:
    """Chooses the tokens that a hook changes, by its condition, and its strength there.

    Args:
        gates: the plan's gates by name.
        when: the condition; None for none.
        strength: a number, a ramp, or None for all the way.
    """

    def __init__(
        self,
        gates: Mapping[str, Gate],
        when: Condition | None,
        strength: float | Ramp | None,
    ) -> None:
        self._gates, self._when, self._strength = gates, when, strength

    def __call__(
        self, request: GatedRequest, given: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Returns which of some tokens are changed, and the strengths; None if none is."""
        tokens = GateTokens(*given)
        device: torch.device | None = None

        @functools.cache
        def values_of(name: str) -> Values:
            nonlocal device
            values, known = request.gates.values(self._gates[name], tokens)
            device = device or values.device  # gates may read on several
            return Values(values.to(device), known.to(device))

        acts = None if self._when is None else self._when.at(values_of).true
        strengths = None
        if isinstance(self._strength, Ramp):
            values, known = values_of(self._strength.gate)
            strengths = self._strength.of(values)
            acts = known if acts is None else acts & known
        if acts is None or (acts.is_cpu and not bool(acts.any())):
            return None
        return acts, strengths


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(GateReader, "__call__", "native code calls it")
never_trace(TokenChoice, "__call__", "native code calls it")
