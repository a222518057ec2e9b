"""Captured values by name: what caches and requests read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from ferrohook._core import CapturedBase
from ferrohook.errors import SelectionError
from ferrohook.pending import finish
from ferrohook.tensors import as_leaf, map_tensors, tensors_in

if TYPE_CHECKING:
    from ferrohook._core import Collector
    from ferrohook.host_copies import HostCopies
    from ferrohook.places import Head


def not_captured(name: object, state: str, names: Iterable[str]) -> SelectionError:
    """Makes the error for a name without a captured value."""
    captured = ", ".join(map(repr, names)) or "nothing"
    if not isinstance(name, str):
        got = f"{type(name).__name__} {name!r}"
        return SelectionError(f"a module's name is a str, got {got}; captured: {captured}")
    return SelectionError(f"{name!r} {state} the captured modules: {captured}")


class Recorded(NamedTuple):
    """Outputs or inputs in a collector, by place."""

    collector: Collector
    copies: HostCopies

    def ran(self) -> list[int]:
        """Returns the places that ran, in the order of their first calls."""
        finish(self.collector)
        return self.collector.ran()

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the values of a place, the oldest first."""
        finish(self.collector)
        return self._values(place, stale=stale)

    def _values(self, place: int, *, stale: bool) -> list[Any]:
        values = self.collector.values(place, stale=stale)
        self.copies.finish()
        return values


class RecordedSteps(Recorded):
    """Outputs or inputs of a request in batches, put together by position."""

    __slots__ = ()

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the values of a place: a list of one, if the positions of all are known."""
        finish(self.collector)
        if not stale and (joined := self.collector.joined(place)) is not None:
            return [joined]
        values = self._values(place, stale=stale)
        collected = self.collector.positions(place)[: len(values)]
        known = [each for each in collected if each is not None]
        if not values or len(known) < len(values):
            return values
        rows = [row for positions, _ in known for row in positions]
        last = {position: row for row, position in enumerate(rows) if position >= 0}
        order = [last[position] for position in sorted(last)]

        def put_together(*calls: Any) -> Any:
            tokens = [
                _tokens_first(tensor, dim, len(positions))
                for tensor, (positions, dim) in zip(calls, known, strict=True)
            ]
            if any(each is None for each in tokens):
                return calls[-1]
            together = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
            if order == list(range(len(together))):
                return together
            return together[torch.tensor(order, dtype=torch.long, device=together.device)]

        return [_map_together(put_together, values)]


def _tokens_first(tensor: Any, dim: int | None, tokens: int) -> Any:
    """Returns a tensor of (tokens, ...); None if it does not have them."""
    shape = tensor.shape
    if dim is None:  # a padded row
        return tensor.flatten(0, 1) if shape[:2] == (1, tokens) else None
    if len(shape) <= dim or shape[dim] != tokens:
        return None
    if dim == 0:
        return tensor
    tensor = tensor.movedim(dim, 0)
    return tensor.squeeze(1) if dim == 1 and shape[0] == 1 else tensor


def _map_together(change: Callable[..., Any], values: list[Any]) -> Any:
    """Rebuilds the structure of the last value around the tensors of all of them."""
    if all(isinstance(value, Tensor) for value in values):
        return change(*values)
    leaves = [[*tensors_in(value)] for value in values]
    if len({len(each) for each in leaves}) > 1:
        return values[-1]
    columns = iter([*zip(*leaves, strict=True)])
    return map_tensors(lambda _tensor: change(*next(columns)), values[-1])


class RecordedGradients(Recorded):
    """Gradients in a collector, by place."""

    __slots__ = ()

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the gradients of the values of a place."""
        del stale  # gradients have no version tag
        calls = self.collector.gradients(place)
        self.copies.finish()
        values = self.collector.values(place, stale=True)
        # Not strict: another thread may end a call between the two reads.
        return [
            gradients[0] if isinstance(value, Tensor) else gradients
            for value, gradients in zip(values, calls, strict=False)
        ]


class _Copied(dict[int, list[Any]]):
    """Values of a copy, by place; nothing but its reader writes to them."""

    def ran(self) -> list[int]:
        return list(self)

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        del stale
        return self.get(place, [])


class Part(NamedTuple):
    """Values of one capture."""

    places: dict[str, int]
    """Index of each name among the values."""
    values: Recorded | _Copied
    only_last: bool
    """True if a value is that of the last call, not a list."""
    multipliers: Mapping[int, float]
    """Factors of the values, by place, where they are not 1."""
    heads: Mapping[int, Head]
    """Heads that are meant of the values, by place."""

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the values of a place, the oldest first."""
        values = self.values.read(place, stale=stale)
        head = self.heads.get(place)
        if head is not None:
            values = [map_tensors(head.of, value) for value in values]
        if place not in self.multipliers:
            return values
        factor = self.multipliers[place]
        return [map_tensors(lambda tensor: tensor * factor, value) for value in values]

    def copy(self) -> Part:
        """Makes a copy that owns its values."""
        places = self.values.ran()
        values = {each: map_tensors(as_leaf, self.read(each)) for each in places}
        return self._replace(values=_Copied(values), multipliers={}, heads={})


class Captured(CapturedBase, Mapping[str, Any]):
    """View of captured values by name, of one capture or several with different names.

    A tensor that is stored as it is, is read in Rust; `_read` reads all others.
    """

    __slots__ = ("_parts", "_reason")

    def __new__(cls, parts: list[Part], _reason: Callable[[], str] = str) -> Self:  # noqa: D102 (see the class)
        last = [
            (part.places, part.values.collector)
            for part in parts
            if isinstance(part.values, RecordedSteps) and not (part.multipliers or part.heads)
        ]
        return super().__new__(cls, last)

    def __init__(self, parts: list[Part], reason: Callable[[], str] = str) -> None:
        self._parts = parts
        self._reason = reason
        """Returns why modules may not have run, for errors."""

    def peek(self, name: str) -> Any:
        """Returns a value without the check for writes in place."""
        return self._read(name, stale=True)

    def _read(self, name: str, *, stale: bool = False) -> Any:
        state, reason = "was not selected", ""
        for part in self._parts:
            if (place := part.places.get(name)) is not None:
                if found := part.read(place, stale=stale):
                    return found[-1] if part.only_last else found
                state, reason = "never ran", self._reason()
        error = not_captured(name, f"{state} and is not among", self)
        raise SelectionError(f"{error}; {reason}") if reason else error

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        names: list[str] = []
        for part in self._parts:
            all_names = list(part.places)
            names += [all_names[place] for place in part.values.ran()]
        return iter(names)

    def __len__(self) -> int:
        return sum(len(part.values.ran()) for part in self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ([part.copy() for part in self._parts],)
