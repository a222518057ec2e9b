"""Step maps, and the table of engines."""

from __future__ import annotations

import pytest
import torch

from ferrohook.engines import Capabilities, Span, Step, capabilities
from ferrohook.errors import HookError


def test_rows_of_nobody_have_no_position() -> None:
    step = Step([Span("a", 0, 3, 4, 9, wants_logits=False), Span("b", 4, 1, 0, 1)], rows=7)

    assert step.positions.tolist() == [4, 5, 6, -1, 0, -1, -1]
    assert step.logits_rows == [4]
    assert step.request_ids == {"a", "b"}
    assert "'b': rows 4..4 from position 0" in repr(step)


def test_a_step_without_wanted_logits_has_an_index_of_none() -> None:
    assert Step([Span("a", 0, 3, 4, 9, wants_logits=False)]).logits_rows == []
    assert Step([]).positions.dtype == torch.long


def test_a_step_is_compared_by_content() -> None:
    first, second = (Step([Span("a", 0, 2, 0, 2)]) for _ in range(2))

    assert first == second
    assert hash(first) == hash(second)
    assert first != Step([Span("a", 0, 2, 1, 2)])
    assert first != Step([Span("a", 0, 2, 0, 2)], rows=3)


@pytest.mark.parametrize(
    ("spans", "rows", "message"),
    [
        ([Span("a", 0, 2, 0, 2), Span("b", 1, 1, 0, 1)], None, "do not overlap"),
        ([Span("a", 2, 1, 0, 2), Span("b", 0, 1, 0, 1)], None, "in order"),
        ([Span("a", 0, 0, 0, 2)], None, "in order"),
        ([Span("a", 0, 1, -1, 2)], None, "in order"),
        ([Span("a", 0, 2, 0, 2)], 1, "no row 1"),
        ([Span("a", 0, 1, 0, 2), Span("a", 1, 1, 1, 2)], None, "one span"),
    ],
)
def test_a_map_that_cannot_be_is_refused(spans: list[Span], rows: int | None, message: str) -> None:
    with pytest.raises(HookError, match=message):
        Step(spans, rows)


def engine(version: str) -> Capabilities:
    return Capabilities("some-engine", version, ("1.2", "1.3"), ("x",), {"y": "it cannot"})


def test_a_release_that_nobody_tried_is_refused_by_name() -> None:
    engine("1.3.7").check_version()
    engine("1.4.0").check_version(untried=True)

    assert not engine("1.4.0").works
    with pytest.raises(HookError, match=r"some-engine 1\.4\.0 was not tried .* only 1\.2, 1\.3"):
        engine("1.4.0").check_version()


def test_a_refused_feature_has_its_reason() -> None:
    with pytest.raises(HookError, match="y is refused with some-engine: it cannot"):
        engine("1.2").refuse("y")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="transformers, vllm, sglang; got 'tgi'"):
        capabilities("tgi")
