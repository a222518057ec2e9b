"""Readings of a request's gates, by the position of their tokens, and the values made of them."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from itertools import pairwise
from math import isnan
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ferrohook._core import places_at
from ferrohook.errors import HookError
from ferrohook.gates.aggregation import Window, recorded
from ferrohook.tokens.positions import native_at

if TYPE_CHECKING:
    from torch import Tensor

    from ferrohook.gates.gate import Gate
    from ferrohook.gates.streaming import GateStream

_MOST_SEQUENCES: Final = 64
"""Calls without a common KV cache whose readings a request stores for each gate."""


class GateTokens(NamedTuple):
    """Tokens of a call, as the core gives them, in the order of memory."""

    rows: list[int]
    """Row of each in the request."""
    positions: list[int]
    """Position of each."""
    sequences: int
    """Id of their sequences: calls with the same one run tokens of the same sequences."""
    prompts: list[int] | None
    """Length of the prompt of each row, or one for all; None if they are not known."""

    def prompt(self, row: int) -> int | None:
        """Returns the length of the prompt of a row; None if it is not known."""
        if not self.prompts:
            return None
        return self.prompts[row if len(self.prompts) > 1 else 0]

    def from_last_prompt(self) -> GateTokens:
        """Returns those from the last token of each prompt on; all where that is not known."""
        kept = [
            place
            for place, (row, position) in enumerate(zip(self.rows, self.positions, strict=True))
            if position >= (self.prompt(row) or 1) - 1
        ]
        rows, positions = ([of_all[it] for it in kept] for of_all in (self.rows, self.positions))
        return self._replace(rows=rows, positions=positions)


class Stopped(NamedTuple):
    """End of a sequence whose plan has a `stop`."""

    gate: str
    """Name of the gate; of several, with commas between them."""
    position: int
    """Position of the token at which the condition was true: the last one of the answer, or of
    the prompt."""
    row: int
    """Row of the sequence in its call."""


class UnreadError(HookError):
    """A gate has not read the tokens yet that its value depends on."""


class _Row:
    """Readings of one sequence."""

    __slots__ = ("complete", "counting", "graphs", "positions", "prompt", "readings", "running")

    def __init__(self) -> None:
        self.positions: list[int] = []
        """Ascending."""
        self.readings: list[float] = []
        """One for each position."""
        self.running: list[float] = []
        """Maximum, minimum, sum or average after each of the first readings, see `Aggregate`."""
        self.graphs: dict[int, Tensor] = {}
        """Readings by position that have a gradient: float32, ()."""
        self.counting = 0
        """Number of the first readings that the gate is known to count."""
        self.complete = 0
        """Tokens before this position that the gate counts are known to have been read."""
        self.prompt: int | None = None
        """Length of the prompt with which that was found."""

    def add(self, positions: list[int], readings: list[float]) -> None:
        """Stores readings; `positions`: ascending. A token that runs again keeps its first one."""
        if not self.positions or positions[0] > self.positions[-1]:
            self.positions += positions
            self.readings += readings
            return
        stored = dict(zip(positions, readings, strict=True))
        stored |= zip(self.positions, self.readings, strict=True)
        if len(stored) > len(self.positions):
            # Readings before others: later values have changed.
            self._restart()
            self.positions = sorted(stored)
            self.readings = [stored[position] for position in self.positions]

    def take_back(self, position: int) -> None:
        """Drops the readings from a position on."""
        end = bisect_left(self.positions, position)
        if end < len(self.positions):
            del self.positions[end:], self.readings[end:]
            self._restart()
            self.graphs = {at: graph for at, graph in self.graphs.items() if at < position}
        self.complete = min(self.complete, position)

    def _restart(self) -> None:
        """Forgets what was computed from the readings."""
        self.running.clear()
        self.counting = 0

    def count(self, start: int, end: int) -> int:
        """Returns how many tokens from one position up to another were read."""
        if start >= end:
            return 0
        return bisect_left(self.positions, end) - bisect_left(self.positions, start)

    def counted(self, gate: Gate, prompt: int | None) -> tuple[list[int], list[float]]:
        """Returns the positions that a gate counts, with their readings.

        They differ from the stored ones after a further turn, whose prompt is another.
        """
        if self.prompt != prompt:
            if self.prompt is not None:
                self.complete = 0
                self._restart()
            self.prompt = prompt
        if gate.at is None or not gate.counts_from_prompt:
            return self.positions, self.readings
        new = self.positions[self.counting :]
        if len(places_at(native_at(gate.at), new, prompt)) == len(new):
            self.counting = len(self.positions)
            return self.positions, self.readings
        places = places_at(native_at(gate.at), self.positions, prompt)
        return [self.positions[it] for it in places], [self.readings[it] for it in places]


class GateStates:
    """Readings of the gates of one request."""

    def __init__(self) -> None:
        # Recursive, as a finaliser may run while it is held.
        self._lock = threading.RLock()
        self._rows: dict[str, dict[int, dict[int, _Row]]] = {}
        """By the name of the gate, the id of the sequences and the row."""
        self._parts: dict[tuple[str, int], tuple[GateTokens, dict[int, Tensor]]] = {}
        """Vectors of the running call by the name of the gate and the id of the sequences: of the
        places that have run, where a gate reads the sum of several."""
        self._stopped: dict[tuple[int, int], Stopped] = {}
        """By the id of the sequences and the row."""
        self.stream: GateStream | None = None
        """Takes the values of kept gates of the only sequence, for a client that reads along."""

    def _sequences(self, gate: str, number: int) -> dict[int, _Row]:
        if (of_gate := self._rows.get(gate)) and len(of_gate) == 1 and number in of_gate:
            return of_gate[number]
        with self._lock:
            of_gate = self._rows.setdefault(gate, {})
            found = of_gate.pop(number, None)
            of_gate[number] = found = {} if found is None else found  # the last used one is last
            if len(of_gate) > _MOST_SEQUENCES:
                del of_gate[next(iter(of_gate))]
            return found

    def add_part(
        self, gate: Gate, tokens: GateTokens, number: int, places: int, vectors: Tensor
    ) -> Tensor | None:
        """Adds the vectors of one of the places whose sum a gate reads.

        Args:
            gate: the gate.
            tokens: the tokens.
            number: of the place.
            places: how many there are.
            vectors: of the tokens there, float32.

        Returns:
            the sum, once all places have given theirs.

        Raises:
            HookError: another place has other tokens, or tensors of another shape.
        """
        key = (gate.name, tokens.sequences)
        given, parts = self._parts.get(key, (tokens, {}))
        if number in parts:  # of a call that did not come to its end
            given, parts = tokens, {}
        other = next(iter(parts.values()), vectors)
        if given != tokens or other.shape != vectors.shape:
            self._parts.pop(key)
            msg = (
                f"gate {gate.name!r} reads the sum of {places} places, whose tensors differ in "
                f"shape or tokens: {tuple(vectors.shape)} and {tuple(other.shape)}"
            )
            raise HookError(msg)
        parts[number] = vectors
        if len(parts) < places:
            self._parts[key] = (given, parts)
            return None
        self._parts.pop(key, None)
        whole = parts[0]
        for each in range(1, places):
            whole = whole + parts[each].to(whole.device)
        return whole

    def add(
        self, gate: Gate, tokens: GateTokens, readings: list[float], graph: Tensor | None = None
    ) -> None:
        """Stores readings of the tokens of a call.

        Args:
            gate: the gate that read them.
            tokens: the tokens.
            readings: of each.
            graph: the same with their gradient, (tokens,), if there is one.

        Raises:
            HookError: one is NaN, or a position stands twice in a row of the call.
        """
        rows = self._sequences(gate.name, tokens.sequences)
        for row, places in _by_row(tokens.rows):
            positions, own = tokens.positions[places], readings[places]
            if len(positions) > 1 and not all(one < next_ for one, next_ in pairwise(positions)):
                order = sorted(range(len(positions)), key=positions.__getitem__)
                positions, own = [positions[it] for it in order], [own[it] for it in order]
                _check_once(gate, positions)
            if any(map(isnan, own)):
                position = next(at for at, it in zip(positions, own, strict=True) if isnan(it))
                msg = f"gate {gate.name!r} is NaN at position {position}"
                raise HookError(msg)
            if (state := rows.get(row)) is None:
                state = rows[row] = _Row()
            state.add(positions, own)
            if graph is not None:
                each = graph[places].unbind()
                for position, of_token in zip(tokens.positions[places], each, strict=True):
                    state.graphs.setdefault(position, of_token)

    def take_back(self, position: int, sequences: int) -> None:
        """Drops the readings of some sequences from a position on: of drafts that were rejected."""
        with self._lock:
            found = [of_gate.get(sequences, {}) for of_gate in self._rows.values()]
            self._stopped = {
                key: stopped
                for key, stopped in self._stopped.items()
                if key[0] != sequences or stopped.position < position
            }
        for rows in found:
            for row in [*rows.values()]:
                row.take_back(position)

    def stop(self, sequences: int, stopped: Stopped, prompt: int | None) -> None:
        """Notes that a sequence has ended; the first end after its prompt counts.

        Args:
            sequences: id of the sequences.
            stopped: the end.
            prompt: length of the prompt; None if it is not known.
        """
        with self._lock:
            known = self._stopped.get((sequences, stopped.row))
            last = (prompt or 1) - 1
            if known is None or not last <= known.position <= stopped.position:
                self._stopped[sequences, stopped.row] = stopped

    def stopped(self, sequences: int | None = None) -> list[Stopped]:
        """Returns the ends of sequences, in order of their rows.

        Args:
            sequences: id of the sequences; None for all.
        """
        with self._lock:
            found = [it for (key, _), it in self._stopped.items() if sequences in {None, key}]
        return sorted(found, key=lambda it: it.row)

    def values(self, gate: Gate, tokens: GateTokens) -> list[float]:
        """Returns the values of a gate at the tokens of a call; NaN where one is unknown.

        Raises:
            HookError: tokens that the value depends on were not read, or the length of a prompt is
                needed and not known.
        """
        rows = self._sequences(gate.name, tokens.sequences)
        values: list[float] = []
        for row, places in _by_row(tokens.rows):
            state = rows.get(row) or _Row()
            _, readings, counts = _counts(gate, state, tokens.positions[places], tokens.prompt(row))
            values += gate.aggregate(readings, counts, state.running)
        return values

    def graph_of(self, gate: Gate, tokens: GateTokens, values: list[float]) -> Tensor | None:
        """Returns values with their gradient, float32, (tokens,), 0 where one is unknown.

        Args:
            gate: the gate.
            tokens: the tokens.
            values: at the tokens.

        Returns:
            None if no reading of them has a gradient.
        """
        rows = self._sequences(gate.name, tokens.sequences)
        found: list[Tensor] = []
        for row, places in _by_row(tokens.rows):
            state = rows.get(row) or _Row()
            positions = tokens.positions[places]
            own = [0.0 if isnan(value) else value for value in values[places]]
            plain = torch.tensor(own, dtype=torch.float32)
            read, readings, counts = _counts(gate, state, positions, tokens.prompt(row))
            read, readings = read[: max(counts)], readings[: max(counts)]
            graphs = [state.graphs.get(position) for position in read]
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
        return torch.cat([each.to(device) for each in found])


def _check_once(gate: Gate, positions: list[int]) -> None:
    """Validates that no position stands twice; ascending.

    Raises:
        HookError: one does.
    """
    if twice := [one for one, next_ in pairwise(positions) if one == next_]:
        msg = (
            f"gate {gate.name!r} reads two tokens at position {twice[0]} of one row: texts that "
            "share a row cannot be told apart, give each a row"
        )
        raise HookError(msg)


def _by_row(rows: list[int]) -> list[tuple[int, slice]]:
    """Groups the places of tokens by their rows."""
    if len(rows) == 1 or rows.count(rows[0]) == len(rows):
        return [(rows[0], slice(None))]
    ends = [place for place in range(1, len(rows)) if rows[place] != rows[place - 1]]
    return [(rows[start], slice(start, end)) for start, end in pairwise([0, *ends, len(rows)])]


def _counts(
    gate: Gate, row: _Row, positions: list[int], prompt: int | None
) -> tuple[list[int], list[float], list[int]]:
    """Returns the readings that values are made of, and how many of them each value has.

    Args:
        gate: the gate.
        row: readings of the tokens' sequence.
        positions: of the tokens.
        prompt: length of the sequence's prompt.

    Returns:
        positions that count, with their readings; and for each token the number of them up to it, 0
        if its value is unknown.
    """
    if prompt is None and (gate.lag or gate.over == "prompt"):
        what = "lag=" if gate.lag else "over='prompt'"
        msg = (
            f"gate {gate.name!r} needs the length of the prompt for {what}, and this call does not "
            "show it: pass it with prepared.open(prompt=...)"
        )
        raise HookError(msg)
    read, readings = row.counted(gate, prompt)
    ends = _ends(gate, positions, prompt)
    counts = [bisect_right(read, end) for end in ends]
    if gate.over == "token":  # but for tokens that the gate does not count
        counts = [
            count if count and read[count - 1] == end else 0
            for count, end in zip(counts, ends, strict=True)
        ]
        known = 0 not in counts
    elif read and read[-1] == row.complete == max(ends):  # the next token
        row.complete += 1
        known = True
    else:
        known = max(ends) < row.complete
    if not known and (wanted := [end for end in ends if end >= 0]):
        _check_read(gate, row, wanted, prompt)
    if isinstance(gate.over, Window):
        counts = [count if count >= gate.over.size else 0 for count in counts]
    return read, readings, counts


def _ends(gate: Gate, positions: list[int], prompt: int | None) -> list[int]:
    """Returns the last position whose reading each value may have, -1 if the value is unknown."""
    if gate.over == "prompt":
        last = (prompt or 0) - 1
        return [last if position >= last else -1 for position in positions]
    if gate.lag:
        first = prompt or 0
        return [position - gate.lag if position >= first else -1 for position in positions]
    return positions


def _check_read(gate: Gate, row: _Row, wanted: list[int], prompt: int | None) -> None:
    """Validates that a gate has read the tokens that its values depend on.

    Args:
        gate: the gate.
        row: readings of their sequence.
        wanted: last positions of the values that are known, see `_ends`.
        prompt: length of the prompt.

    Raises:
        UnreadError: it has not, and may do so later in the running call.
        HookError: it has read later tokens, and not these.
    """
    first, end = min(wanted), max(wanted) + 1
    start = first if gate.over == "token" else row.complete
    missing: list[int] = []
    if row.count(start, end) < end - start:
        asked = sorted({*wanted}) if gate.over == "token" else range(start, end)
        missing = [each for each in asked if not row.count(each, each + 1)]
        if missing and gate.at is not None:
            at = native_at(gate.at)
            missing = [missing[place] for place in places_at(at, missing, prompt)]
    if not missing:
        if gate.over != "token":
            row.complete = max(row.complete, end)
        return
    if isinstance(gate.over, Window):  # only the last tokens matter
        needed = [*range(first + 1)]
        if gate.at is not None:
            needed = places_at(native_at(gate.at), needed, prompt)
        needed = needed[-gate.over.size :]
        missing = [each for each in missing if each >= min(needed, default=first)]
        if not missing:
            return
    where = f"position {missing[0]}" if len(missing) == 1 else f"positions from {missing[0]} on"
    if row.positions and row.positions[-1] > missing[0]:
        msg = (
            f"gate {gate.name!r} did not read the tokens at {where}: they ran before this request, "
            "without the module that it reads, or more than "
            f"{_MOST_SEQUENCES} other sequences ago. Run the whole sequence in the request"
        )
        raise HookError(msg)
    msg = (
        f"gate {gate.name!r} has not read the token at {where} yet: it reads later in the forward "
        "than the hook that depends on it, or the token ran before this request. Let it read at an "
        "earlier place, from the first token on"
    )
    if gate.over != "prompt" and not gate.lag:
        msg += ", or give it lag=1, for generated tokens that run one by one"
    raise UnreadError(msg)
