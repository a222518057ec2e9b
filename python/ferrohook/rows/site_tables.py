"""Sites with tables, of which only the contents change: for graphs that are replayed."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from ferrohook._core import to_device
from ferrohook.effects.intervention import Intervention, check_dtypes
from ferrohook.effects.interventions import Add
from ferrohook.effects.parts import change_part, part_of
from ferrohook.errors import HookError, RowsError
from ferrohook.plans.entries import HookEntry
from ferrohook.plans.needs import BackEnd
from ferrohook.rows import operators
from ferrohook.rows.site_captures import OpenMembers, SiteCaptures, Taken
from ferrohook.rows.site_kinds import KindTables, operands_of
from ferrohook.rows.site_rows import Kept, Program, SiteRows, Wanted, check_positions
from ferrohook.rows.sites import Sites
from ferrohook.util.streams import Tables, made

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrohook._core import BatchBase
    from ferrohook.names.places import Place
    from ferrohook.plans import Prepared, Request
    from ferrohook.plans.entries import Entry
    from ferrohook.tokens.positions import At

_NO_GATES: Final = "sites evaluate no gates, conditions and strengths"
BACK_END: Final = BackEnd(
    frozenset(
        {"add", "at", "at function", "change", "not finite", "output_index"}
        | {"calls", "copy", "cut rows", "device", "dtype", "max_bytes", "slice"}
    ),
    {
        "inputs": "sites run after modules: they have no inputs",
        "gate": _NO_GATES,
        "strength": _NO_GATES,
        "when": _NO_GATES,
        "python": "sites do not run Python",
        "route": "sites do not run Python, and a Route does",
        "table": "sites add only vectors of one dimension",
        "transcoder": "sites do not run Python, and features of transcoders do",
        "trained": "sites add only vectors that are not trained",
    },
)


def nobody(dtype: torch.dtype) -> complex:
    """Returns the number that fills unsteered rows.

    `-0.0`, because `-0.0 + 0.0` is `0.0`: adding it leaves every bit as it is.
    """
    return complex(-0.0, -0.0) if dtype.is_complex else -0.0


class TableForm(NamedTuple):
    """Sizes of tables, and the tensors of the sites."""

    max_requests: int
    max_rows: int
    width: int
    dim: int
    part: Any
    like: dict[str, Any]
    """Dtype and device."""
    kinds: tuple[type[Intervention], ...]
    """Kinds of interventions beside `Add`, in the order in which they act."""


class _Site:
    """A site, for its operators."""

    __slots__ = ("__weakref__", "_number", "_sites", "calls", "index")

    def __init__(self, sites: TableSites, number: int, index: Tensor) -> None:
        self._sites = weakref.ref(sites)
        self._number = number
        self.index = index
        self.calls = 0

    def use(self) -> None:
        """Makes kernels on a GPU wait for the writes to the tables."""
        sites = self._sites()
        if sites is not None and isinstance(sites._tables, Tables):
            sites._tables.use()

    def serves(self, x: Tensor) -> bool:
        """Returns True for the output of a call that it serves."""
        sites = self._sites()
        return sites is not None and sites._serves(self._number, x)

    def keeps(self) -> bool:
        """Returns True if rows of that call are kept."""
        sites = self._sites()
        return sites is not None and bool(sites._wanted)


class _SiteMember(NamedTuple):
    """A member of the batch that sites serve."""

    request: Request
    program: Program


class TableSites(Sites):
    """Sites with tables, see `sites`."""

    def __init__(self, model: nn.Module, names: list[str], form: TableForm) -> None:
        self.max_requests, self.max_rows, width, self.dim, part, like, kinds = form
        super().__init__(model, dict.fromkeys(names, part))
        count = len(names)
        self._table = torch.full(
            (count, self.max_requests + 1, width), nobody(like["dtype"]), **like
        )
        shape = (count, self.max_requests + 1, width)
        self._kinds = [KindTables(kind, shape, like) for kind in kinds]
        self._kept = torch.zeros((count, self.max_rows + 1, width), **like)
        self._index = torch.zeros((count, self.max_rows), dtype=torch.long, device=like["device"])
        self._places = torch.full_like(self._index, self.max_rows)
        self._calls = torch.zeros(count, dtype=torch.long, device=like["device"])
        tables = [self._table, self._kept, self._index, self._places, self._calls]
        tables += [table for each in self._kinds for table in each.tables]
        self._on_cpu = self._table.is_cpu
        on_gpu = self._table.is_cuda and torch.cuda.is_initialized()
        self._tables = Tables(tuple(tables)) if on_gpu else contextlib.nullcontext()
        """Context of writes to the tables."""
        self._programs: weakref.WeakKeyDictionary[Prepared, Program] = weakref.WeakKeyDictionary()
        self._served: dict[int, _SiteMember] = {}
        """Members, by their place in the batch."""
        self._wanted: list[Wanted] = []
        self._expected: tuple[int | None, int, torch.dtype] = (None, width, self._table.dtype)
        """Rows, width and dtype of outputs in the batch."""
        self._positions: list[int] | None = None
        self._indexed: tuple[list[int], int] | None = None
        """Slots and rows of the batch that the index is of, if all sites have the same."""
        self._version: int | None = None
        """Changes of the members' hooks that the tables know of; None while they are written."""
        self._written = 0
        """Number of leading table rows in use; the rest are unsteered."""
        expected = f"a width of {width} and {self._kept.dtype}"
        self._captures = SiteCaptures(names, self.dim, expected)
        self._sites = [_Site(self, number, self._index[number]) for number in range(count)]

    def _hook(self, site: int) -> Callable[..., Any]:
        tables = (self._table[site], self._index[site])
        taps = (self._kept[site], self._calls[site : site + 1], self._places[site])
        kinds = [[table[site] for table in each.tables] for each in self._kinds]
        if self._table.device.type == "cuda":
            for tensor in (*tables, *taps, *(each for of_kind in kinds for each in of_kind)):
                torch._dynamo.mark_static_address(tensor)
        table, index = tables
        kept, calls, places = taps
        dim, part = self.dim, self._parts[site]
        operators.assign(index, self._sites[site])
        operators.assign(places, self._sites[site])
        steer, tap = torch.ops.ferrohook.steer, torch.ops.ferrohook.tap
        change = torch.ops.ferrohook.change
        others = [
            (each.kind.__name__, each.kind.adds, *own)
            for each, own in zip(self._kinds, kinds, strict=True)
        ]
        path = part if isinstance(part, tuple) else (part,)
        beside = (*path[:-1], 1) if path[-1] == "sum" else None

        def hook(_module: nn.Module, _args: object, output: Any) -> Any:
            residual = None if beside is None else part_of(output, beside)

            def changed(x: Tensor) -> Tensor:
                x = cast("Tensor", steer(x, table, index, dim))
                for kind, adds, used, *operands in others:
                    summed = None if adds else residual
                    own = (used, operands, index, dim, kind)
                    x = cast("Tensor", change(x, summed, table, *own))
                return x

            output = change_part(output, part, changed, adds=True)
            tap(part_of(output, part).detach(), kept, calls, places, dim)
            return output

        # The hook keeps them alive while they are open.
        vars(hook)["sites"] = self
        return hook

    def begin_service(self, batch: BatchBase) -> None:  # noqa: D102 (of Sites)
        members = self._members_of(batch)
        served = {
            number: _SiteMember(request, self._programs[request.prepared])
            for number, request in members.items()
        }
        programs = {id(each.program): each.program for each in served.values()}
        if len(programs) > self.max_requests:
            msg = (
                f"these sites have room for {self.max_requests} plans, but the batch has "
                f"{len(programs)}"
            )
            raise RowsError(msg)
        self._serve(batch)
        self._expected = batch.size, self._table.shape[-1], self._table.dtype
        # Rows that an interrupted batch left belong to no request.
        self._served, self._wanted, self._version = served, [], None
        self._assign_slots([*programs.values()])
        batch._serve()

    def _refusal(self, batch: BatchBase) -> str | None:
        if not self.closed and batch.dim != self.dim:
            return (
                f"these sites have rows in dimension {self.dim}, but the batch has them in "
                f"{batch.dim}"
            )
        if (reason := super()._refusal(batch)) is None and (batch.size or 0) > self.max_rows:
            return f"these sites have room for {self.max_rows} rows, but the batch has {batch.size}"
        return reason

    def _check_plan(self, prepared: Prepared) -> None:
        if prepared not in self._programs:
            self._programs[prepared] = self._program(prepared)

    def _program(self, prepared: Prepared) -> Program:
        model = self._check_model(prepared)
        vectors = torch.full_like(self._table[:, 0], nobody(self._table.dtype))
        ats: dict[int, At] = {}
        others: dict[int, dict[int, Intervention]] = defaultdict(dict)
        kept: list[Kept] = []
        captures = iter(enumerate(prepared.captures))
        for number, entry in enumerate(prepared.entries):
            places = prepared.places(number)
            found = self._sites_of(model, number, places)
            reason = BACK_END.refusal(entry, self.dim, prepared.needs[number])
            if reason is None:
                hook = entry.hook if isinstance(entry, HookEntry) else None
                reason = self._part_refusal(places, found, hook)
            self._check_entry(number, entry, places, reason)
            if isinstance(entry, HookEntry):
                for name, site in found.items():
                    if any(site in each.sites for each in kept):
                        msg = (
                            f"the plan keeps {name!r} before it changes it, but sites keep after "
                            "all changes"
                        )
                        raise HookError(msg)
                    if ats.setdefault(site, entry.at) != entry.at:
                        msg = (
                            f"the plan changes {name!r} at several positions (at=), but sites "
                            "support only one"
                        )
                        raise HookError(msg)
                    self._change(name, site, entry.hook, vectors, others)
                continue
            capture, indices = next(captures)
            kept.append(Kept(capture, tuple(found.values()), tuple(indices.values()), entry.at))
        changes: list[tuple[At, list[int]]] = []
        for site, at in ats.items():
            same = next((sites for other, sites in changes if other == at), None)
            if same is None:
                changes.append((at, [site]))
            else:
                same.append(site)
        by_kind = [
            {site: own[kind] for site, own in others.items() if kind in own}
            for kind in range(len(self._kinds))
        ]
        uses = made((vectors,)) if vectors.is_cuda else None
        return Program(vectors, by_kind, changes, kept, uses)

    def _change(
        self,
        name: str,
        site: int,
        hook: Intervention,
        vectors: Tensor,
        others: dict[int, dict[int, Intervention]],
    ) -> None:
        """Adds an intervention to the ones of a plan at a site, by its kind.

        Raises:
            HookError: it stands in another order than the sites act in.
        """
        kind = self._number_of(hook)
        if any(each >= kind for each in others[site]):
            order = ", ".join(["Add", *(each.kind.__name__ for each in self._kinds)])
            msg = (
                f"the plan changes {name!r} differently than these sites, which apply {order}, in "
                "this order"
            )
            raise HookError(msg)
        if kind < 0:
            vectors[site] += hook.vector_as(vectors.dtype, vectors.device)
        else:
            others[site][kind] = hook

    def _number_of(self, hook: Intervention) -> int:
        """Returns the number of an intervention's kind, -1 for `Add`."""
        kinds = [each.kind for each in self._kinds]
        return kinds.index(type(hook)) if type(hook) in kinds else -1

    def _check_entry(
        self,
        number: int,
        entry: Entry,
        found: dict[str, Place],
        reason: str | None,
    ) -> None:
        """Validates an entry; `reason`: why it is refused, if that is known.

        Raises:
            HookError: it is not served.
        """
        if reason is None:
            hook = entry.hook if isinstance(entry, HookEntry) else None
            width = self._table.shape[-1]
            if any(place.multiplier != 1 for place in found.values()):
                reason = "a quantity that is a multiple of a module's output has no site"
            elif hook is not None and type(hook) is not Add and self._number_of(hook) < 0:
                kinds = ["Add", *(each.kind.__name__ for each in self._kinds)]
                reason = (
                    f"these sites only serve {', '.join(kinds)}: add {type(hook).__name__} to "
                    "their kinds="
                )
            elif hook is not None and hook.vector is not None and hook.vector.shape != (width,):
                reason = f"its vector does not have the sites' width, {width}"
            elif hook is not None:
                check_dtypes(type(hook), self._table.dtype, hook.vector)
        if reason is not None:
            msg = f"entry {number} of the plan cannot be served at a site: {reason}"
            raise HookError(msg)

    def _assign_slots(self, wanted: list[Program]) -> None:
        """Gives each program of a batch a row of the tables, evicting others if none is free."""
        new = [program for program in wanted if not program.slot]
        if not new:
            return
        resident = [program for program in self._programs.values() if program.slot]
        free = iter({*range(1, self.max_requests + 1)} - {program.slot for program in resident})
        idle = (program for program in resident if program not in wanted)
        with self._tables:
            for program in new:
                slot = next(free, 0)
                if not slot:
                    other = next(idle)
                    slot, other.slot = other.slot, 0
                if program.made is not None:
                    program.made.use()
                self._table[:, slot] = program.vectors
                for tables, changes in zip(self._kinds, program.others, strict=True):
                    tables.write(slot, changes)
                program.slot = slot

    def moved(self, batch: BatchBase) -> None:
        """Writes the rows of the batch into the tables, for the calls from now on.

        Raises:
            RowsError: a row has several positions.
        """
        if batch._columns is not None:
            msg = "sites need one position per row: pass positions of shape (rows,)"
            raise RowsError(msg)
        with self._tables:
            self._collect()
            self._write(batch._positions)

    def _write(self, positions: list[int] | None) -> None:
        batch = self._serving
        if batch is None:
            return
        self._version, version = None, batch._version()
        rows = SiteRows(len(self.names), batch._named, self.max_rows)
        for number in batch._live():
            request, program = self._served[number]
            own = batch._rows(number)
            at = None if positions is None else [positions[row] for row in own]
            try:
                check_positions(program, at)
            except RowsError as error:
                error.member = request
                raise
            try:
                rows.add(number, request, program, own, at)
            except Exception as error:  # noqa: BLE001 (of a function of `at`: the others go on)
                batch._fail(number, error)
        self._write_index(rows, batch)
        if rows.wanted:
            places = to_device(rows.places(), self._places.device)
            self._places[:, : batch._named] = places
        self._wanted = rows.wanted
        if self._on_cpu:
            for site in self._sites:
                site.calls = 0
        else:
            self._calls.zero_()
        self._positions, self._version = positions, version

    def _write_index(self, rows: SiteRows, batch: BatchBase) -> None:
        """Writes which row of the tables each row of a batch takes, if it is not there already."""
        named, size = batch._named, cast("int", batch.size)
        if rows.at_sites is None and (rows.slots, size) == self._indexed:
            return
        self._indexed = None
        before, self._written = self._written, max(self._written, named)
        self._index[:, :named] = to_device(rows.index(), self._index.device)
        if named < before:
            self._index[:, named:before] = 0
        self._written = named
        if self._on_cpu:
            for site, index in zip(self._sites, self._index[:, :size].unbind(), strict=True):
                site.index = index
        if rows.at_sites is None:
            self._indexed = rows.slots, size

    def _serves(self, site: int, x: Tensor) -> bool:
        """Returns True for an output, on the CPU, with the rows of the batch of this context.

        One without them fails the requests that have hooks here.
        """
        batch = self._serving
        version = None if batch is None else batch._version_here()
        if version is None:
            return False
        if version != self._version:
            self._collect()
            self._write(self._positions)
        shape, (size, width, dtype) = x.shape, self._expected
        fits = len(shape) > self.dim + 1 and shape[self.dim] == size and shape[-1] == width
        if fits and x.dtype is dtype and x.layout is torch.strided:
            return True  # of no other kind: most often
        reason = operators.misfit(x, self._table, self.dim)
        if reason is None and fits:
            return True
        got = reason or f"a tensor with {shape[self.dim]} rows"
        self._captures.fail_at(self._members(cast("BatchBase", batch)), site, got)
        return False

    def _collect(self) -> None:
        """Stores captured rows since the tables were written, in their requests."""
        batch, wanted = self._serving, self._wanted
        if wanted:
            self._wanted = []
            self._places[:, : self._written] = self.max_rows
        if batch is None or self._version is None:
            return
        if not self._on_cpu:
            batch._version()  # no call asked for deadlines
        self._mark_ran(batch)
        wanted = [each for each in wanted if each.rows]
        if not self._on_cpu:
            # On the CPU one that has ended meanwhile got the rows of sites before that.
            live = {*batch._live()}
            wanted = [each for each in wanted if each.number in live]
        if not wanted:
            return
        members = self._members(batch)
        counts: list[int] | Tensor = [site.calls for site in self._sites]
        complete = None
        if not self._on_cpu:
            counts = torch.empty_like(self._calls, device="cpu", pin_memory=True)
            counts.copy_(self._calls, non_blocking=True)
            complete = torch.cuda.Event()
            complete.record(torch.cuda.current_stream(self._calls.device))
        rows = [row for each in wanted for row in each.rows]
        with torch.inference_mode(mode=False):
            chosen = to_device(torch.tensor(rows, device="cpu"), self._kept.device)
            kept = self._kept[:, chosen]  # one copy for all
            parts = [*kept.split([len(each.rows) for each in wanted], 1)]
        self._captures.add(Taken(members, wanted, parts, counts, complete))

    def _members(self, batch: BatchBase) -> OpenMembers:
        """Returns the members of a batch that did not end."""
        return OpenMembers(
            batch, {each: self._served[each].program.sites for each in batch._live()}
        )

    def _mark_ran(self, batch: BatchBase) -> None:
        """Marks the members whose sites ran; all on a GPU, which is not asked."""
        ran = [*self._served]
        idle = {site for site, each in enumerate(self._sites) if self._on_cpu and not each.calls}
        if idle:
            ran = [number for number in ran if not self._served[number].program.sites <= idle]
        batch._mark_ran(ran)

    def end_service(self, batch: BatchBase) -> None:  # noqa: D102 (of Sites)
        if self._serving is not batch:
            return
        with self._tables:
            try:
                self._collect()
            finally:
                if not self._on_cpu:  # a replayed graph steers by the tables until they are cleared
                    self._indexed = None
                    self._index[:, : self._written] = 0
                    self._written = 0
                self._served, self._wanted = {}, []
                self._end(batch)


def bytes_of_tables(  # noqa: PLR0913 (the sizes of tables)
    count: int,
    max_requests: int,
    max_rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    kinds: Sequence[type[Intervention]] = (),
) -> int:
    """Returns the bytes that the tables of sites take, see `sites`.

    Args:
        count: number of the sites.
        max_requests: number of plans in a batch.
        max_rows: number of rows of a batch.
        width: last dimension of their outputs.
        dtype: of the tables.
        kinds: of interventions beside `Add`.
    """
    vectors = (max_requests + 1 + max_rows + 1) * width * dtype.itemsize
    rows = [each for kind in kinds for each in operands_of(kind, width, dtype)]
    operands = (max_requests + 1) * sum(each.nbytes for each in rows)
    return count * (vectors + operands + (2 * max_rows + 1) * torch.long.itemsize)
