"""`isolation_check`: fires requests at a running service, and reports interventions that leaked.

An intervention that changes nothing cannot be seen to leak: the report is false for it too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ferrohook.util.arguments import at_least, expect

Body = TypeVar("Body")


@dataclasses.dataclass(frozen=True)
class Leak:
    """An answer that differs from the answer to the same request sent by itself."""

    pair: int
    """Index in `pairs`."""
    steered: bool
    """True for the request with an intervention."""
    difference: float
    """Largest difference of two numbers; inf if the answers differ in anything else."""


@dataclasses.dataclass(frozen=True)
class IsolationReport:
    """Result of `isolation_check`; true if nothing leaked and every intervention had an effect."""

    requests: int
    """Number of requests that were sent."""
    leaks: tuple[Leak, ...]
    idle: tuple[int, ...]
    """Indices of pairs whose intervention changes nothing. It would leak unseen, so that these make
    the report false as well."""
    difference: float
    """Largest difference of two numbers in answers that count as equal: the kernels' accuracy."""

    def __bool__(self) -> bool:
        return not self.leaks and not self.idle


async def isolation_check(
    send: Callable[[Body], Awaitable[Any]],
    pairs: Iterable[tuple[Body, Body]],
    *,
    rounds: int = 4,
    tolerance: float = 1e-4,
) -> IsolationReport:
    """Checks that interventions of a request do not change the answers to others.

    Sends each request by itself, then all of them at once, several times, and compares the answers.
    The service may have other traffic meanwhile.

    Args:
        send: sends a request to the service, and returns its answer: numbers, strings, bytes, None,
            and lists, tuples and mappings of these. It leaves out parts that differ each time, such
            as times.
        pairs: requests without an intervention, each with a request that has one and is the same
            otherwise.
        rounds: number of times that all are sent at once.
        tolerance: largest difference of equal numbers, relative for those above 1: forwards of
            other shapes use other kernels.

    Raises:
        HookTypeError: `rounds` is no int, `tolerance` is no number, `pairs` are no pairs, or an
            answer has something else, such as a tensor: `tolist()` makes numbers of it.
        ValueError: `rounds` is below 1, `tolerance` is negative or not finite, or there are no
            pairs.
        Exception: any exception of `send`; requests in flight are cancelled.

    Examples:
        >>> async def send(body):
        ...     return (await client.post("/embed", json=body)).json()["embeddings"]
        >>> report = await isolation_check(send, [(plain, steered)])
        >>> assert report, (report.leaks, report.idle)
    """
    at_least(1, "rounds", rounds)
    _check_tolerance(tolerance)
    bodies = _bodies(pairs)
    # Copies: `send` may return the same object each time.
    alone = [_copy(await send(body)) for body in bodies]
    largest = [difference(await send(body), alone[place]) for place, body in enumerate(bodies)]
    for turn in range(rounds):
        first = turn % len(bodies)  # in another order they share other forwards
        order = [*range(first, len(bodies)), *range(first)]
        answers = await _at_once([send(bodies[place]) for place in order])
        for place, answer in zip(order, answers, strict=True):
            largest[place] = max(largest[place], difference(answer, alone[place]))
    leaks = [
        Leak(place // 2, place % 2 == 1, worst)
        for place, worst in enumerate(largest)
        if worst > tolerance
    ]
    idle = [
        pair
        for pair in range(len(bodies) // 2)
        if difference(alone[2 * pair], alone[2 * pair + 1]) <= tolerance
    ]
    return IsolationReport(
        requests=len(bodies) * (2 + rounds),
        leaks=tuple(leaks),
        idle=tuple(idle),
        difference=max((worst for worst in largest if worst <= tolerance), default=0.0),
    )


def _check_tolerance(tolerance: float) -> None:
    expect(tolerance, int | float, "tolerance must be a number")
    if not 0 <= tolerance < math.inf:
        msg = f"tolerance must be finite and not negative, got {tolerance}"
        raise ValueError(msg)


def _bodies(pairs: Iterable[tuple[Body, Body]]) -> list[Body]:
    """Returns the requests of pairs, one after the other."""
    expect(pairs, Iterable, "isolation_check needs pairs of requests")
    bodies: list[Body] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != len(("plain", "steered")):
            expect(pair, (), "a pair of isolation_check must be a tuple of two requests")
        bodies += pair
    if not bodies:
        msg = "isolation_check needs at least one pair of requests"
        raise ValueError(msg)
    return bodies


def _copy(answer: Any) -> Any:
    """Copies an answer, which may have nothing that does not compare by its value."""
    if isinstance(answer, Mapping):
        return {key: _copy(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [_copy(each) for each in answer]
    expected = (
        "an answer of isolation_check may contain only numbers, strings, None, lists and mappings"
    )
    expect(answer, bool | int | float | str | bytes | None, expected)
    return answer


async def _at_once(requests: Sequence[Awaitable[Any]]) -> list[Any]:
    """Awaits all, and cancels the others where one fails."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def difference(answer: Any, expected: Any) -> float:
    """Returns the largest difference of two numbers at the same place of two answers.

    Relative where the expected number is above 1; inf if the answers differ in anything else.
    """
    if isinstance(answer, bool) != isinstance(expected, bool):
        return math.inf
    if isinstance(answer, int | float) and isinstance(expected, int | float):
        return _distance(answer, expected)
    if isinstance(answer, Mapping) and isinstance(expected, Mapping):
        if answer.keys() == expected.keys():
            return max((difference(answer[key], expected[key]) for key in expected), default=0.0)
    elif isinstance(answer, list | tuple) and isinstance(expected, list | tuple):
        if len(answer) == len(expected):
            return max(map(difference, answer, expected), default=0.0)
    elif answer == expected:
        return 0.0
    return math.inf


def _distance(number: float, expected: float) -> float:
    if number == expected or (number != number and expected != expected):  # noqa: PLR0124 (NaN)
        return 0.0
    try:
        found = abs(number - expected) / max(1.0, abs(expected))
    except OverflowError:  # of an int
        return math.inf
    return math.inf if math.isnan(found) else found
