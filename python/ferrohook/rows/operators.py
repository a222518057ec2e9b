"""The operators of sites, for graphs that are compiled or replayed: `steer` and `tap`.

They read tables whose contents alone change between calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("ferrohook::steer", mutates_args=())
def _steer(x: Tensor, table: Tensor, index: Tensor, dim: int) -> Tensor:
    rows = table.index_select(0, index[: x.shape[dim]])
    return x + _spread(rows, x, dim)


@_steer.register_fake
def _(x: Tensor, *_tables: Any) -> Tensor:
    return torch.empty_like(x)


def _steer_backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


torch.library.register_autograd("ferrohook::steer", _steer_backward)


@torch.library.custom_op("ferrohook::tap", mutates_args=("kept", "calls"))
def _tap(x: Tensor, kept: Tensor, calls: Tensor, places: Tensor, dim: int) -> None:
    calls.add_(1)
    places = places[: x.shape[dim]]
    rows = x.movedim(dim, 0)
    if x.device.type == "cpu":
        # Without a graph to replay, rows that nobody keeps cost nothing.
        wanted = (places < len(kept) - 1).nonzero().flatten()
        if not len(wanted):
            return
        places, rows = places[wanted], rows[wanted]
    kept.index_copy_(0, places, rows.reshape(len(places), -1).to(kept.dtype))


@_tap.register_fake
def _(x: Tensor, kept: Tensor, calls: Tensor, places: Tensor, dim: int) -> None:
    pass


def _spread(rows: Tensor, x: Tensor, dim: int) -> Tensor:
    """Returns (rows, width) in the shape that a tensor with the rows in `dim` takes."""
    between = x.dim() - dim - 2
    return rows.to(x.dtype).view(rows.shape[0], *[1] * between, rows.shape[1])


steer = torch.ops.ferrohook.steer
"""`steer(x, table, index, dim)`: `x` plus a row of the table for each of its rows."""
tap = torch.ops.ferrohook.tap
"""`tap(x, kept, calls, places, dim)`: copies rows of `x` to their places, and counts the call."""
