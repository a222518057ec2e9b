"""`sites`: lays operators in the modules of a model before it is compiled."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch

from ferrohook.errors import HookError, HookTypeError
from ferrohook.names.select import select
from ferrohook.plans.placing import width_of
from ferrohook.rows.site_hooks import HookSites
from ferrohook.rows.site_kinds import check_kinds
from ferrohook.rows.site_tables import TableForm, TableSites, bytes_of_tables
from ferrohook.rows.sites import Sites, open_sites
from ferrohook.util.arguments import (
    OutputIndex,
    at_least,
    check_output_index,
    expect_module,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from ferrohook.effects.intervention import Intervention
    from ferrohook.names.select import Selector

_LOG: Final = logging.getLogger("ferrohook")


def sites(  # noqa: PLR0913 (all but the first two by keyword)
    model: nn.Module,
    what: Selector,
    *,
    outside: Selector | None = None,
    max_requests: int | None = None,
    max_rows: int | None = None,
    dim: int = 0,
    output_index: OutputIndex = None,
    width: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    kinds: Sequence[type[Intervention]] = (),
) -> Sites:
    """Installs operators in modules, so that one compiled model serves changing requests.

    Open the sites before the model is compiled. From then on `batch` serves the requests of this
    model through them, eager or compiled, and nothing is traced again.

    **Without tables**, the default, an operator `ferrohook::run` in the graph runs the hooks of the
    calling context's batch, as an eager call does: interventions, captures, gates, conditions,
    strengths, features and ends of requests at the outputs of the sites. Many threads may be served
    at a time. It runs Python in each call, so no CUDA graph can be captured around it (Inductor
    cuts its graphs there), and it computes no gradients: enter batches inside `torch.no_grad()`.

    **With tables**, for graphs that are replayed, pass `max_requests` and `max_rows`: a batch
    changes only the contents of tables. `ferrohook::steer` adds the vectors of `Add` to their rows,
    `ferrohook::change` runs the formulas of the other `kinds`, `ferrohook::tap` keeps the rows of
    `keep`. Such sites serve one batch at a time; captures are of one call in each batch (or between
    two calls of `Batch.move`).

    Entering a batch raises an error for anything that sites cannot serve: a plan with other
    features or modules; hooks of the request itself; a site in `gathered`; a batch without `size`
    or positions.

    A call in which the rows are not found fails the requests that have hooks at the site, as in any
    batch. With tables on the CPU each call checks its batch: a failed, closed or late request stops
    at once, and calls in contexts that have not entered the batch are not served. A GPU has one
    table for all calls: run no other calls during the batch. There a request that ends stays
    steered until the next batch or `move`, and a call with other rows than the batch is noticed
    only at a site that captures. The model may run on another stream than the batch is entered on.
    The stream of a replayed graph is unknown: inside the batch, make the two streams wait for each
    other before and after the replay.

    In tables, several vectors that a request adds at a site are added up first. Then one
    intervention of each of `kinds` acts, in their order; a plan with another order is refused.
    Gradients flow only through `Add`. The bytes of the tables are logged, at level INFO, before
    they are allocated.

    Args:
        model: the model, as plans are prepared for it.
        what: modules that become sites, see `select`. Their output is a tensor; in tables, with the
            rows in `dim` and `width` as last dimension.
        outside: modules that are called outside of the graph, such as a head that is not compiled,
            see `select`: hooks run there as without sites. Not with tables.
        max_requests: number of plans in a batch; None for no tables.
        max_rows: number of rows of a batch, padding included; None for no tables.
        dim: dimension of the rows in tables.
        output_index: the tensor in an output that is a tuple, or `"sum"`: of hidden state and
            residual; the hidden state takes the changes, and the sum is kept.
        width: last dimension in tables; None for `hidden_size` of the model's `config`, or for the
            width of a Linear, Embedding or LayerNorm.
        dtype: of the tables and their captures: the dtype of the outputs or a wider one; None for
            the dtype of the model's first parameter of floating point.
        device: of the tables; None for the device of the model's first parameter.
        kinds: kinds of interventions that tables serve besides `Add`, your own included, such as
            `(fh.Ablate, fh.Scale)`. Each costs a step at each site, used or not.

    Raises:
        HookTypeError: an argument has the wrong type, `width` is not known, or an argument of
            tables is given without `max_requests` and `max_rows`.
        SelectionError: `what` matches nothing.
        HookError: the model has open sites, or a module cannot be instrumented.

    Examples:
        >>> with fh.rows.sites(model, "layers.*"):
        ...     compiled = torch.compile(model, fullgraph=True)
        ...     rows = {a: slice(0, 4), b: slice(4, 9)}
        ...     with torch.no_grad(), fh.batch(rows, size=9):
        ...         compiled(x)
    """
    expect_module(model, "sites needs")
    check_output_index(output_index, "output_index of sites")
    if open_sites(model) is not None:
        msg = "the model already has sites: close them first"
        raise HookError(msg)
    if max_requests is None or max_rows is None:
        options = {
            "max_requests": max_requests,
            "max_rows": max_rows,
            "dim": dim or None,
            "width": width,
            "dtype": dtype,
            "device": device,
            "kinds": kinds or None,
        }
        if given := [name for name, value in options.items() if value is not None]:
            msg = (
                f"{given[0]} is an argument of tables: pass both max_requests and max_rows, or "
                "leave it out"
            )
            raise HookTypeError(msg)
        others = {} if outside is None else select(model, outside, called=True)
        parts = dict.fromkeys(select(model, what, called=True), output_index)
        return HookSites(model, parts, outside=[*others]).opened()
    if outside is not None:
        msg = "outside is an argument of sites without tables: leave it out"
        raise HookTypeError(msg)
    max_requests = at_least(1, "max_requests", max_requests)
    max_rows = at_least(1, "max_rows", max_rows)
    check_kinds(kinds)
    modules = select(model, what, called=True)
    if width is None:
        width = _width(model, modules)
    parameter = next((each for each in model.parameters() if each.is_floating_point()), None)
    if parameter is not None:
        dtype, device = dtype or parameter.dtype, device or parameter.device
    dtype, device = dtype or torch.get_default_dtype(), device or "cpu"
    like = {"dtype": dtype, "device": device}
    with torch.inference_mode(mode=False):
        width = at_least(1, "width", width)
        size = bytes_of_tables(len(modules), max_requests, max_rows, width, dtype, kinds=kinds)
        _LOG.info(
            "ferrohook: the tables of %d sites take %s bytes on %s: %s requests and %s rows of "
            "width %s in %s",
            *(len(modules), f"{size:,}", device, f"{max_requests:,}", f"{max_rows:,}"),
            *(f"{width:,}", dtype),
        )
        form = TableForm(max_requests, max_rows, width, dim, output_index, like, tuple(kinds))
        made = TableSites(model, [*modules], form)
    return made.opened()


def _width(model: nn.Module, modules: dict[str, nn.Module]) -> int:
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    hidden = getattr(config, "hidden_size", None)
    if isinstance(hidden, int):
        return hidden
    widths = {*map(width_of, modules.values())}
    (known,) = widths if len(widths) == 1 else (None,)
    if known is None:
        msg = "the width of the sites' tensors is not known: pass width="
        raise HookTypeError(msg)
    return known
