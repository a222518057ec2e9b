"""Step maps: whose rows one forward of an engine has."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class Span(NamedTuple):
    """Rows of one request in a step: `rows` of them from `first_row` on."""

    request_id: str
    first_row: int
    rows: int
    position: int
    """Absolute position in the request of the first row."""
    prompt_length: int
    wants_logits: bool = True
    """True if the last row's logits are computed."""


class Step:
    """Immutable map of the rows of one forward to the requests of an engine.

    Rows that no span covers are unowned: padding, dummy batches.

    Args:
        spans: in order of their rows.
        rows: rows of the forward, padding included; None for the rows of the spans.

    Raises:
        HookError: spans overlap, lie outside the rows, or name a request twice.
    """

    __slots__ = ("__dict__", "rows", "spans")

    def __init__(self, spans: Iterable[Span], rows: int | None = None) -> None:
        self.spans = tuple(spans)
        end = 0
        for span in self.spans:
            if span.first_row < end or span.rows < 1 or span.position < 0:
                msg = f"spans of a step are in order and do not overlap; got {span} at row {end}"
                raise HookError(msg)
            end = span.first_row + span.rows
        self.rows = end if rows is None else rows
        if end > self.rows:
            msg = f"a step of {self.rows} rows has no row {end - 1}, as {self.spans[-1]} says"
            raise HookError(msg)
        if len(self.request_ids) != len(self.spans):
            msg = f"a request has one span in a step; got {self.spans}"
            raise HookError(msg)

    @cached_property
    def request_ids(self) -> frozenset[str]:
        """The requests that have rows."""
        return frozenset(span.request_id for span in self.spans)

    @cached_property
    def positions(self) -> Tensor:
        """Absolute position of each row in its request; -1 for an unowned row."""
        values = [-1] * self.rows
        for _, first, rows, position, _, _ in self.spans:
            values[first : first + rows] = range(position, position + rows)
        return torch.tensor(values, dtype=torch.long)

    @cached_property
    def logits_rows(self) -> list[int]:
        """Rows whose logits are computed, in order: the rows that a sliced `lm_head` sees."""
        return [span.first_row + span.rows - 1 for span in self.spans if span.wants_logits]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return (self.spans, self.rows) == (other.spans, other.rows)

    def __hash__(self) -> int:
        return hash((self.spans, self.rows))

    def __repr__(self) -> str:
        spans = ", ".join(
            f"{span.request_id!r}: rows {span.first_row}..{span.first_row + span.rows - 1} "
            f"from position {span.position}"
            for span in self.spans
        )
        return f"<Step of {self.rows} rows; {spans}>"
