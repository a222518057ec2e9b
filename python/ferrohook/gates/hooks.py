"""Callables of prepared plans that the core calls: readers of gates."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from ferrohook._core import GateWriter, open_regions, store_readings, store_rows
from ferrohook.gates.readings import JoinedReading, reading_key
from ferrohook.gates.state import traceable
from ferrohook.util.never_trace import never_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ferrohook._core import CallTokens, Collector, GateAggregation, StopCheck
    from ferrohook.gates.gate import Gate
    from ferrohook.gates.readings import Reading
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
        aggregation: makes its values.
        place: where it reads.
        stops: the plan's stops that depend on it.
        followed: a strength follows it, so gradients go through its values.
    """

    def __init__(
        self,
        gate: Gate,
        aggregation: GateAggregation,
        place: Place,
        stops: Sequence[StopCheck],
        *,
        followed: bool = False,
    ) -> None:
        self._gate, self._aggregation, self.followed = gate, aggregation, followed
        self.writer = GateWriter(aggregation, stops)
        self.place = place
        self.number, self.places = 0, 1
        """Number of its place among those whose values are summed, and how many these are."""
        self.kept: list[int] = []
        """Captures of its values, by their indices in the plan."""
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

    def __call__(self, request: GatedRequest, vectors: Tensor, tokens: CallTokens) -> None:
        """Reads the vectors of some tokens, (tokens, ...)."""
        whole = self.summed(request, tokens, _of_place(self.place, vectors))
        if whole is not None:
            (error,) = _store([self], [(request, tokens)], self.reading(whole))
            if error is not None:
                raise error

    def summed(self, request: GatedRequest, tokens: CallTokens, vectors: Tensor) -> Tensor | None:
        """Returns the sum over the gate's places, once all have given the vectors of the tokens.

        Raises:
            HookError: another place has other tokens, or tensors of another shape.
        """
        if self.places == 1:
            return vectors
        part = vectors.to(torch.float32)
        return request.gates.add_part(self._gate.name, tokens, self.number, self.places, part)

    def note_read(self, request: GatedRequest, tokens: CallTokens) -> None:
        """Drops the vectors whose sum it has read."""
        if self.places > 1:
            request.gates.note_read(self._gate.name, tokens)

    @staticmethod
    def joined(readers: list[GateReader]) -> JoinedReaders:
        """Returns readers of several requests as one."""
        return JoinedReaders(readers)

    def keep(self, request: GatedRequest, tokens: CallTokens, device: torch.device) -> None:
        """Stores the gate's values at tokens that were read on a device, for the captures."""
        found = request.gates.values(self._aggregation, tokens)
        positions = tokens.positions
        if request.gates.stream is not None:
            request.gates.stream.note(self._gate.name, positions, found)
        values = torch.tensor(found, dtype=torch.float32, device=device)
        for capture in self.kept:
            collector = request.collector(capture, complete=False)
            rows, sequences = tokens.rows, tokens.sequences
            store_rows(collector, [(0, values)], positions, rows, sequences, repeats=True)


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
        self, vectors: Tensor, given: list[tuple[GatedRequest, CallTokens]]
    ) -> list[Exception | None]:
        """Reads the vectors of the tokens of each request, one request after the other.

        Returns:
            the exception of each request, None for one without.
        """
        errors: list[Exception | None] = [None] * len(given)
        counts = [len(tokens) for _, tokens in given]
        ends = [*accumulate(counts)]
        for members, reading in self._groups:
            own = vectors
            if len(self._groups) > 1:
                places = [it for at in members for it in range(ends[at] - counts[at], ends[at])]
                own = vectors[torch.tensor(places, device=vectors.device)]
            own = _of_place(self._readers[members[0]].place, own)
            own_counts = [counts[member] for member in members]
            if self._readers[members[0]].places > 1:
                whole = self._summed(members, own.split(own_counts), given, errors)
                own_counts = [0 if it is None else len(it) for it in whole]
                own = torch.cat([own[:0], *(it for it in whole if it is not None)])
            if not len(own):
                continue
            read = reading(own, own_counts)
            some = [at for at, count in zip(members, own_counts, strict=True) if count]
            stored = _store([self._readers[at] for at in some], [given[at] for at in some], read)
            for member, error in zip(some, stored, strict=True):
                errors[member] = error
        return errors

    def _summed(
        self,
        members: list[int],
        vectors: Sequence[Tensor],
        given: list[tuple[GatedRequest, CallTokens]],
        errors: list[Exception | None],
    ) -> list[Tensor | None]:
        """Returns the sums over the places of each member's gate, as `GateReader.summed` does."""
        found: list[Tensor | None] = []
        for member, own in zip(members, vectors, strict=True):
            request, tokens = given[member]
            whole = None
            try:
                whole = self._readers[member].summed(request, tokens, own)
            except Exception as error:  # noqa: BLE001 (the request's failure: the others go on)
                errors[member] = error
            found.append(whole)
        return found


def _store(
    readers: list[GateReader], given: list[tuple[GatedRequest, CallTokens]], read: Tensor
) -> list[Exception | None]:
    """Stores readings of the tokens of each request, one request after the other.

    Returns:
        the exception of each request, None for one without.
    """
    graphs = None
    if any(reader.followed for reader in readers) and (graph := traceable(read)).requires_grad:
        with torch.enable_grad():  # a reentrant checkpoint turns it off
            of_tokens = graph.split([len(tokens) for _, tokens in given])
            graphs = [
                [*own.unbind()] if reader.followed else None
                for reader, own in zip(readers, of_tokens, strict=True)
            ]
    writers = [reader.writer for reader in readers]
    repeat = open_regions()[1]
    again = repeat is not None and repeat.log.detached
    errors = store_readings(writers, given, read.tolist(), graphs, again=again)
    for number, reader in enumerate(readers):
        reader.note_read(*given[number])
        if reader.kept and errors[number] is None and repeat is None:
            try:
                reader.keep(*given[number], read.device)
            except Exception as error:  # noqa: BLE001 (the request's failure: the others go on)
                errors[number] = error
    return errors


def _of_place(place: Place, vectors: Tensor) -> Tensor:
    """Returns the part of a module's vectors at a place."""
    if place.multiplier != 1:
        vectors = vectors * place.multiplier
    return vectors if place.head is None else place.head.of(vectors)


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(GateReader, "__call__", "native code calls it")
never_trace(JoinedReaders, "__call__", "native code calls it")
