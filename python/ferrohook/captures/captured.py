"""Captured values by name: what caches and requests read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ferrohook._core import CapturedBase
from ferrohook.captures.pending import finish
from ferrohook.errors import SelectionError
from ferrohook.util.tensors import after_transforms, as_leaf, map_tensors, tensors_in

if TYPE_CHECKING:
    from ferrohook._core import Collector
    from ferrohook.names.places import Head
    from ferrohook.util.host_copies import HostCopies


def not_captured(name: object, names: Iterable[str], *, why: str = "") -> SelectionError:
    """Makes the error for a name without a captured value, `why` being known or not."""
    captured = ", ".join(map(repr, names))
    if not isinstance(name, str):
        got = type(name).__name__
        if not isinstance(name, nn.Module):  # whose repr lists all modules inside
            got += f" {name!r}"
        msg = f"the name of a module must be a str, got {got}; captured: {captured or 'nothing'}"
    elif captured or why:
        state = f"{why} and is" if why else "is"
        msg = f"{name!r} {state} not among the captured modules: {captured or 'nothing'}"
    else:
        msg = f"{name!r} was not captured: no capture= or keep() selected any module"
    return SelectionError(msg)


class Recorded(NamedTuple):
    """Outputs or inputs in a collector, by place."""

    collector: Collector
    copies: HostCopies
    joins: bool
    """True to read the values of all calls whose positions are known as one."""

    def ran(self) -> list[int]:
        """Returns the places that ran, in the order of their first calls."""
        finish(self.collector)
        return self.collector.ran()

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the values of a place, the oldest first."""
        finish(self.collector)
        values = self.collector.read(
            place, joins=self.joins, stale=stale, finish=self.copies.finish
        )
        return self._after_transforms(values)

    def positions(self, place: int) -> list[int] | None:
        """Returns the positions of the tokens of a place's values; None if they are not known."""
        finish(self.collector)
        return self.collector.tokens(place)

    def _after_transforms(self, values: list[Any]) -> list[Any]:
        if not self.collector.transformed:
            return values
        return [map_tensors(after_transforms, value) for value in values]


class RecordedGradients(Recorded):
    """Gradients in a collector, by place."""

    __slots__ = ()

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the gradients of the values of a place."""
        passes = self.collector.gradients(place, stale=stale)
        self.copies.finish()
        calls = [[_summed(each) for each in call] for call in self._after_transforms(passes)]
        values = self.collector.read(place, stale=True)
        # Not strict: another thread may end a call between the two reads.
        return [
            gradients[0] if isinstance(value, Tensor) else gradients
            for value, gradients in zip(values, calls, strict=False)
        ]


def _summed(passes: list[Tensor]) -> Tensor | None:
    """Returns the gradient of all backward passes, as autograd sums them; None if none came."""
    return functools.reduce(torch.add, passes) if passes else None


class Gradients(Mapping[str, Any]):
    """Gradients that have arrived, by name.

    Args:
        values: gradients by name, None for one that did not arrive; None if none were captured.
        captured: names of the captured values, those without gradients included.
    """

    def __init__(self, values: Mapping[str, Any] | None, captured: Iterable[str]) -> None:
        self._values = values
        self._captured = captured

    def unchecked(self, name: str) -> Any:
        """Returns the gradient of a name, None if it did not arrive."""
        return self._read(name, stale=True)

    def _read(self, name: str, *, stale: bool) -> Any:
        if self._values is None:
            msg = "no gradients were captured: open the capture with grads=True"
            raise SelectionError(msg)
        if name not in self._values and name in self._captured:
            msg = f"no gradients of {name!r} were captured: capture it with grads=True"
            raise SelectionError(msg)
        values = self._values
        return values._read(name, stale=stale) if isinstance(values, CapturedView) else values[name]

    def __getitem__(self, name: str) -> Any:
        gradient = self._read(name, stale=False)
        if next(tensors_in(gradient), None) is None:
            raise SelectionError(self._reason(name))
        return gradient

    def _reason(self, name: str) -> str:
        text = f"no gradient has reached {name!r}"
        if isinstance(self._values, CapturedView) and not self._values.awaits_gradients(name):
            return (
                f"{text}: autograd did not record it. Either gradients were disabled "
                "(torch.no_grad), nothing it was computed from requires them, or a checkpoint "
                "records it later"
            )
        if others := list(self):
            return f"{text}: backward ran through {', '.join(map(repr, others))}, but not to it"
        return f"{text} yet: call backward() on what was computed from it"

    def __iter__(self) -> Iterator[str]:
        names = self._values or ()
        return (each for each in names if next(tensors_in(self.unchecked(each)), None) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Copied(dict[int, list[Any]]):
    """Values of a copy, by place; nothing but its reader writes to them."""

    def ran(self) -> list[int]:
        return list(self)

    def positions(self, place: int) -> None:
        del place  # a copy has the values only

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        del stale
        return self.get(place, [])


class CapturedPart(NamedTuple):
    """Values of one capture."""

    places: dict[str, int]
    """Index of each name among the values."""
    values: Recorded | _Copied
    only_last: bool
    """True if a value is the last call's, not a list."""
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

    def copy(self) -> CapturedPart:
        """Makes a copy that owns its values."""
        places = self.values.ran()
        values = {each: map_tensors(as_leaf, self.read(each)) for each in places}
        return self._replace(values=_Copied(values), multipliers={}, heads={})


class CapturedView(CapturedBase, Mapping[str, Any]):
    """View of captured values by name, of one capture or several with different names.

    A tensor that is stored as it is, is read in Rust; `_read` reads all others.
    """

    __slots__ = ("_parts", "_reason")

    def __new__(cls, parts: list[CapturedPart], _reason: Callable[[], str] = str) -> Self:  # noqa: D102 (see the class)
        last = [
            (part.places, part.values.collector)
            for part in parts
            if isinstance(part.values, Recorded)
            and part.values.joins
            and not (part.multipliers or part.heads)
        ]
        return super().__new__(cls, last)

    def __init__(self, parts: list[CapturedPart], reason: Callable[[], str] = str) -> None:
        self._parts = parts
        self._reason = reason
        """Returns why modules may not have run, for errors."""

    def unchecked(self, name: str) -> Any:
        """Returns a value without the check for writes in place."""
        return self._read(name, stale=True)

    def counts_of(self, name: str) -> tuple[int, int]:
        """Returns the number of calls, and of those whose values made way for later ones."""
        for part in self._parts:
            if isinstance(part.values, Recorded) and (place := part.places.get(name)) is not None:
                return part.values.collector.counts_of(place)
        return 1, 0

    def positions(self, name: str) -> list[int] | None:
        """Returns the positions of a value's tokens, in order; None if they are not known.

        Raises:
            SelectionError: no module of this name was selected.
        """
        for part in self._parts:
            if (place := part.places.get(name)) is not None:
                return part.values.positions(place)
        raise not_captured(name, [name for it in self._parts for name in it.places])

    def awaits_gradients(self, name: str) -> bool:
        """Returns True if autograd recorded a tensor of a name, so that a gradient may come."""
        return any(
            isinstance(part.values, Recorded) and part.values.collector.awaits_gradients(place)
            for part in self._parts
            if (place := part.places.get(name)) is not None
        )

    def _read(self, name: str, *, stale: bool = False) -> Any:
        state, reason = "was not selected" if self._parts else "", ""
        for part in self._parts:
            if (place := part.places.get(name)) is not None:
                if found := part.read(place, stale=stale):
                    return found[-1] if part.only_last else found
                state, reason = "never ran", self._reason()
        error = not_captured(name, self, why=state)
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
