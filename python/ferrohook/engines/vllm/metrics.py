"""Counts of an engine's plans, for Prometheus: vLLM's `/metrics` shows them beside its own."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter

PLANS: Final = Counter("ferrohook_plans", "Requests with a plan that were admitted")
FAILURES: Final = Counter("ferrohook_failures", "Requests whose plan failed while they ran")
ROWS: Final = Counter("ferrohook_rows", "Tokens of finished requests with a plan")
CAPTURES: Final = Counter("ferrohook_captures", "Captures fetched by clients")
BYTES: Final = Counter("ferrohook_captured_bytes", "Bytes of the captures fetched by clients")


def fetched(data: bytes) -> None:
    """Counts captures that a client gets."""
    CAPTURES.inc()
    BYTES.inc(len(data))
