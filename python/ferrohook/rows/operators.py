"""The operators of sites, for graphs that are compiled or replayed: `steer` and `tap`.

They read tables whose contents alone change between calls. On the CPU, where their kernels run in
each call, they do nothing in a context that the batch is not entered in.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ferrohook.errors import HookTypeError

MISFIT = -1
"""Count of calls of a site whose output is not of (rows, width)."""


class Owner(Protocol):
    """Owner of tables."""

    def serves_here(self) -> bool:
        """True in a context that has entered the batch that it serves."""
        ...

    def keeps(self) -> bool:
        """True if rows of the batch that it serves are kept."""
        ...


_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def own(rows: Tensor, owner: Owner) -> None:
    """Makes `owner` the one of a site's rows, those of `steer` or `tap`."""
    _OWNERS[rows.data_ptr()] = owner


def _owner(x: Tensor, rows: Tensor) -> Owner | None:
    """Returns the owner on the CPU, where a kernel may ask it."""
    return _OWNERS.get(rows.data_ptr()) if x.is_cpu else None


# Not by `torch.library.custom_op`, whose wrappers take longer than the operators.
_LIBRARY: Final = torch.library.Library("ferrohook", "FRAGMENT")
_LIBRARY.define("steer(Tensor x, Tensor table, Tensor index, SymInt dim) -> Tensor")
_LIBRARY.define("tap(Tensor x, Tensor(a!) kept, Tensor(b!) calls, Tensor places, SymInt dim) -> ()")


def _steer(x: Tensor, table: Tensor, index: Tensor, dim: int) -> Tensor:
    owner = _owner(x, index)
    if owner is not None and not owner.serves_here():
        return x.clone()
    shape, width = x.shape, table.shape[1]
    if len(shape) < dim + 2 or shape[-1] != width:
        msg = (
            f"sites of the width {width} with rows in dimension {dim} got a tensor of the "
            f"shape {tuple(shape)}"
        )
        raise HookTypeError(msg)
    rows = table.index_select(0, index[: shape[dim]])
    if rows.dtype != x.dtype:
        rows = rows.to(x.dtype)
    count = rows.shape[0]
    if len(shape) > dim + 2:
        rows = rows.view(count, *[1] * (len(shape) - dim - 2), width)
    if count == shape[dim]:
        return x + rows
    steered = x.clone()  # rows behind those of the tables are nobody's
    steered.narrow(dim, 0, count).add_(rows)
    return steered


_LIBRARY.impl("steer", _steer, "CompositeExplicitAutograd")


def _steer_fake(x: Tensor, *_tables: Any) -> Tensor:
    return torch.empty_like(x)


torch.library.register_fake("ferrohook::steer", _steer_fake)


def _steer_backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


torch.library.register_autograd("ferrohook::steer", _steer_backward)


def _tap(x: Tensor, kept: Tensor, calls: Tensor, places: Tensor, dim: int) -> None:
    owner = _owner(x, places)
    if owner is not None:
        if not owner.serves_here():
            return
        if not owner.keeps():
            calls.add_(1)
            return
    rows = x.movedim(dim, 0)[: len(places)]
    if rows.numel() != len(rows) * kept.shape[1]:
        calls.fill_(MISFIT)
        return
    calls.add_(1)
    places = places[: len(rows)]
    rows = rows.reshape(len(rows), -1)
    if owner is not None:
        # Without a graph to replay, rows that nobody keeps cost nothing.
        wanted = (places < len(kept) - 1).nonzero().flatten()
        if not len(wanted):
            return
        places, rows = places[wanted], rows[wanted]
    kept.index_copy_(0, places, rows.to(kept.dtype))


_LIBRARY.impl("tap", _tap, "CompositeExplicitAutograd")


def _tap_fake(*_tables: Any) -> None:
    pass


torch.library.register_fake("ferrohook::tap", _tap_fake)

steer = torch.ops.ferrohook.steer
"""`steer(x, table, index, dim)`: `x` plus a row of the table for each of its rows."""
tap = torch.ops.ferrohook.tap
"""`tap(x, kept, calls, places, dim)`: copies rows of `x` to their places, and counts the call."""
