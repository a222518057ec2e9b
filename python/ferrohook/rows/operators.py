"""The operators of sites, for compiled or replayed graphs.

`steer`, `change`, `tap`, `run` and `run_in_place`.

The first three read tables of which only the contents change between calls. On the CPU, where their
kernels run in each call, these ask the site, and a call that it does not serve passes through.
`run` has no tables: it runs the hooks of the calling context's batch. So does `run_in_place`, for
graphs that are cut there: the graph replayed after it reads memory of the graph replayed before.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from ferrohook.effects.intervention import KINDS, number_dtype
from ferrohook.errors import HookError, HookTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

MISFIT = -(1 << 62)
"""Count of calls of a site that had an output which it cannot keep, or less."""
_ROWS = 1 << 32
_WIDER = {
    torch.float64: {torch.float64, torch.float32, torch.float16, torch.bfloat16},
    torch.float32: {torch.float32, torch.float16, torch.bfloat16},
}
"""Dtypes of tables, and those whose values they hold exactly."""


class Site(Protocol):
    """A site: kernels on the CPU ask it whom they serve, kernels on a GPU notify it of a use."""

    index: Tensor
    """Row of the table for each row of the batch, on the CPU."""
    calls: int
    """Calls that it served on the CPU, and their rows, as `calls_of` reads them."""

    def use(self) -> None:
        """Makes kernels on a GPU wait for the writes to the tables."""
        ...

    def serves(self, x: Tensor) -> bool:
        """Returns True for the output of a call that it serves."""
        ...

    def keeps(self) -> bool:
        """Returns True if rows of that call are kept."""
        ...


_SITES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def assign(rows: Tensor, site: object) -> None:
    """Makes `site` the one of a row of the tables, of `steer` or `tap`, or of a key of `run`."""
    _SITES[rows.data_ptr()] = site


def calls_of(count: int) -> tuple[int, int]:
    """Returns the calls that a site has counted, and the rows of all of them."""
    return count % _ROWS, count // _ROWS


def misfit(x: Tensor, table: Tensor, dim: int) -> str | None:
    """Returns why a site cannot serve an output; None if it can."""
    shape, width = x.shape, table.shape[-1]
    if len(shape) < dim + 2 or shape[-1] != width:
        return (
            f"a tensor of shape {tuple(shape)}, but sites need rows in dimension {dim} and a width "
            f"of {width}"
        )
    if x.dtype not in _WIDER.get(table.dtype, {table.dtype}):
        return (
            f"a tensor of {x.dtype}, but the sites have {table.dtype}: create them with its dtype"
        )
    if x.device != table.device or x.layout != table.layout:
        return f"a tensor of {x.layout} on {x.device}, but the sites are on {table.device}"
    return None


def _steer(x: Tensor, table: Tensor, index: Tensor, dim: int) -> Tensor:
    rows_of = _index(x, table, index, dim)
    if rows_of is None:
        return x.clone()
    rows = _rows(table, rows_of, x, dim)
    if len(rows_of) == x.shape[dim]:
        return _sum(x, rows)
    steered = x.clone()  # rows past those in the tables are padding
    own = steered.narrow(dim, 0, len(rows_of))
    own.copy_(_sum(own, rows))
    return steered


def _index(x: Tensor, table: Tensor, index: Tensor, dim: int) -> Tensor | None:
    """Returns the row of the tables for each row of an output; None if its call is not served."""
    site = _SITES.get(index.data_ptr())
    if x.is_cpu:
        return None if site is None or not site.serves(x) else site.index
    if site is not None:
        site.use()
    if (reason := misfit(x, table, dim)) is not None:
        msg = f"a site got {reason}"
        raise HookTypeError(msg)
    return index[: x.shape[dim]]


def _rows(
    table: Tensor, index: Tensor, x: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Takes the rows of a table, as they broadcast to an output with the rows in `dim`."""
    rows = table.index_select(0, index).to(dtype or x.dtype)
    inner = x.dim() - dim - 2
    return rows.view(len(rows), *[1] * inner, rows.shape[-1]) if inner else rows


def _change(  # noqa: PLR0913, PLR0917 (the tables of a kind)
    x: Tensor,
    residual: Tensor | None,
    table: Tensor,
    used: Tensor,
    operands: list[Tensor],
    index: Tensor,
    dim: int,
    kind: str,
) -> Tensor:
    rows_of = _index(x, table, index, dim)
    if rows_of is None:
        return x.clone()
    cls = KINDS[kind]
    own = x.narrow(dim, 0, len(rows_of))
    beside = None if residual is None else residual.narrow(dim, 0, len(rows_of))
    # As in a batch: numbers are more exact than the tensor where no vector has its dtype.
    dtype = None if cls.vector_field is not None else number_dtype(x.dtype)
    rows = [_rows(each, rows_of, x, dim, dtype) for each in operands]
    chosen = _rows(used, rows_of, x, dim, torch.bool)
    new = cls.formula(own if beside is None else own + beside, *rows).to(x.dtype)
    new = torch.where(chosen, new if beside is None else new - beside, own)
    if len(rows_of) == x.shape[dim]:
        return new
    changed = x.clone()  # as above
    changed.narrow(dim, 0, len(rows_of)).copy_(new)
    return changed


def _change_backward(_ctx: Any, _grad: Tensor) -> None:
    msg = "sites of the kinds in kinds= do not support gradients: open a batch without sites"
    raise HookError(msg)


def _sum(x: Tensor, rows: Tensor) -> Tensor:
    if not x.is_complex():
        return x + rows
    # Of complex numbers torch adds a product with one, which may change the sign of a zero.
    real, other = (torch.view_as_real(each.resolve_conj()) for each in (x, rows))
    return torch.view_as_complex(real + other)


