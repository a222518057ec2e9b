"""`batch`: the requests of a forward, and their rows."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ferrohook._core import BatchBase
from ferrohook.captures.capture import Capture
from ferrohook.errors import HookError, HookTypeError, NeverFiredWarning, RowsError
from ferrohook.names.select import select
from ferrohook.plans import Request
from ferrohook.registration.scopes import Scope
from ferrohook.rows.sites import open_sites
from ferrohook.util.arguments import at_least, expect

if TYPE_CHECKING:
    from ferrohook._core import Frame
    from ferrohook.rows.sites import Sites

    Span: TypeAlias = tuple[Any, int, int, int, int]
    """Span of a request in a step: any, first row, rows, first position, length of the prompt."""

RowNumbers: TypeAlias = "int | slice | Sequence[int] | Tensor"
"""Rows of a dimension: one, a slice, numbers, or an index tensor."""
Index: TypeAlias = "Tensor | Callable[..., Tensor]"
Gathered: TypeAlias = "Mapping[Any, Index | tuple[Index, int]]"
GatheredModule: TypeAlias = "tuple[nn.Module, Index, int | None]"
"""A module, the rows of its tensors, and their dimension: None for the batch's."""
Lengths: TypeAlias = "Mapping[Any, int | Sequence[int]]"


