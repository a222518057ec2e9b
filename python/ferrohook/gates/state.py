"""Readings of a request's gates, by the position of their tokens, and the values made of them."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ferrohook._core import needs_prompt, places_at
from ferrohook.errors import HookError
from ferrohook.gates.aggregation import Ema, Window, aggregated
from ferrohook.gates.conditions import Values
from ferrohook.tokens.positions import EVERYWHERE, native_at

if TYPE_CHECKING:
    from torch import Tensor

    from ferrohook.gates.gate import Gate

_MOST_SEQUENCES: Final = 64
"""Calls without a common KV cache whose readings a request stores for each gate."""


class GateTokens(NamedTuple):
    """Tokens of a call, as the core gives them, in the order of memory."""

    rows: list[int]
    """Row of each in the request; ascending."""
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


class _Row:
    """Readings of one sequence."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        """Ascending."""
        self.readings: Tensor = torch.zeros(0)
        """One for each position: float32, (positions,)."""
        self.averages: Tensor | None = None
        """Moving averages after the first readings, of a gate over these."""
        self.complete = 0
        """Tokens before this position that the gate counts are known to have been read."""
        self.prompt: int | None = None
        """Length of the prompt with which that was found."""

    def add(self, positions: list[int], readings: Tensor) -> None:
        """Stores readings; `positions`: ascending. A token that runs again keeps its first one."""
        if self.positions and positions[0] <= self.positions[-1]:
            places = {each: place for place, each in enumerate(self.positions)}
            again = [place for place, each in enumerate(positions) if each in places]
            if again and readings.requires_grad and not self.readings.requires_grad:
                # The repeat of a checkpointed forward that recorded no graph.
                at = torch.tensor([places[positions[it]] for it in again], device=readings.device)
                first = self.readings[at]
                recorded = readings[again] + (first - readings[again]).detach()
                self.readings = self.readings.index_copy(0, at, recorded)
                self.averages = None
            new = [place for place, each in enumerate(positions) if each not in places]
            if not new:
                return
            positions, readings = [positions[it] for it in new], readings[new]
        together = self.positions + positions
        joined = torch.cat((self.readings.to(readings.device), readings))
        if self.positions and positions[0] < self.positions[-1]:
            order = sorted(range(len(together)), key=together.__getitem__)
            together, joined = [together[it] for it in order], joined[order]
            self.averages = None
        self.readings, self.positions = joined, together

    def take_back(self, position: int) -> None:
        """Drops the readings from a position on."""
        end = bisect_left(self.positions, position)
        if end < len(self.positions):
            self.readings, self.positions = self.readings[:end].clone(), self.positions[:end]
            self.averages = None if self.averages is None else self.averages[:end].clone()
        self.complete = min(self.complete, position)

    def counted(self, gate: Gate, prompt: int | None) -> tuple[list[int], Tensor]:
        """Returns the positions that a gate counts, with their readings.

        They differ from the stored ones after a further turn, whose prompt is another.
        """
        if self.prompt not in {None, prompt}:
            self.complete, self.averages = 0, None
        self.prompt = prompt
        if gate.at is None or not needs_prompt(native_at(gate.at)):
            return self.positions, self.readings
        places = places_at(native_at(gate.at), self.positions, prompt)
        if len(places) == len(self.positions):
            return self.positions, self.readings
        return [self.positions[it] for it in places], self.readings[places]


class GateStates:
    """Readings of the gates of one request."""

    def __init__(self) -> None:
        # Recursive, as a finaliser may run while it is held.
        self._lock = threading.RLock()
        self._rows: dict[str, dict[int, dict[int, _Row]]] = {}
        """By the name of the gate, the id of the sequences and the row."""

    def _sequences(self, gate: str, number: int) -> dict[int, _Row]:
        with self._lock:
            of_gate = self._rows.setdefault(gate, {})
            found = of_gate.pop(number, None)
            of_gate[number] = found = {} if found is None else found  # the last used one is last
            while len(of_gate) > _MOST_SEQUENCES:
                del of_gate[next(iter(of_gate))]
            return found

    def add(self, gate: Gate, tokens: GateTokens, readings: Tensor) -> None:
        """Stores readings of the tokens of a call.

        Raises:
            HookError: one is NaN, or a position stands twice in a row of the call.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):  # a later call may record a graph
                readings = readings.clone()
        if bool(readings.isnan().any()):
            position = tokens.positions[int(readings.isnan().nonzero()[0])]
            msg = f"gate {gate.name!r} is NaN at position {position}"
            raise HookError(msg)
        rows = self._sequences(gate.name, tokens.sequences)
        for row, places in _by_row(tokens.rows):
            order = sorted(places, key=tokens.positions.__getitem__)
            positions = [tokens.positions[place] for place in order]
            if twice := [one for one, next_ in pairwise(positions) if one == next_]:
                msg = (
                    f"gate {gate.name!r} reads two tokens at position {twice[0]} of one row: texts "
                    "that share a row cannot be told apart, give each a row"
                )
                raise HookError(msg)
            own = readings[order] if order != places else readings[places[0] : places[-1] + 1]
            rows.setdefault(row, _Row()).add(positions, own)

    def take_back(self, position: int, sequences: int) -> None:
        """Drops the readings of some sequences from a position on: of drafts that were rejected."""
        with self._lock:
            found = [of_gate.get(sequences, {}) for of_gate in self._rows.values()]
        for rows in found:
            for row in [*rows.values()]:
                row.take_back(position)

    def values(self, gate: Gate, tokens: GateTokens) -> Values:
        """Returns the values of a gate at the tokens of a call, where its readings are.

        Raises:
            HookError: tokens that the value depends on were not read, or the length of a prompt is
                needed and not known.
        """
        rows = self._sequences(gate.name, tokens.sequences)
        known: list[bool] = []
        values: list[Tensor] = []
        for row, places in _by_row(tokens.rows):
            positions = [tokens.positions[place] for place in places]
            state = rows.get(row) or _Row()
            readings, counts = _counts(gate, state, positions, tokens.prompt(row))
            known += [count is not None for count in counts]
            if wanted := [count for count in counts if count is not None]:
                averages = state.averages if isinstance(gate.over, Ema) else None
                found, averages = aggregated(gate.over, gate.by, readings, wanted, averages)
                state.averages = averages
                values.append(found)
        if not values:
            return Values(torch.zeros(len(known)), torch.tensor(known))
        mask = torch.tensor(known, device=values[0].device)
        together = values[0] if len(values) == 1 else torch.cat(values)
        if not all(known):
            together = together.new_zeros(len(known)).masked_scatter(mask, together)
        # Infinite readings may add up to NaN.
        return Values(together, mask & ~together.isnan())


