"""Readings of a request's gates, with their gradients, and the ends of its sequences."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrohook._core import GateReadings
from ferrohook.errors import HookError
from ferrohook.gates.aggregation import recorded
from ferrohook.util.never_trace import never_trace
from ferrohook.util.unfinished import leave

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ferrohook._core import CallTokens, GateAggregation
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
        "a gate reads the sum of several places, and backward() repeats only some of them in a "
        "checkpoint, so the gradient would be wrong: pass use_reentrant=False to the checkpoint"
    )
    raise HookError(msg)


def _without_graph(part: Tensor) -> Tensor:
    """Returns vectors that keep no graph alive, and refuse the gradient that it would take."""
    found = part.detach()
    if part.requires_grad:
        found.requires_grad_().register_hook(_refuse_gradient)
    return found


class GateStates(GateReadings):
    """Readings of the gates of one request.

    Args:
        gates: the plan's gates by name, with what makes their values.
    """

    def __init__(self, gates: Mapping[str, tuple[Gate, GateAggregation]]) -> None:
        self._gates = gates
        self._parts: dict[str, dict[int, tuple[CallTokens, dict[int, Tensor]]]] = {}
        """Vectors of running calls by the name of the gate and the id of the sequences: of the
        places that have run, where a gate reads the sum of several."""
        self._summed: dict[str, tuple[CallTokens, dict[int, Tensor]]] = {}
        """Vectors of each gate's last sum, in the order in which its places ran, if gradients are
        recorded: any of them may run again, as in the backward of a checkpoint. The last one
        completes the sum again."""
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
            the sum, once all places have given theirs.

        Raises:
            HookError: another place has other tokens, or tensors of another shape.
        """
        pending, summed = self._parts.setdefault(gate, {}), self._summed.get(gate)
        given, parts = pending.get(tokens.sequences, (tokens, {}))
        if summed is not None and summed[0] == tokens and not parts:
            given, parts = summed
            completes = number == [*parts][-1]
        else:
            if number in parts:  # of a call that did not come to its end
                given, parts = tokens, {}
            completes = len(parts) == places - 1
        other = next(iter(parts.values()), vectors)
        if given != tokens or other.shape != vectors.shape:
            pending.pop(tokens.sequences, None)
            msg = (
                f"gate {gate!r} reads the sum of {places} places, whose tensors differ in shape or "
                f"tokens: {tuple(vectors.shape)} and {tuple(other.shape)}"
            )
            raise HookError(msg)
        parts[number] = vectors
        if not completes:
            if len(parts) < places:
                leave(pending, tokens.sequences, (given, parts))
            return None
        pending.pop(tokens.sequences, None)
        whole = parts[0]
        for each in range(1, places):
            whole = whole + parts[each].to(whole.device)
        self._summed.pop(gate, None)
        if torch.is_grad_enabled() or any(part.requires_grad for part in parts.values()):
            self._summed[gate] = tokens, {at: _without_graph(part) for at, part in parts.items()}
        return whole

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
