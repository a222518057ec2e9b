"""Metrics of a batcher, and attributes of spans."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from ferrohook.service import Batcher, BatcherMetrics, PreparedPlans
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Identity())


@pytest.fixture
def batcher(model: nn.Sequential) -> Iterator[Batcher[Tensor, Tensor]]:
    with Batcher(
        model, torch.cat, lambda output, rows: output[rows], max_requests=4, max_wait=LIMIT
    ) as batcher:
        yield batcher


ADD = fh.Plan(fh.on("0", fh.Add(torch.ones(2))))
KEEP = fh.Plan(fh.keep("1"))
BAD = fh.Plan(fh.on("0", fh.Add(torch.ones(3))))
PLANS = ((None, 1), (ADD, 2), (KEEP, 3), (BAD, 4))
"""A plan and rows of each request."""


def send_all(model: nn.Sequential, batcher: Batcher[Tensor, Tensor]) -> list[Any]:
    """Sends a request for each plan; returns answers and errors."""
    plans = PreparedPlans(model)
    futures = []
    for plan, rows in PLANS:
        opened = None if plan is None else plans.prepare(plan).open
        futures.append(batcher.submit(torch.zeros(rows, 2), opened, rows=rows))
    return [future.exception(LIMIT) or future.result() for future in futures]


def test_metrics(model: nn.Sequential, batcher: Batcher[Tensor, Tensor]) -> None:
    registry = CollectorRegistry()
    registry.register(BatcherMetrics(batcher))
    answers = send_all(model, batcher)
    assert [type(each).__name__ for each in answers] == ["Answer"] * 3 + ["HookTypeError"]
    batcher.submit(torch.zeros(1, 2), alone=True).result(LIMIT)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    bounds = {f"{2**power}.0": 1 + (power >= 2) for power in range(9)}
    assert found == {
        **{
            ("ferrohook_forward_requests_bucket", bound.removesuffix(".0")): float(forwards)
            for bound, forwards in bounds.items()
        },
        ("ferrohook_forward_requests_bucket", "+Inf"): 2,
        ("ferrohook_forward_requests_count",): 2,
        ("ferrohook_forward_requests_sum",): 5,
        ("ferrohook_rows_seen_total",): 2 + 3 + 4,
        ("ferrohook_rows_changed_total",): 2,
        ("ferrohook_hooks_failed_total",): 1,
        ("ferrohook_requests_waiting",): 0,
    }


def test_metrics_of_several_batchers_differ_by_namespace(
    batcher: Batcher[Tensor, Tensor],
) -> None:
    registry = CollectorRegistry()
    registry.register(BatcherMetrics(batcher))
    registry.register(BatcherMetrics(batcher, namespace="other"))
    assert registry.get_sample_value("other_rows_seen_total") == 0


def test_spans_get_attributes(model: nn.Sequential, batcher: Batcher[Tensor, Tensor]) -> None:
    trace = pytest.importorskip("opentelemetry.trace")

    class Span(trace.NonRecordingSpan):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(trace.INVALID_SPAN_CONTEXT)
            self.attributes: dict[str, int] = {}

        def is_recording(self) -> bool:
            return True

        def set_attributes(self, attributes: dict[str, int]) -> None:
            self.attributes |= attributes

    plans, spans, futures = PreparedPlans(model), [], []
    for plan, rows in PLANS:
        spans.append(Span())
        opened = None if plan is None else plans.prepare(plan).open
        with trace.use_span(spans[-1]):
            futures.append(batcher.submit(torch.zeros(rows, 2), opened, rows=rows))
    for future in futures:
        future.exception(LIMIT)
    assert [span.attributes for span in spans] == [
        {
            "ferrohook.forward.requests": 4,
            "ferrohook.rows.seen": seen,
            "ferrohook.rows.changed": changed,
            "ferrohook.hooks.failed": failed,
        }
        for seen, changed, failed in ((0, 0, 0), (2, 2, 0), (3, 0, 0), (4, 0, 1))
    ]


def test_spans_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "ferrohook.service.spans")
    spans = importlib.import_module("ferrohook.service.spans")
    assert spans.current_span() is None
    spans.annotate(None, {"rows.seen": 1})
