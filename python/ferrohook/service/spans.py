"""Attributes of OpenTelemetry's current span, where the package opentelemetry-api is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from opentelemetry import trace
except ModuleNotFoundError:
    trace = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Mapping


def current_span() -> Any:
    """Returns the span of this context that records; None without one."""
    if trace is None:
        return None
    span = trace.get_current_span()
    return span if span.is_recording() else None


def annotate(span: Any, attributes: Mapping[str, int]) -> None:
    """Sets attributes of a span of `current_span`, unless it has ended."""
    if span is not None and span.is_recording():
        span.set_attributes({f"ferrohook.{name}": value for name, value in attributes.items()})
