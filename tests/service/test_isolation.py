"""`isolation_check`: finds leaks between requests, and interventions that change nothing."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from ferrohook.service import IsolationReport, isolation_check
from ferrohook.service.isolation import difference

PAIRS = [((1.0, 0.0), (1.0, 0.5)), ((2.0, 0.0), (2.0, -3.0))]
"""Requests: a value, and the change that a request asks for."""


class Service:
    """Answers with the values of a request, changed; requests that come together share a forward.

    Args:
        leak: part of the others' changes that reaches a request.
        share: number of requests in a forward that leaks.
    """

    def __init__(self, leak: float = 0.0, share: int = 2) -> None:
        self._leak = leak
        self._share = share
        self._together: list[float] = []
        self.largest = 0

    async def send(self, body: tuple[float, float]) -> dict[str, Any]:
        value, change = body
        self._together.append(change)
        await asyncio.sleep(0)  # all that were sent at once are here
        together = len(self._together)
        self.largest = max(self.largest, together)
        others = sum(self._together) - change if together >= self._share else 0.0
        await asyncio.sleep(0)
        self._together.remove(change)
        return {"values": [value, value + change + self._leak * others], "label": "fine"}


def check(service: Service, pairs: Any = PAIRS, **options: Any) -> IsolationReport:
    return asyncio.run(isolation_check(service.send, pairs, **options))


def test_a_service_that_isolates() -> None:
    service = Service()
    report = check(service)
    assert report
    assert report.leaks == report.idle == ()
    assert report.difference == 0
    assert report.requests == 4 * (1 + 1 + 4)
    assert service.largest == 4


def test_leaks_are_reported_with_the_request_and_the_difference() -> None:
    report = check(Service(leak=1.0, share=4))
    assert not report
    found = {(leak.pair, leak.steered): leak.difference for leak in report.leaks}
    # The difference is the sum of the others' changes, relative to the answer.
    assert found == {
        (0, False): 2.5,
        (0, True): 3.0 / 1.5,
        (1, False): 2.5 / 2,
        (1, True): 0.5,
    }


def test_small_differences_are_the_kernels_accuracy() -> None:
    report = check(Service(leak=1e-6))
    assert report
    assert 0 < report.difference < 1e-5
    assert not check(Service(leak=1e-6), tolerance=1e-8)


def test_interventions_that_change_nothing_are_reported() -> None:
    report = check(Service(), [*PAIRS, ((1.0, 0.0), (1.0, 0.0))])
    assert not report
    assert (report.leaks, report.idle) == ((), (2,))


def test_a_failing_request_ends_the_check() -> None:
    async def fail(_body: object) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        asyncio.run(isolation_check(fail, PAIRS))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        check(Service(), [])
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        check(Service(), rounds=0)
    with pytest.raises(fh.HookTypeError, match="rounds must be an int"):
        check(Service(), rounds=1.5)


@pytest.mark.parametrize("tolerance", [-1, math.nan, math.inf])
def test_a_tolerance_that_would_hide_leaks_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be finite and not negative"):
        check(Service(), tolerance=tolerance)
    with pytest.raises(fh.HookTypeError, match="tolerance must be a number, got str"):
        check(Service(), tolerance="1")


@pytest.mark.parametrize("pairs", [[1], [(1,)], [({}, {}, {})], ["ab"], None, {"a": 1}], ids=repr)
def test_what_are_no_pairs_is_refused(pairs: Any) -> None:
    with pytest.raises(fh.HookTypeError, match="pair"):
        check(Service(), pairs)


def test_pairs_are_any_iterable() -> None:
    assert check(Service(), iter(PAIRS))


@pytest.mark.parametrize("answer", [torch.ones(2), np.ones(2), object(), {"a": [{1}]}])
def test_answers_without_a_value_are_refused(answer: Any) -> None:
    async def send(_body: object) -> Any:
        return answer

    with pytest.raises(
        fh.HookTypeError, match="an answer of isolation_check may contain only numbers"
    ):
        asyncio.run(isolation_check(send, PAIRS))


def test_an_answer_that_is_written_again_hides_no_leak() -> None:
    """`send` returns one object for each request, whatever it is answered."""
    service = Service(leak=1.0)
    buffers: dict[Any, list[Any]] = {}

    async def send(body: Any) -> Any:
        buffer = buffers.setdefault(body, [])
        buffer[:] = [await service.send(body)]
        return buffer

    assert asyncio.run(isolation_check(send, PAIRS)).leaks


def test_requests_on_their_way_are_cancelled_where_one_fails() -> None:
    running = 0

    async def send(_body: object) -> Any:
        nonlocal running
        running += 1
        try:
            await asyncio.sleep(0)
            if running == 2 * len(PAIRS):
                raise ConnectionError
            if running > 1:
                await asyncio.Event().wait()
            return 1.0
        finally:
            running -= 1

    async def run() -> int:
        with pytest.raises(ConnectionError):
            await isolation_check(send, PAIRS)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize(
    ("answer", "expected", "found"),
    [
        (1, 1.0, 0),
        ([1.0, 2.0], (1.0, 2.5), 0.2),
        ([1.0], [1.0, 1.0], math.inf),
        ({"a": 1}, {"a": 1, "b": 1}, math.inf),
        ({"a": [0.5]}, {"a": [0.25]}, 0.25),
        ("x", "x", 0),
        ("x", "y", math.inf),
        (None, None, 0),
        (None, 0, math.inf),
        ([], {}, math.inf),
        ([], [], 0),
        (math.nan, math.nan, 0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0),
        (math.inf, 1.0, math.inf),
        (-math.inf, math.inf, math.inf),
        (10**400, 0, math.inf),
        (True, 1, math.inf),
        (True, True, 0),
    ],
)
def test_differences(answer: Any, expected: Any, found: float) -> None:
    assert difference(answer, expected) == pytest.approx(found)
