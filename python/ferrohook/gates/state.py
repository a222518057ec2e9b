"""Readings of a request's gates, with their gradients, and the ends of its sequences."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ferrohook._core import GateReadings, open_regions
from ferrohook.errors import HookError
from ferrohook.gates.aggregation import recorded
from ferrohook.util.never_trace import never_trace
from ferrohook.util.unfinished import leave

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ferrohook._core import CallTokens, ForwardLog, GateAggregation, Repeat
    from ferrohook.gates.conditions import Ramp
    from ferrohook.gates.gate import Gate
    from ferrohook.gates.streaming import GateStream


class Stopped(NamedTuple):
    """End of a sequence whose plan has a `stop`."""

    gate: str
    """Name of the gate; of several, with commas between them."""
    position: int
    """Position of the token at which the condition was true: the last one of the answer, or of
    the prompt."""
    row: int
    """Row of the sequence in its call."""


def _refuse_gradient(_gradient: Tensor) -> None:
    msg = (
        "a strength follows a gate that does not read in the same reentrant checkpoint, so the "
        "gradient would be wrong: pass use_reentrant=False to the checkpoint"
    )
    raise HookError(msg)


def _refusing(values: Tensor) -> Tensor:
    """Returns values that keep no graph alive, and refuse the gradient that it would take."""
    found = values.detach().requires_grad_()
    found.register_hook(_refuse_gradient)
    return found


def traceable(values: Tensor) -> Tensor:
    """Returns values that refuse a gradient if a reentrant checkpoint does not record theirs."""
    if values.requires_grad or not any(log.detached for log in open_regions()[0]):
        return values
    return _refusing(values)


class _Sum:
    """Vectors of the places of a gate that have run in a call, or in its repeat.

    Args:
        tokens: of the call.
        first: number of the place that ran first.
        outside: vectors of the places that a repeat does not run.
    """

    def __init__(self, tokens: CallTokens, first: int, outside: Mapping[int, Tensor]) -> None:
        self.tokens, self.first = tokens, first
        self.parts: dict[int, tuple[Tensor, list[ForwardLog]]] = {
            number: (vectors, []) for number, vectors in outside.items()
        }
        """Vectors by the number of the place, with the checkpoints that they were taken in."""
        self.read = False
        """True once the sum was read, and its parts dropped."""

    def without(self, log: ForwardLog) -> dict[int, Tensor]:
        """Returns the vectors, without graph, that were taken outside of a checkpoint."""
        return {
            number: _refusing(vectors) if vectors.requires_grad else vectors
            for number, (vectors, logs) in self.parts.items()
            if log not in logs
        }


class _Outside(NamedTuple):
    """Vectors with which a repeated checkpoint completes a sum."""

    gate: str
    tokens: CallTokens
    parts: dict[int, Tensor]


class GateStates(GateReadings):
    """Readings of the gates of one request.

    Args:
        gates: the plan's gates by name, with what makes their values.
    """

    def __init__(self, gates: Mapping[str, tuple[Gate, GateAggregation]]) -> None:
        self._gates = gates
        self._sums: dict[str, dict[int, _Sum]] = {}
        """Running calls of gates that read the sum of several places, by the name of the gate and
        the id of the sequences."""
        self._repeated: WeakKeyDictionary[Repeat, dict[str, dict[int, _Sum]]] = WeakKeyDictionary()
        """The same in repeats of checkpoints."""
        self._outside: WeakKeyDictionary[ForwardLog, list[_Outside]] = WeakKeyDictionary()
        """Sums that each checkpoint completed, and completes again when it is repeated."""
        self.stream: GateStream | None = None
        """Takes the values of kept gates of the only sequence, for a client that reads along."""

    def add_part(
        self, gate: str, tokens: CallTokens, number: int, places: int, vectors: Tensor
    ) -> Tensor | None:
        """Adds the vectors of one of the places whose sum a gate reads.

        Args:
            gate: its name.
            tokens: the tokens.
            number: of the place.
            places: how many there are.
            vectors: of the tokens there, float32.

        Returns:
            the sum, once all places have given theirs. It is [read](GateStates.note_read) once.

        Raises:
            HookError: another place has other tokens, or tensors of another shape.
        """
        logs, repeat = open_regions()
        sums = self._sums_of(gate, repeat)
        found = sums.get(tokens.sequences)
        if found is None or number == found.first or (found.read and found.tokens != tokens):
            outside = {} if repeat is None else self._outside_of(repeat.log, gate, tokens)
            if outside is None:
                return None
            found = _Sum(tokens, number, outside)
            leave(sums, tokens.sequences, found)
        elif found.read:  # a batch may run the hooks of a call again, member by member
            return None
        vectors = traceable(vectors)
        other = next((part for part, _ in found.parts.values()), vectors)
        if found.tokens != tokens or other.shape != vectors.shape:
            sums.pop(tokens.sequences, None)
            msg = (
                f"gate {gate!r} reads the sum of {places} places, whose tensors differ in shape or "
                f"tokens: {tuple(vectors.shape)} and {tuple(other.shape)}"
            )
            raise HookError(msg)
        found.parts[number] = vectors, logs
        if len(found.parts) < places:
            return None
        for log in logs:
            completed = _Outside(gate, tokens, found.without(log))
            self._outside.setdefault(log, []).append(completed)
        whole, _ = found.parts[0]
        for each in range(1, places):
            whole = whole + found.parts[each][0].to(whole.device)
        return whole

    def note_read(self, gate: str, tokens: CallTokens) -> None:
        """Drops the vectors of a sum, whose reading is stored."""
        found = self._sums_of(gate, open_regions()[1]).get(tokens.sequences)
        if found is not None:
            found.read = True
            found.parts.clear()

    def _sums_of(self, gate: str, repeat: Repeat | None) -> dict[int, _Sum]:
        sums = self._sums if repeat is None else self._repeated.setdefault(repeat, {})
        return sums.setdefault(gate, {})

    def _outside_of(
        self, log: ForwardLog, gate: str, tokens: CallTokens
    ) -> dict[int, Tensor] | None:
        """Returns the vectors of the places outside of a checkpoint that completed a sum."""
        for each in self._outside.get(log, ()):
            if each.gate == gate and each.tokens == tokens:
                return each.parts
        return None

    def stopped(self, sequences: int | None = None) -> list[Stopped]:
        """Returns the ends of sequences, in order of their rows.

        Args:
            sequences: id of the sequences; None for all.
        """
        return [Stopped(*each) for each in self.ends(sequences)]

    def recorded_strengths(
        self, ramp: Ramp, tokens: CallTokens, values: Sequence[float], acts: Sequence[bool]
    ) -> Tensor | None:
        """Returns strengths with their gradient, float32, (tokens,).

        Args:
            ramp: which gate they follow, and how.
            tokens: the tokens.
            values: of the gate at the tokens, NaN where they are unknown.
            acts: which tokens are changed; others have no gradient.

        Returns:
            None if no reading of the values has a gradient.
        """
        gate, aggregation = self._gates[ramp.gate]
        found: list[Tensor] = []
        start = 0
        for readings, graphs, counts in self.made_of(aggregation, tokens):
            own = values[start : (start := start + len(counts))]
            plain = torch.tensor(
                [0.0 if isnan(it) else it for it in own], dtype=torch.float32, device="cpu"
            )
            some = next((each for each in graphs if each is not None), None)
            if some is None:
                found.append(plain)
                continue
            zero = some.new_zeros(())
            graph = torch.stack([zero if it is None else it.to(zero.device) for it in graphs])
            places_known = [place for place, count in enumerate(counts) if count]
            known = [counts[place] for place in places_known]
            value = recorded(gate.over, gate.by, readings, graph, known)
            # Zeros with a gradient: the host found the values.
            index = torch.tensor(places_known, device=value.device)
            changes = value.new_zeros(len(counts)).index_copy(
                0, index, (value - value.detach()).nan_to_num()
            )
            found.append(plain.to(value.device) + changes)
        if not any(each.requires_grad for each in found):
            return None
        device = next(each.device for each in found if each.requires_grad)
        strengths = ramp.of_tensor(torch.cat([each.to(device) for each in found]))
        return strengths.where(torch.tensor(acts, device=device), 0.0)


never_trace(GateStates, "recorded_strengths", "native code calls it")
