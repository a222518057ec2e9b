"""Captures at sites: rows that calls left in a table, and counts of the calls."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrohook._core import store_rows
from ferrohook.captures.pending import await_with
from ferrohook.errors import RowsError
from ferrohook.rows.operators import calls_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ferrohook._core import BatchBase
    from ferrohook.plans import Request
    from ferrohook.rows.site_rows import Wanted


class OpenMembers(NamedTuple):
    """The members of a batch that did not end."""

    batch: BatchBase
    sites_of: dict[int, frozenset[int]]
    """Sites at which each of them does anything, by its place in the batch."""


class _Failure(NamedTuple):
    """Failure of a member of a batch."""

    batch: BatchBase
    number: int
    error: Exception


class Taken(NamedTuple):
    """Rows of some calls of a batch, taken out of the table."""

    members: OpenMembers
    wanted: list[Wanted]
    rows: list[Tensor]
    """The rows that each site keeps: (sites, rows, width)."""
    counts: list[int] | Tensor
    """Calls and their rows at each site, as `calls_of` reads them; on the host."""
    complete: torch.cuda.Event | None
    """Event after the copy of the counts from a GPU."""


class SiteCaptures:
    """Stores rows that sites kept with their requests, once it is known which sites ran.

    A GPU is asked without waiting. If it has not answered yet, the rows are stored later, at the
    latest when they are read.
    """

    def __init__(self, names: Sequence[str], dim: int, form: str) -> None:
        self._names = names
        self._dim = dim
        self._form = form
        """Width and dtype of the tables."""
        self._waiting: collections.deque[Taken] = collections.deque()
        self._failed: weakref.WeakSet[Request] = weakref.WeakSet()
        """Requests whose rows could not be stored: they get no rows of later calls either."""
        self._lock = threading.RLock()

    def add(self, taken: Taken) -> None:
        """Stores rows, at once or when their GPU has run so far."""
        if taken.complete is None:
            self._fail(self._store(taken))
            return
        self._waiting.append(taken)
        for each in taken.wanted:
            await_with(each.request.collector(each.kept.capture, complete=False), self.finish)
        self._store_waiting(waits=False)

    def finish(self) -> None:
        """Stores all rows that were added, and waits for the GPU."""
        self._store_waiting(waits=True)

    def _store_waiting(self, *, waits: bool) -> None:
        failures: list[_Failure] = []
        with self._lock:
            while self._waiting:
                taken = self._waiting[0]
                if taken.complete is not None:
                    if not (waits or taken.complete.query()):
                        break
                    taken.complete.synchronize()
                failures += self._store(taken)
                # Afterwards: if it is interrupted before, storing it again replaces it.
                self._waiting.popleft()
        self._fail(failures)  # without the lock: logging runs code of others

    def _store(self, taken: Taken) -> list[_Failure]:
        """Stores rows; returns the failures of members."""
        counts = taken.counts if isinstance(taken.counts, list) else taken.counts.tolist()
        ran = [calls_of(count) for count in counts]
        failures = [
            failure
            for site, (calls, rows) in enumerate(ran)
            if calls and rows >= 0 and rows != calls * (taken.members.batch.size or 0)
            for failure in self._misfits(taken.members, site, _counted(rows, calls))
        ]
        failed = {failure.number for failure in failures}
        self._failed |= {each.request for each in taken.wanted if each.number in failed}
        with torch.inference_mode(mode=False):
            for wanted, rows in zip(taken.wanted, taken.rows, strict=True):
                if wanted.request in self._failed:
                    continue
                try:
                    self._store_one(wanted, rows, ran)
                except Exception as error:  # noqa: BLE001 (the request's failure: the others go on)
                    failures.append(_Failure(taken.members.batch, wanted.number, error))
                    self._failed.add(wanted.request)
        return failures

    def _misfits(self, members: OpenMembers, site: int, got: str) -> list[_Failure]:
        batch = members.batch
        msg = (
            f"the {batch.size} rows of the batch were not found in dimension {self._dim} of any "
            f"tensor at the site {self._names[site]!r}, which has {got}"
        )
        return [
            _Failure(batch, number, RowsError(msg))
            for number, sites in members.sites_of.items()
            if site in sites
        ]

    def fail_at(self, members: OpenMembers, site: int, got: str) -> None:
        """Fails the members with hooks at a site which has other rows than the batch."""
        self._fail(self._misfits(members, site, got))

    @staticmethod
    def _fail(failures: list[_Failure]) -> None:
        for batch, number, error in failures:
            batch._fail(number, error)

    def _store_one(self, wanted: Wanted, rows: Tensor, ran: list[tuple[int, int]]) -> None:
        _, request, (capture, sites, names, _), _, positions = wanted
        for site in sites:
            self._check_calls(site, ran[site])
        # Tokens are put together by position; else the rows stand in their dimension.
        shape = (...,) if positions is not None else (None,) * self._dim
        own = [each[shape] for each in rows.unbind()] if self._dim else rows.unbind()
        stored = [
            (name, own[site]) for site, name in zip(sites, names, strict=True) if ran[site][0]
        ]
        store_rows(request.collector(capture, complete=False), stored, positions)

    def _check_calls(self, site: int, ran: tuple[int, int]) -> None:
        calls, rows = ran
        name = self._names[site]
        if rows < 0:
            msg = (
                f"a site cannot keep the output of {name!r}: it must have shape (rows, width), "
                f"with rows in dimension {self._dim}, {self._form}"
            )
            raise RowsError(msg)
        if calls > 1:
            msg = (
                f"{name!r} ran {calls} times in one batch, but a site keeps only the last call: "
                "make a batch for each call"
            )
            raise RowsError(msg)


def _counted(rows: int, calls: int) -> str:
    return f"{rows} rows in {calls} call{'s' * (calls > 1)}"
