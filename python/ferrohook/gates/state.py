"""Readings of a request's gates, by the position of their tokens, and the values made of them."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ferrohook._core import places_at
from ferrohook.errors import HookError
from ferrohook.gates.aggregation import Window, aggregated
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
        self.readings: Tensor | None = None
        """One for each position."""
        self.complete = 0
        """Tokens before this position that the gate counts are known to have been read."""

    def add(self, positions: list[int], readings: Tensor) -> None:
        """Stores readings. Of a token that runs again, the first one counts."""
        known = {*self.positions} if self.positions and positions[0] <= self.positions[-1] else {}
        new = [place for place, each in enumerate(positions) if each not in known]
        if len(new) < len(positions):
            if not new:
                return
            positions, readings = [positions[it] for it in new], readings[new]
        if self.readings is None:
            self.readings, self.positions = readings, positions
            return
        joined = torch.cat((self.readings.to(readings.device), readings))
        together = self.positions + positions
        if positions[0] < self.positions[-1]:
            order = sorted(range(len(together)), key=together.__getitem__)
            together, joined = [together[it] for it in order], joined[order]
        # In this order, for readers without a lock of other sequences' rows.
        self.readings, self.positions = joined, together

    def take_back(self, position: int) -> None:
        """Drops the readings from a position on."""
        end = bisect_left(self.positions, position)
        if self.readings is not None and end < len(self.positions):
            self.readings, self.positions = self.readings[:end].clone(), self.positions[:end]
        self.complete = min(self.complete, position)


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
            HookError: one is NaN.
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
            positions = [tokens.positions[place] for place in places]
            rows.setdefault(row, _Row()).add(positions, readings[places[0] : places[-1] + 1])

    def take_back(self, position: int) -> None:
        """Drops the readings from a position on: of drafts that were rejected."""
        with self._lock:
            sequences = [it for gate in self._rows.values() for it in gate.values()]
        for rows in sequences:
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
            found, counts = _counts(gate, rows.get(row, _EMPTY), positions, tokens.prompt(row))
            known += [count is not None for count in counts]
            if wanted := [count for count in counts if count is not None]:
                values.append(aggregated(gate.over, gate.by, found, wanted))
        if not values:
            return Values(torch.zeros(len(known)), torch.tensor(known))
        mask = torch.tensor(known, device=values[0].device)
        together = values[0] if len(values) == 1 else torch.cat(values)
        if not all(known):
            together = together.new_zeros(len(known)).masked_scatter(mask, together)
        return Values(together, mask)


_EMPTY: Final = _Row()


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
            "tell it: give it by prepared.open(prompt=...)"
        )
        raise HookError(msg)
    readings = torch.zeros(0) if row.readings is None else row.readings
    if gate.over == "prompt":
        length = prompt or 0
        asked = any(it >= length - 1 for it in positions)
        if asked:
            _check_read(gate, row, [length - 1], prompt)
        count = bisect_left(row.positions, length)
        return readings, [(count or None) if it >= length - 1 else None for it in positions]
    at = [it - gate.lag if not gate.lag or it >= (prompt or 0) else None for it in positions]
    own = [it for it in at if it is not None]
    if own:
        _check_read(gate, row, own, prompt)
    counts: list[int | None] = []
    least = gate.over.size if isinstance(gate.over, Window) else 1
    for each in at:
        count = 0 if each is None else bisect_right(row.positions, each)
        if gate.over == "token" and count and row.positions[count - 1] != each:
            count = 0  # a token that the gate does not count
        counts.append(count if count >= least else None)
    return readings, counts


def _check_read(gate: Gate, row: _Row, wanted: list[int], prompt: int | None) -> None:
    """Validates that a gate has read the tokens that its values depend on.

    Args:
        gate: the gate.
        row: readings of their sequence.
        wanted: positions of the tokens whose values are wanted.
        prompt: length of the prompt.

    Raises:
        HookError: it has not.
    """
    first, end = min(wanted), max(wanted) + 1
    asked = sorted(wanted) if gate.over == "token" else [*range(row.complete, end)]
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
    if missing[0] >= first:
        msg = (
            f"gate {gate.name!r} has not read the token at {where} yet, as it reads later in the "
            "forward than the hook that depends on it: let it read at an earlier place, or give it "
            "lag=1, for generated tokens that run one by one"
        )
    else:
        msg = (
            f"gate {gate.name!r} did not read the tokens at {where}: they ran before this request, "
            "or without the module that it reads. Run the whole sequence in the request"
        )
    raise HookError(msg)