def _like(x: Tensor, *_tables: Any) -> Tensor:
    return torch.empty_like(x)


# `run` has no gradient of its own: batches that such sites serve compute none.
def _passed_on(_ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


def _tap(x: Tensor, kept: Tensor, calls: Tensor, places: Tensor, dim: int) -> None:
    site = _SITES.get(places.data_ptr())
    if x.is_cpu:
        if site is None or not site.serves(x):
            return
        if site.keeps():  # else it costs nothing, as no graph is replayed
            rows = _flat(x, kept, places, dim)
            if rows is None:
                site.calls = MISFIT
                return
            places = places[: len(rows)]
            wanted = (places < len(kept) - 1).nonzero().flatten()
            kept.index_copy_(0, places[wanted], rows[wanted].to(kept.dtype))
        # After the copy: an interrupted copy must not count, or a request would read its rows.
        site.calls += x.shape[dim] * _ROWS + 1
        return
    if site is not None:
        site.use()
    rows = _flat(x, kept, places, dim) if misfit(x, kept, dim) is None else None
    if rows is None:
        calls.fill_(MISFIT)
        return
    kept.index_copy_(0, places[: len(rows)], rows.to(kept.dtype))
    calls.add_(x.shape[dim] * _ROWS + 1)


def _flat(x: Tensor, kept: Tensor, places: Tensor, dim: int) -> Tensor | None:
    """Returns the rows of an output as the table keeps them; None if they do not fit."""
    rows = x.movedim(dim, 0)[: len(places)]
    fits = rows.numel() == len(rows) * kept.shape[1]
    return rows.reshape(len(rows), kept.shape[1]) if fits else None


def _changed_by_hooks(x: Tensor, residual: Tensor | None, key: Tensor) -> Tensor | None:
    site = _SITES.get(key.data_ptr())
    return None if site is None else cast("Tensor | None", site.run(x, residual))


def _run(x: Tensor, residual: Tensor | None, key: Tensor, _order: Tensor) -> Tensor:
    changed = _changed_by_hooks(x, residual, key)
    return x.clone() if changed is None else changed


def _run_in_place(x: Tensor, residual: Tensor | None, key: Tensor, _order: Tensor) -> None:
    if (changed := _changed_by_hooks(x, residual, key)) is not None:
        x.copy_(changed)


def _nothing(*_tensors: Any) -> None:
    pass


# Not by `torch.library.custom_op`, whose wrappers take longer than the operators.
def _define(library: torch.library.Library) -> None:
    library.define("steer(Tensor x, Tensor table, Tensor index, SymInt dim) -> Tensor")
    library.define(
        "change(Tensor x, Tensor? residual, Tensor table, Tensor used, Tensor[] operands, "
        "Tensor index, SymInt dim, str kind) -> Tensor"
    )
    library.define(
        "tap(Tensor x, Tensor(a!) kept, Tensor(b!) calls, Tensor places, SymInt dim) -> ()"
    )
    # In a CUDA graph it would run once, when that is captured: Inductor cuts the graph around it.
    cut: Any = {"tags": (torch.Tag.cudagraph_unsafe,)}
    library.define("run(Tensor x, Tensor? residual, Tensor key, Tensor order) -> Tensor", **cut)
    library.define(
        "run_in_place(Tensor(a!) x, Tensor? residual, Tensor key, Tensor(b!) order) -> ()", **cut
    )
    # Hooks see values in the order of the model. A graph keeps that order and drops no hook, as
    # each `run` reads the tensor that the `ran` before it is declared to write.
    library.define("ran(Tensor x, Tensor(a!) order) -> ()", **cut)  # of a tensor on the CPU
    operators: list[tuple[str, Callable[..., Any], Callable[..., Any], Any]] = [
        ("steer", _steer, _like, _passed_on),
        ("change", _change, _like, _change_backward),
        ("tap", _tap, _nothing, None),
        ("run", _run, _like, _passed_on),
        ("run_in_place", _run_in_place, _nothing, None),
        ("ran", _nothing, _nothing, None),
    ]
    for name, function, fake, backward in operators:
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ferrohook::{name}", fake, lib=library)
        if backward is not None:
            torch.library.register_autograd(f"ferrohook::{name}", backward, lib=library)


class _Definition:
    """The operators' library: whole, or taken back by the next attempt."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: list[torch.library.Library] = []
        self._whole = False

    def complete(self) -> None:
        with self._lock:
            if self._whole:
                return
            while self._attempts:  # interrupted
                self._attempts[-1]._destroy()
                self._attempts.pop()
            self._attempts.append(torch.library.Library("ferrohook", "FRAGMENT"))
            _define(self._attempts[-1])
            self._whole = True


_DEFINITION = _Definition()


def define() -> None:
    """Defines the operators, once.

    `torch.ops.ferrohook.steer(x, table, index, dim)` returns `x` plus a row of the table for each
    of its rows; `change(x, residual, table, used, operands, index, dim, kind)` applies the formula
    of a kind of intervention to the rows of `x`, or of its sum with a residual, whose row of the
    tables is `used`; `tap(x, kept, calls,
    places, dim)` copies rows of `x` to their places and counts the call. On the CPU the site has
    the index and the count. `run(x, residual, key, order)` returns `x` after the hooks of the batch
    at the site of the key, and `ran(x, order)` keeps the next `run` after it. `run_in_place(x,
    residual, key, order)` changes `x` instead.
    """
    _DEFINITION.complete()
