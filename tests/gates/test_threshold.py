"""Thresholds of gates, against a search by hand."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from support.language_models import language_model

pytest.importorskip("transformers")

WIDTH = 8
LAYER = "model.layers.0"
GATE = fh.gate("g", LAYER, fh.Dot(torch.eye(WIDTH)[0]), at=slice(1, None))


@functools.cache
def model() -> Any:
    return language_model("llama", WIDTH)


def texts(count: int, seed: int) -> Tensor:
    return torch.randint(1, 32, (count, 6), generator=torch.Generator().manual_seed(seed))


def by_hand(ids: Tensor) -> list[float]:
    with torch.no_grad(), fh.capture(model(), LAYER) as acts:
        model()(ids)
    return acts[LAYER][:, 1:, 0].amax(1).tolist()


def close(found: Tensor, right: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(right).double(), atol=1e-5, rtol=1e-4)


def test_the_best_threshold_has_the_best_f1() -> None:
    yes, no = texts(7, 1), texts(9, 2)
    found = fh.analysis.threshold(model(), GATE, yes, no)
    own, others = by_hand(yes), by_hand(no)
    close(found.yes, own)
    close(found.no, others)

    def f1(limit: float) -> float:
        true, false = sum(it > limit for it in own), sum(it > limit for it in others)
        return 2 * true / (true + false + len(own))

    scores = sorted(own + others)
    limits = [scores[0] - 1 - abs(scores[0]), *((a + b) / 2 for a, b in itertools.pairwise(scores))]
    assert f1(found.best) == max(map(f1, limits))
    assert float(found.f1.max()) == pytest.approx(f1(found.best))
    pairs = [(a > b) + (a == b) / 2 for a in own for b in others]
    assert found.area == pytest.approx(sum(pairs) / len(pairs))
    assert (float(found.hits[0]), float(found.false_alarms[0])) == (1, 1)
    assert (float(found.hits[-1]), float(found.false_alarms[-1])) == (0, 0)
    plan = fh.Plan(GATE, fh.on("model.layers.1", fh.Zero(), when=fh.above("g", found.best)))
    fired = 0
    for ids in yes:
        acts = fh.run(model(), ids[None], plan=plan + fh.Plan(fh.keep("model.layers.1"))).acts
        fired += bool((acts["model.layers.1"] == 0).all(-1).any())
    at = int((found.thresholds - found.best).abs().argmin())
    assert fired == round(float(found.hits[at]) * len(yes))


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 1.0])
def test_a_rate_of_false_alarms_is_kept(rate: float) -> None:
    found = fh.analysis.threshold(model(), GATE, texts(7, 1), texts(9, 2), false_alarms=rate)
    alarms = sum(score > found.best for score in found.no.tolist()) / 9
    assert alarms <= rate
    lower = [float(it) for it in found.thresholds if it < found.best]
    assert all(sum(score > it for score in found.no.tolist()) / 9 > rate for it in lower)


def test_padding_counts_by_the_mask() -> None:
    ids, mask = texts(2, 3), torch.ones(2, 6, dtype=torch.long)
    ids[1, :3], mask[1, :3] = 0, 0
    found = fh.analysis.threshold(
        model(), GATE, {"input_ids": ids, "attention_mask": mask}, texts(2, 4)
    )
    close(found.yes, [*by_hand(ids[:1]), *by_hand(ids[1:, 3:])])


def test_a_prompt_s_value_counts_where_the_gate_reads_early_tokens_only() -> None:
    gate = fh.gate("g", LAYER, fh.Dot(torch.eye(WIDTH)[0]), at=slice(0, 2), over="prompt", by="min")
    ids = texts(3, 5)
    found = fh.analysis.threshold(model(), gate, ids, texts(3, 6))
    with torch.no_grad(), fh.capture(model(), LAYER) as acts:
        model()(ids)
    close(found.yes, acts[LAYER][:, :2, 0].amin(1).tolist())


def test_a_text_without_a_value_never_fires() -> None:
    gate = fh.gate("g", LAYER, fh.Dot(torch.eye(WIDTH)[0]), over=fh.window(4))
    found = fh.analysis.threshold(model(), gate, texts(3, 5), texts(3, 6)[:, :2])
    assert found.no.tolist() == [-torch.inf] * 3
    assert found.best < float(found.yes.min())


def test_the_table_marks_the_threshold() -> None:
    found = fh.analysis.threshold(model(), GATE, texts(40, 1), texts(40, 2))
    lines = repr(found).splitlines()
    assert lines[0].split() == ["threshold", "hits", "false", "alarms", "F1"]
    assert len(lines) <= 22
    assert sum("*" in line for line in lines) == 1
    pytest.importorskip("pandas")
    assert len(found.to_pandas()) == len(found.thresholds)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gate": "g"}, fh.HookTypeError, "gate must be the result of fh.gate"),
    ({"yes": "text"}, fh.HookTypeError, "yes must contain a tensor with one row per text"),
    ({"false_alarms": 2}, ValueError, "false_alarms must be from 0 to 1"),
    ({"false_alarms": "1"}, fh.HookTypeError, "false_alarms must be a number"),
    (
        {"gate": fh.gate("g", LAYER, fh.Norm(), over=fh.window(9))},
        fh.HookError,
        "gate 'g' has no value in any text",
    ),
    ({"gate": fh.gate("g", LAYER, fh.Norm(), lag=1)}, ValueError, "at generated tokens only"),
    ({"gate": fh.gate("g", "missing", fh.Norm())}, fh.SelectionError, "missing"),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_bad_arguments_are_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {"gate": GATE, "yes": texts(1, 1), "no": texts(1, 2)} | changes
    with pytest.raises(error) as caught:
        fh.analysis.threshold(model(), **given)
    assert words in str(caught.value)