class Batch(BatchBase, Scope):
    """A forward that many requests share, see `batch`.

    A scope: hooks registered with it see the whole batch, and `wrap` and `activate` take it to
    other threads.
    """

    _sited: weakref.ref[nn.Module] | None = None
    """Model whose sites serve it, if it has some."""
    _sites: Sites | None = None
    warns = True
    """Warns as it is left of members no module of which ran; `silent` lists them."""

    def _begin_service(self) -> None:
        """Makes the sites of the model serve it; called as it is entered, while any are open."""
        self._sites = None if self._sited is None else open_sites(self._sited())
        if self._sites is not None:
            self._sites.begin_service(self)

    def move(self, positions: Tensor, lengths: Lengths | None = None) -> None:
        """Sets the positions of the rows for the calls from now on, see `batch`.

        For a batch around several calls with the same rows, such as a generation: call it before
        each call, or in a `forward_pre` hook on the model ahead of all others.

        Raises:
            HookTypeError: `positions` is not a tensor of ints, or `lengths` has no ints.
            RowsError: it has another shape than the batch, or the length of a prompt is needed and
                not known.
            HookError: the batch was left.
        """
        if self.closed:
            msg = "this batch was left: it runs no more calls, so it cannot move"
            raise HookError(msg)
        self._set(positions, lengths)
        if self._entered is not None:  # until then the members may be in another batch
            self._moved()

    def _set(self, positions: Tensor, lengths: Lengths | None) -> None:
        """Sets the positions of the rows."""
        size = _check_positions(positions, self.dim, self.size)
        if self.size is None and self._named > size:
            msg = f"row {self._named - 1} is out of range: positions has {size} rows"
            raise RowsError(msg)
        columns = None if positions.dim() == 1 else positions.shape[1]
        values = positions.cpu().flatten().tolist()  # the one wait for a GPU
        self._set_positions(size, values, columns, {} if lengths is None else dict(lengths))

    def _moved(self) -> None:
        """Finds the tokens at the positions of plans; called after the positions were set."""
        self._place()
        if self._sites is not None:
            self._sites.moved(self)

    def _end_service(self) -> None:
        """Ends the service of its sites; called as the batch is left."""
        if self._sites is not None:
            self._sites.end_service(self)

    @property
    def errors(self) -> dict[Frame, BaseException]:
        """The exceptions of the members that failed."""
        return {each: each.error for each in self.members if each.failed and each.error is not None}

    @property
    def silent(self) -> list[Frame]:
        """The members that did not fail, but none of whose hooked modules ran in the batch."""
        ran = zip(self.members, self._ran, strict=True)
        return [each for each, ran in ran if not ran and each._hooked and not each.failed]

    def _warn_of_silence(self) -> None:
        """Warns of silent members, once for each plan; called as the batch is left."""
        if not self.warns:
            return
        silent = [
            each for each in self.silent if not isinstance(each, Request) or each.warns_first()
        ]
        if silent:
            others = f", nor of {len(silent) - 1} others" if len(silent) > 1 else ""
            msg = (
                f"no module with a hook of {silent[0]!r} ran in the batch{others}: inside `with`, "
                "call the model that it was made for"
            )
            warnings.warn(msg, NeverFiredWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "left" if self.closed else "new" if self._entered is None else "entered"
        return f"<Batch of {len(self.members)}, {state}>"


def batch(  # noqa: PLR0913 (all but the first two by keyword)
    rows: Mapping[Any, RowNumbers],
    dim: int = 0,
    *,
    size: int | None = None,
    positions: Tensor | None = None,
    lengths: Lengths | None = None,
    gathered: Gathered | None = None,
    warn: bool = True,
) -> Batch:
    """Makes a context whose calls serve many requests, each on its own rows.

    A request's hooks get arguments and output in which each tensor that has the rows of the batch
    along `dim` is narrowed to the request's rows: a view if they are a slice, else a copy. A hook
    changes only these rows, by returning a value or by a write in place. Hooks of the requests and
    of the whole batch run in the same order as without a batch.

    If a hook raises, a byte budget is exceeded, a deadline passes, or a tensor lacks the rows
    (`RowsError`), only that request fails: `request.error` is set and logged, its hooks and
    captures stop, and its rows are computed without them. Hooks of the whole batch raise as usual.

    Leaving the batch closes no request: the next step makes another batch of the same requests.

    Args:
        rows: rows of each member. A member is a `Request` that is open and not entered, a `Scope`
            or a `capture`. Rows without a member are padding.
        dim: dimension of the rows; 1 for tensors of (1, tokens, width).
        size: number of rows. If neither it nor `positions` is given, it is read from the first
            tensor that the model of a request is called with; in calls of other modules the batch
            ends with the last row of a member.
        positions: position of each row's token in its request, (rows,); of a padded batch, (rows,
            columns). Negative for padding.
        lengths: number of tokens of the requests' prompts, for plans whose positions (`at`) refer
            to them; for a request with several padded rows, one for each. A request remembers its
            length.
        gathered: modules whose tensors have other rows, by selector or module, such as an `lm_head`
            that runs only on the last rows. The value is an index tensor: row `i` of the module's
            tensors is row `index[i]` of the batch, or padding if negative. Or a function
            `(module, args, kwargs, output)` that returns it, with output None before the module
            runs. Or a tuple of one of these and the dimension of the rows.
        warn: at the end, warn of members none of whose hooked modules ran; `Batch.silent` lists
            them.

    Raises:
        HookTypeError: an argument has the wrong type.
        RowsError: no requests, rows that overlap or are out of range (in `gathered` too), requests
            of several models, or a selector in `gathered` where no request names a model. When
            entered: a request that is closed, entered, or in another batch, or that has backward
            hooks or captures gradients, or that the model's sites cannot serve (`error.member` is
            that request); a batch in another.
        HookError: when entered: a CUDA graph is being captured: see `sites`.
        SelectionError: a selector in `gathered` matches nothing.

    Examples:
        >>> a, b = plan_a.prepare(model).open(), plan_b.prepare(model).open()
        >>> with fh.batch({a: slice(0, 4), b: slice(4, 9)}):
        ...     model(x)
    """
    expect(rows, Mapping, "batch needs a dict of requests and their rows")
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        msg = f"dim must be an int of at least 0, got {dim!r}"
        raise HookTypeError(msg)
    if size is not None:
        size = at_least(1, "size", size)
    if positions is not None:
        size = _check_positions(positions, dim, size)
    elif lengths is not None:
        msg = "lengths= only works with positions: pass both to batch, or to move"
        raise HookTypeError(msg)
    members = dict(rows)
    models = models_of(members)
    indices = [] if gathered is None else _resolved(gathered, models, size)
    made = Batch(members, dim, size, indices)
    if positions is not None:
        made._set(positions, lengths)
    made.warns = warn
    if models:
        made._sited = weakref.ref(models[0])
    return made


def batch_of_step(
    rows: Sequence[tuple[Request, Span]], dim: int, size: int, gathered: list[GatheredModule]
) -> Batch:
    """Makes the batch of an engine's step, see `batch`: at the cost of one native call.

    Args:
        rows: requests of one model, and their rows.
        dim: dimension of the rows.
        size: number of rows, padding included.
        gathered: modules that see other rows, see `batch`; read as they are called.

    Raises:
        RowsError: rows overlap or are out of range.
    """
    model = rows[0][0].model
    made = Batch(rows, dim, size, gathered)
    made.warns = False  # of one step: in a chunk of a prompt a head has no rows
    if model is not None:
        made._sited = weakref.ref(model)
    return made


def _check_ints(tensor: Tensor, expected: str) -> None:
    kind = tensor.dtype
    if kind == torch.bool or kind.is_floating_point or kind.is_complex:
        msg = f"{expected}, got {kind}"
        raise HookTypeError(msg)


def _check_positions(positions: Any, dim: int, size: int | None) -> int:
    expect(positions, Tensor, "positions must be a tensor of ints")
    _check_ints(positions, "positions must be a tensor of ints")
    if positions.dim() not in {1, 2} or (positions.dim() == 2 and dim):  # noqa: PLR2004
        msg = (
            "positions must have shape (rows,), or (rows, columns) with dim=0, got "
            f"{tuple(positions.shape)} with {dim=}"
        )
        raise RowsError(msg)
    rows: int = positions.shape[0]
    if size not in {None, rows}:
        msg = f"size is {size}, but positions has {rows} rows"
        raise RowsError(msg)
    return rows


def models_of(members: Mapping[Any, Any]) -> list[nn.Module]:
    """Returns the models that the members name, parts of others left out."""
    models: dict[int, nn.Module] = {}
    for member in members:
        model = None
        if isinstance(member, Request):
            model = member.model
        elif isinstance(member, Capture):
            model = member._tag.model
        if model is not None:
            models[id(model)] = model
    if len(models) < 2:  # noqa: PLR2004 (several)
        return [*models.values()]
    for model in models.values():
        parts = {id(each) for each in model.modules()}
        if models.keys() <= parts:
            return [model]
    names = " and ".join(model._get_name() for model in models.values())
    msg = f"the requests of a batch must all be for one model, got requests for {names}"
    raise RowsError(msg)


def _check_index(index: Tensor, size: int | None) -> None:
    if index.dim() != 1:
        msg = f"an index in gathered must have one dimension, got shape {tuple(index.shape)}"
        raise RowsError(msg)
    if len(index):
        _check_ints(index, "an index in gathered must be a tensor of ints")
        if size is not None and (last := int(index.max())) >= size:
            msg = f"row {last} in gathered is out of range: the batch has {size} rows"
            raise RowsError(msg)


def _resolved(gathered: Any, models: list[nn.Module], size: int | None) -> list[GatheredModule]:
    expect(gathered, Mapping, "gathered must be a dict from modules to indices")
    resolved = []
    for what, value in gathered.items():
        index, dim = value if isinstance(value, tuple) else (value, None)
        if not isinstance(index, Tensor) and not callable(index):
            expect(index, (), "gathered must contain index tensors or functions")
        if isinstance(index, Tensor):
            _check_index(index, size)
        if isinstance(what, nn.Module):
            resolved.append((what, index, dim))
            continue
        if not models:
            msg = (
                f"{what!r} in gathered cannot be found, since no request names a model: pass the "
                "module itself"
            )
            raise RowsError(msg)
        found = select(models[0], what)
        resolved += [(module, index, dim) for module in found.values()]
    return resolved
