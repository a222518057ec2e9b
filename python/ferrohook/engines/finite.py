"""Rows that a plan made NaN or infinite, told before others read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ferrohook.engines.steps import Span

LIMIT = 1e30
"""Magnitude from which keys and values count as infinite: a product with the queries of others may
overflow, and infinity plus a mask of minus infinity is NaN."""


def failure(what: str) -> HookError:
    """Makes the failure of a request."""
    msg = f"the plan of the request made its rows NaN, infinite or larger than {LIMIT}: {what}"
    return HookError(msg)


def without_non_finite(
    tensor: Tensor, spans: Iterable[Span], dim: int
) -> tuple[Tensor, frozenset[str]]:
    """Zeroes the numbers of some requests that are NaN, infinite or beyond `LIMIT`.

    Costs one reduction where there are none.

    Args:
        tensor: keys or values of a step.
        spans: the rows of the requests.
        dim: dimension of the rows.

    Returns:
        The tensor, a copy if numbers were zeroed; ids of the requests that had some.
    """
    if bool(torch.linalg.vector_norm(tensor, torch.inf) < LIMIT):
        return tensor, frozenset()
    tensor, found = tensor.clone(), set()
    for span in spans:
        rows = tensor.narrow(dim, span.first_row, span.rows)
        # NaN is not below anything.
        if bool((bad := ~(rows.abs() < LIMIT)).any()):
            rows.masked_fill_(bad, 0)
            found.add(span.request_id)
    return tensor, frozenset(found)


def is_finite(rows: Tensor) -> bool:
    """Returns False if a number is NaN or infinite, by one reduction."""
    return bool(torch.linalg.vector_norm(rows, torch.inf).isfinite())


def lost_rows(logits: Tensor) -> list[int]:
    """Returns the rows of logits (rows, vocabulary) from which no token can be drawn.

    Those with NaN or plus infinity, or without any finite number: some models mask tokens by minus
    infinity.
    """
    found: list[int] = (~logits.amax(-1).isfinite()).nonzero().flatten().tolist()
    return found