def _by_row(rows: list[int]) -> list[tuple[int, list[int]]]:
    """Groups the places of tokens by their rows."""
    places = groupby(range(len(rows)), key=rows.__getitem__)
    return [(row, [*group]) for row, group in places]


def _counts(
    gate: Gate, row: _Row, positions: list[int], prompt: int | None
) -> tuple[Tensor, list[int | None]]:
    """Returns the readings that values are made of, and how many of them each value has.

    Args:
        gate: the gate.
        row: readings of the tokens' sequence.
        positions: of the tokens.
        prompt: length of the sequence's prompt.

    Returns:
        readings in order of position; and for each token the number of them up to it, None if its
        value is unknown.
    """
    if prompt is None and (gate.lag or gate.over == "prompt"):
        what = "lag=" if gate.lag else "over='prompt'"
        msg = (
            f"gate {gate.name!r} needs the length of the prompt for {what}, and this call does not "
            "show it: pass it with prepared.open(prompt=...)"
        )
        raise HookError(msg)
    read, readings = row.counted(gate, prompt)
    length = prompt or 0
    if gate.over == "prompt":
        at = [length - 1 if it >= length - 1 else None for it in positions]
    else:
        at = [it - gate.lag if not gate.lag or it >= length else None for it in positions]
    if wanted := [it for it in at if it is not None]:
        _check_read(gate, row, wanted, prompt, min(positions))
    counts: list[int | None] = []
    least = gate.over.size if isinstance(gate.over, Window) else 1
    for each in at:
        count = 0 if each is None else bisect_right(read, each)
        if gate.over == "token" and count and read[count - 1] != each:
            count = 0  # a token that the gate does not count
        counts.append(count if count >= least else None)
    return readings, counts


def _check_read(gate: Gate, row: _Row, wanted: list[int], prompt: int | None, start: int) -> None:
    """Validates that a gate has read the tokens that its values depend on.

    Args:
        gate: the gate.
        row: readings of their sequence.
        wanted: positions of the tokens whose values are wanted.
        prompt: length of the prompt.
        start: first position of the running call.

    Raises:
        HookError: it has not.
    """
    first, end = min(wanted), max(wanted) + 1
    asked = sorted({*wanted}) if gate.over == "token" else [*range(row.complete, end)]
    if not asked:
        return
    at = native_at(EVERYWHERE if gate.at is None else gate.at)
    counted = [asked[place] for place in places_at(at, asked, prompt)]
    read = {*row.positions}
    missing = [each for each in counted if each not in read]
    if not missing:
        row.complete = row.complete if gate.over == "token" else end
        return
    if isinstance(gate.over, Window):  # only the last tokens matter
        needed = [each for each in counted if each <= first][-gate.over.size :]
        missing = [each for each in missing if each >= min(needed, default=first)]
        if not missing:
            return
    where = f"position {missing[0]}" if len(missing) == 1 else f"positions from {missing[0]} on"
    if missing[0] >= start:
        msg = (
            f"gate {gate.name!r} has not read the token at {where} yet, as it reads later in the "
            "forward than the hook that depends on it: let it read at an earlier place"
        )
        if gate.over != "prompt" and not gate.lag:
            msg += ", or give it lag=1, for generated tokens that run one by one"
    else:
        msg = (
            f"gate {gate.name!r} did not read the tokens at {where}: they ran before this request, "
            "without the module that it reads, or more than "
            f"{_MOST_SEQUENCES} other sequences ago. Run the whole sequence in the request"
        )
    raise HookError(msg)
