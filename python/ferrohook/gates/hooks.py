"""Callables of prepared plans that the core calls: a gate's reader, and the choice of tokens."""

from __future__ import annotations

import copy
from itertools import accumulate, repeat
from math import isnan
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from ferrohook._core import store_rows
from ferrohook.gates.readings import JoinedReading, reading_key
from ferrohook.gates.state import GateTokens
from ferrohook.util.never_trace import never_trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrohook._core import Collector
    from ferrohook.gates.conditions import Condition, Ramp
    from ferrohook.gates.gate import Gate
    from ferrohook.gates.readings import Reading
    from ferrohook.gates.state import GateStates
    from ferrohook.gates.stops import StopCheck
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
        self.place = place
        self.number, self.places = 0, 1
        """Number of its place among those whose values are summed, and how many these are."""
        self.kept: list[int] = []
        """Captures of its values, by their indices in the plan."""
        self.stops: list[StopCheck] = []
        """Those of the plan that depend on it."""
        self.__qualname__ = f"gate {gate.name!r}"

    @property
    def reading(self) -> Reading:
        """Reading of its gate."""
        return self._gate.reading

    def at(self, places: Sequence[Place]) -> list[Self]:
        """Returns a reader for each of several places, whose values are summed."""
        readers = [copy.copy(self) for _ in places]
        for number, (reader, place) in enumerate(zip(readers, places, strict=True)):
            reader.place, reader.number, reader.places = place, number, len(places)
        return readers

    def __call__(self, request: GatedRequest, vectors: Tensor, given: tuple[Any, ...]) -> None:
        """Reads the vectors of some tokens, (tokens, ...)."""
        tokens = GateTokens(*given)
        whole = self.summed(request, tokens, _of_place(self.place, vectors))
        if whole is not None:
            read = self.reading(whole)
            graph = read if read.requires_grad else None
            self.store(request, tokens, read.tolist(), read.device, graph)

    def summed(self, request: GatedRequest, tokens: GateTokens, vectors: Tensor) -> Tensor | None:
        """Returns the sum over the gate's places, once all have given the vectors of the tokens.

        Raises:
            HookError: another place has other tokens, or tensors of another shape.
        """
        if self.places == 1:
            return vectors
        part = vectors.to(torch.float32)
        return request.gates.add_part(self._gate, tokens, self.number, self.places, part)

    @staticmethod
    def joined(readers: list[GateReader]) -> JoinedReaders:
        """Returns readers of several requests as one."""
        return JoinedReaders(readers)

    def store(
        self,
        request: GatedRequest,
        tokens: GateTokens,
        readings: list[float],
        device: torch.device,
        graph: Tensor | None,
    ) -> None:
        """Stores readings.

        Args:
            request: the tokens' request.
            tokens: the tokens.
            readings: of each.
            device: on which they were read.
            graph: the same with their gradient, if there is one.

        Raises:
            HookError: see `GateStates.add`.
        """
        request.gates.add(self._gate, tokens, readings, graph if self._followed else None)
        for check in self.stops:
            check(request.gates, tokens)
        if not self.kept:
            return
        found = request.gates.values(self._gate, tokens)
        if request.gates.stream is not None:
            request.gates.stream.note(self._gate.name, tokens.positions, found)
        values = torch.tensor(found, dtype=torch.float32, device=device)
        for capture in self.kept:
            collector = request.collector(capture, complete=False)
            store_rows(collector, [(0, values)], tokens.positions, tokens.rows, tokens.sequences)


class JoinedReaders:
    """Readers of several requests that read the same part of a module's value at once."""

    def __init__(self, readers: list[GateReader]) -> None:
        self._readers = readers
        groups: dict[Any, list[int]] = {}
        for number, reader in enumerate(readers):
            place = reader.place
            key = (place.head, place.multiplier, reader.places > 1, reading_key(reader.reading))
            groups.setdefault(key, []).append(number)
        self._groups = [
            (members, JoinedReading([readers[member].reading for member in members]))
            for members in groups.values()
        ]

    def __call__(
        self, vectors: Tensor, given: list[tuple[GatedRequest, tuple[Any, ...]]]
    ) -> list[Exception | None]:
        """Reads the vectors of the tokens of each request, one request after the other.

        Returns:
            the exception of each request, None for one without.
        """
        tokens = [GateTokens(*of_request) for _, of_request in given]
        counts = [len(each.rows) for each in tokens]
        ends = [*accumulate(counts)]
        errors: list[Exception | None] = [None] * len(given)
        for members, reading in self._groups:
            own = vectors
            if len(self._groups) > 1:
                places = [it for at in members for it in range(ends[at] - counts[at], ends[at])]
                own = vectors[torch.tensor(places, device=vectors.device)]
            own = _of_place(self._readers[members[0]].place, own)
            own_counts = [counts[member] for member in members]
            if self._readers[members[0]].places > 1:
                whole = self._summed(members, own.split(own_counts), given, tokens, errors)
                own_counts = [0 if it is None else len(it) for it in whole]
                own = torch.cat([own[:0], *(it for it in whole if it is not None)])
            if not len(own):
                continue
            read = reading(own, own_counts)
            readings, start = read.tolist(), 0
            graphs = read.split(own_counts) if read.requires_grad else repeat(None)
            for member, count, graph in zip(members, own_counts, graphs, strict=False):
                if not count:
                    continue
                found = readings[start : (start := start + count)]
                try:
                    store = self._readers[member].store
                    store(given[member][0], tokens[member], found, read.device, graph)
                except Exception as error:  # noqa: BLE001 (the request's failure: the others go on)
                    errors[member] = error
        return errors

    def _summed(
        self,
        members: list[int],
        vectors: Sequence[Tensor],
        given: list[tuple[GatedRequest, tuple[Any, ...]]],
        tokens: list[GateTokens],
        errors: list[Exception | None],
    ) -> list[Tensor | None]:
        """Returns the sums over the places of each member's gate, as `GateReader.summed` does."""
        found: list[Tensor | None] = []
        for member, own in zip(members, vectors, strict=True):
            whole = None
            try:
                summed = self._readers[member].summed
                whole = summed(given[member][0], tokens[member], own)
            except Exception as error:  # noqa: BLE001 (the request's failure: the others go on)
                errors[member] = error
            found.append(whole)
        return found


