"""Conditions on gates, and strengths that follow a gate."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import check_encodes, expect, finite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Condition(ABC):
    """A condition on gates: made by `above`, `below` and `between`, combined by `&`, `|` and `~`.

    It is known to be true, known to be false or unknown at a token, and a hook acts only where it
    is known to be true. `~` of an unknown condition is unknown; `&` with one that is false is
    false, and `|` with one that is true is true.
    """

    @abstractmethod
    def gates(self) -> Iterator[str]:
        """Yields the names of its gates."""

    def __and__(self, other: Condition) -> Condition:
        if not isinstance(other, Condition):
            return NotImplemented
        return Combined.of(self, other, needs_all=True)

    def __or__(self, other: Condition) -> Condition:
        if not isinstance(other, Condition):
            return NotImplemented
        return Combined.of(self, other, needs_all=False)

    def __invert__(self) -> Condition:
        return Not(self)

    def __bool__(self) -> NoReturn:
        # `a or b`, `a and b` and `0 < a < 1` would silently drop a side.
        msg = (
            "a condition on gates has no truth value before the model runs: combine conditions "
            "with &, | and ~ in place of and, or and not; for a range use between"
        )
        raise HookTypeError(msg)


@dataclasses.dataclass(frozen=True)
class Comparison(Condition):
    """A gate that lies above one bound, below another, or both."""

    gate: str
    low: float | str | None
    """The gate must be above it: a number or the name of a gate."""
    high: float | str | None
    """The gate must be below it."""
    closed: bool = False
    """True if the bounds themselves are included."""

    def gates(self) -> Iterator[str]:  # noqa: D102 (see the base)
        yield self.gate
        yield from (bound for bound in (self.low, self.high) if isinstance(bound, str))

    def __repr__(self) -> str:
        if self.closed:
            return f"between({self.gate!r}, {self.low!r}, {self.high!r})"
        if self.high is None:
            return f"above({self.gate!r}, {self.low!r})"
        return f"below({self.gate!r}, {self.high!r})"


@dataclasses.dataclass(frozen=True)
class Combined(Condition):
    """Conditions all of which must be true, or one of which must be."""

    conditions: tuple[Condition, ...]
    needs_all: bool

    @classmethod
    def of(cls, *conditions: Condition, needs_all: bool) -> Combined:
        """Combines conditions, without nesting conditions of one kind."""
        flat: list[Condition] = []
        for each in conditions:
            alike = isinstance(each, Combined) and each.needs_all == needs_all
            flat += each.conditions if alike else (each,)  # type: ignore[attr-defined]  # alike
        return cls(tuple(flat), needs_all)

    def gates(self) -> Iterator[str]:  # noqa: D102 (see the base)
        for each in self.conditions:
            yield from each.gates()

    def __repr__(self) -> str:
        sign = " & " if self.needs_all else " | "
        return f"({sign.join(map(repr, self.conditions))})"


@dataclasses.dataclass(frozen=True)
class Not(Condition):
    """A condition that must be false."""

    one: Condition

    def gates(self) -> Iterator[str]:  # noqa: D102 (see the base)
        yield from self.one.gates()

    def __repr__(self) -> str:
        return f"~{self.one!r}"


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A strength that follows a gate, see `ramp`."""

    gate: str
    start: float
    end: float

    def __repr__(self) -> str:
        return f"ramp({self.gate!r}, {self.start}, {self.end})"

    def of_tensor(self, values: Tensor) -> Tensor:
        """Returns the strengths for values of the gate, differentiably."""
        # Bounds may be beyond float32.
        strengths = (values.to(torch.float64) - self.start) / (self.end - self.start)
        return strengths.clamp(0.0, 1.0).to(values.dtype)


def above(gate: str, threshold: float | str) -> Condition:
    """Returns the condition that a gate is greater than a threshold.

    Args:
        gate: its name.
        threshold: a number, or the name of another gate.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: the threshold is not finite, or a name is empty.
    """
    return Comparison(check_name(gate), _bound(threshold), None)


def below(gate: str, threshold: float | str) -> Condition:
    """Returns the condition that a gate is less than a threshold.

    Args:
        gate: its name.
        threshold: a number, or the name of another gate.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: the threshold is not finite, or a name is empty.
    """
    return Comparison(check_name(gate), None, _bound(threshold))


def between(gate: str, low: float | str, high: float | str) -> Condition:
    """Returns the condition that a gate lies in a range, both ends included.

    Args:
        gate: its name.
        low: a number, or the name of another gate.
        high: likewise.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: a bound is not finite, a name is empty, or `low` is greater than `high`.
    """
    low, high = _bound(low), _bound(high)
    if not isinstance(low, str) and not isinstance(high, str) and low > high:
        msg = f"low of between must not be greater than high, got {low} and {high}"
        raise ValueError(msg)
    return Comparison(check_name(gate), low, high, closed=True)


def ramp(gate: str, start: float, end: float) -> Ramp:
    """Returns a strength that follows a gate: 0 at `start`, 1 at `end`, linear between them.

    It stays 0 before and 1 after. With `start` greater than `end` it falls as the gate rises. Where
    the gate is unknown, the hook does not act.

    Args:
        gate: its name.
        start: value of the gate at which the strength is 0.
        end: value at which it is 1.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: a bound is not finite, the name is empty, or the bounds are equal.
    """
    start, end = finite(start, "start of ramp"), finite(end, "end of ramp")
    if start == end:
        msg = f"start and end of ramp must differ, got {start} twice"
        raise ValueError(msg)
    return Ramp(check_name(gate), start, end)


def check_name(name: Any) -> str:
    """Validates and returns the name of a gate.

    Raises:
        HookTypeError: it is no str.
        ValueError: it is empty, or UTF-8 cannot encode it.
    """
    expect(name, str, "the name of a gate must be a str")
    if not name:
        msg = "the name of a gate must not be empty"
        raise ValueError(msg)
    check_encodes(name, "the name of a gate")
    return str(name)


def _bound(bound: Any) -> float | str:
    return check_name(bound) if isinstance(bound, str) else finite(bound, "a threshold")


def strength_of(strength: Any) -> float | Ramp:
    """Validates and returns the strength of an entry.

    Raises:
        HookTypeError: it is neither a number nor a ramp.
        ValueError: the number is not finite.
    """
    if isinstance(strength, Ramp):
        return strength
    expect(strength, int | float, "strength must be a number or the result of ramp")
    return finite(strength, "strength")


def check_condition(when: Any) -> None:
    """Validates the condition of an entry.

    Raises:
        HookTypeError: it is none.
    """
    if not isinstance(when, Condition):
        expect(when, (), "when must be a condition on gates, such as above('name', 0.3)")
