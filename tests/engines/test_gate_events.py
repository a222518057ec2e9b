"""Values of gates on their way into the events of a streamed answer."""

from __future__ import annotations

import asyncio
import json
from math import inf, isnan, nan
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("safetensors")

from ferrohook.engines.gate_events import AnswerGates
from ferrohook.engines.wire import GATES
from ferrohook.gates.streaming import GateStream, numbers_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

END = "data: [DONE]\n\n"


def event(**content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"


def joined(steps: list[tuple[dict[int, Any], str]]) -> list[str]:
    """The events of an answer, to which values are added before each."""
    gates = AnswerGates()

    async def events() -> AsyncGenerator[str, None]:
        for values, each in steps:
            for index, own in values.items():
                gates.add(index, own)
            yield each

    async def run() -> list[str]:
        return [each async for each in gates.join(events())]

    return asyncio.run(run())


def values(*positions: int) -> dict[str, Any]:
    return {"g": {"positions": [*positions], "values": [*map(float, positions)]}}


def test_values_go_with_the_next_event_of_their_choice() -> None:
    first, second = (event(id="a", choices=[{"index": it, "text": "é"}]) for it in (0, 1))
    found = joined(
        [({}, first), ({0: values(0, 1), 1: values(7)}, first), ({0: values(2)}, second), ({}, END)]
    )
    own = [json.loads(it.removeprefix("data: ")) for it in found[1:4]]
    assert found[0] == first
    assert [it["choices"][0][GATES] for it in own] == [values(0, 1), values(7), values(2)]
    assert [it["choices"][0]["text"] for it in own] == ["é", "é", ""]
    assert [it["id"] for it in own] == ["a"] * 3
    assert found[4:] == [END]


def test_none_come_after_an_error() -> None:
    failed = event(error={"message": "NaN"})
    assert joined([({0: values(1)}, failed), ({}, END)]) == [failed, END]


def test_an_event_may_have_no_choices() -> None:
    usage = event(choices=None)
    assert joined([({0: values(1)}, usage)]) == [usage]


def test_an_answer_that_is_left_is_closed() -> None:
    closed: list[bool] = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield END
        finally:
            closed.append(True)

    async def run() -> None:
        each = AnswerGates().join(events())
        await anext(each)
        await each.aclose()
        assert closed

    asyncio.run(run())


def test_each_value_is_taken_once_in_order_and_before_its_end() -> None:
    stream = GateStream()
    stream.note("g", [0, 1, 2], [0.0, 1.0, 2.0])
    assert stream.take(2) == values(0, 1)
    stream.note("g", [3, 4], [3.0, 4.0])
    stream.note("g", [0, 1, 2], [9.0, 9.0, 2.0])  # a request that was preempted runs again
    assert stream.take(2) == {}
    assert stream.take() == values(2, 3, 4)
    assert stream.take() == {}


def test_values_of_rejected_drafts_are_replaced() -> None:
    stream = GateStream()
    stream.note("g", [0, 1, 2, 3], [0.0, 1.0, 9.0, 9.0])
    assert stream.take(3) == {"g": {"positions": [0, 1, 2], "values": [0.0, 1.0, 9.0]}}
    stream.take_back(2)
    assert stream.take() == {}
    stream.note("g", [1, 2, 3], [9.0, 2.0, 3.0])
    assert stream.take() == values(2, 3)


def test_all_values_are_json() -> None:
    stream = GateStream()
    stream.note("g", [0, 1, 2, 3], [nan, inf, -inf, 0.1])
    text = json.dumps(stream.take(), allow_nan=False)
    first, *others = numbers_of(json.loads(text)["g"])
    assert isnan(first)
    assert others == [inf, -inf, 0.1]