def _of_place(place: Place, vectors: Tensor) -> Tensor:
    """Returns the part of a module's vectors at a place."""
    if place.multiplier != 1:
        vectors = vectors * place.multiplier
    return vectors if place.head is None else place.head.of(vectors)


class TokenChoice:
    """Chooses the tokens that a hook changes, by its condition, and its strength there.

    Args:
        gates: the plan's gates by name.
        when: the condition; None for none.
        follows: strength that follows a gate; None for none.
    """

    def __init__(
        self, gates: Mapping[str, Gate], when: Condition | None, follows: Ramp | None
    ) -> None:
        self._gates, self._when, self._follows = gates, when, follows

    def __call__(
        self, request: GatedRequest, given: tuple[Any, ...]
    ) -> tuple[list[bool], Tensor | None]:
        """Returns which of some tokens are changed, and the strengths if they follow a gate."""
        acts, strengths = self.decide(request, GateTokens(*given))
        if isinstance(strengths, list):
            strengths = torch.tensor(strengths, dtype=torch.float32)
        return acts, strengths

    def decide(
        self, request: GatedRequest, tokens: GateTokens
    ) -> tuple[list[bool], list[float] | Tensor | None]:
        """Returns the same; strengths as a tensor if they have a gradient.

        Raises:
            HookError: see `GateStates.values`.
        """

        def values_of(name: str) -> list[float]:
            return request.gates.values(self._gates[name], tokens)

        if self._when is None:
            acts = [True] * len(tokens.rows)
        else:
            acts = [each is True for each in self._when.at(values_of)]
        if self._follows is None:
            return acts, None
        values = values_of(self._follows.gate)
        acts = [each and not isnan(value) for each, value in zip(acts, values, strict=True)]
        if torch.is_grad_enabled():
            gate = self._gates[self._follows.gate]
            graph = request.gates.graph_of(gate, tokens, values)
            if graph is not None:
                strengths = self._follows.of_tensor(graph)
                # Tokens that are not changed have no gradient.
                return acts, strengths.where(torch.tensor(acts, device=graph.device), 0.0)
        # An unknown one is not used, and NaN would reach gradients.
        known = [0.0 if isnan(value) else value for value in values]
        return acts, self._follows.of(known)


def decide_together(
    hooks: list[tuple[TokenChoice | None, float | None, GatedRequest, tuple[Any, ...]]],
) -> tuple[list[bool], Tensor | None, list[Exception | None]]:
    """Chooses the tokens that hooks of several requests change, and their strengths there.

    Args:
        hooks: choice, constant strength, request and tokens of each hook.

    Returns:
        for the tokens of all, one hook after the other, whether each is changed; their strengths,
        None where all are changed all the way; and the exception of each hook, if it had one.
    """
    acts: list[bool] = []
    strengths: list[list[float] | Tensor] = []
    errors: list[Exception | None] = []
    partial = False
    for choice, strength, request, given in hooks:
        found, error = None, None
        try:
            if choice is None:
                chosen = [True] * len(given[0])
            else:
                chosen, found = choice.decide(request, GateTokens(*given))
        except Exception as raised:  # noqa: BLE001 (the request's failure: the others go on)
            chosen, error = [False] * len(given[0]), raised
        partial = partial or found is not None or strength is not None
        acts += chosen
        errors.append(error)
        if found is None:
            found = [1.0 if strength is None else strength] * len(chosen)
        strengths.append(found)
    if not partial:
        return acts, None, errors
    recorded = next((each for each in strengths if isinstance(each, Tensor)), None)
    if recorded is None:
        flat = [each for of_hook in strengths for each in of_hook]
        return acts, torch.tensor(flat, dtype=torch.float32), errors
    together = torch.cat(
        [torch.as_tensor(each, dtype=torch.float32).to(recorded.device) for each in strengths]
    )
    return acts, together, errors


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(GateReader, "__call__", "native code calls it")
never_trace(JoinedReaders, "__call__", "native code calls it")
never_trace(TokenChoice, "__call__", "native code calls it")
