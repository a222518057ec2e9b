"""Rows and plans of the tickets that share a forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch import Tensor

from ferrohook.detectors import NativeDetector
from ferrohook.errors import RowsError
from ferrohook.plans.entries import HookEntry
from ferrohook.plans.needs import NEEDS, BackEnd

if TYPE_CHECKING:
    from ferrohook.plans import Request
    from ferrohook.service.waiting import WaitingRequest

In = TypeVar("In")

BACK_END: Final = BackEnd(NEEDS - {"gradients", "python", "stop"}, {})
"""Back end of forwards that requests share: others are served separately."""


def consecutive(tickets: Iterable[WaitingRequest[In]]) -> dict[WaitingRequest[In], slice]:
    """Returns the rows of each ticket in a batch."""
    ends = accumulate(ticket.rows for ticket in tickets)
    return {
        ticket: slice(end - ticket.rows, end) for ticket, end in zip(tickets, ends, strict=True)
    }


def check_rows(arguments: Any, dim: int, rows: int) -> None:
    """Validates that tensors of a batch have the rows that its requests say they have.

    Raises:
        RowsError: no tensor among the arguments has them.
    """
    if isinstance(arguments, Mapping):
        arguments = tuple(arguments.values())
    elif not isinstance(arguments, tuple):
        arguments = (arguments,)
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    if tensors and not any(each.dim() > dim and each.shape[dim] == rows for each in tensors):
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        msg = (
            f"collate returned {shapes} for items with {rows} rows in dimension {dim}: pass rows= "
            "for each item"
        )
        raise RowsError(msg)


def shares_forwards(request: Request) -> bool:
    """Returns True if a request may share forwards.

    Python functions might block the others' forward, and `stop` would end it.
    """
    found = zip(request.entries, request.prepared.needs, strict=True)
    return all(BACK_END.refusal(entry, needs=needs) is None for entry, needs in found)


def changes(request: Request | None) -> bool:
    """Returns True if a request's plan has hooks, detectors aside."""
    return request is not None and any(
        isinstance(entry, HookEntry) and not isinstance(entry.hook, NativeDetector)
        for entry in request.entries
    )
