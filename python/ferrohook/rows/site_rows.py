"""Rows of the members of a batch at sites."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ferrohook._core import places_at
from ferrohook.errors import RowsError
from ferrohook.tokens.positions import native_at

if TYPE_CHECKING:
    from ferrohook.effects.intervention import Intervention
    from ferrohook.plans import Request
    from ferrohook.tokens.positions import At
    from ferrohook.util.streams import Made


class Kept(NamedTuple):
    """A capture of a plan at sites."""

    capture: int
    """Its index in the plan."""
    sites: tuple[int, ...]
    places: tuple[int, ...]
    """Indices of the sites' names in the collector."""
    at: At


class Wanted(NamedTuple):
    """Rows that a member keeps of the calls since the tables were written."""

    number: int
    """Its place in the batch."""
    request: Request
    kept: Kept
    rows: list[int]
    positions: list[int] | None


@dataclasses.dataclass(eq=False)
class Program:
    """Work of a plan at sites."""

    vectors: Tensor
    """A row for each site: (sites, width)."""
    others: list[dict[int, Intervention]]
    """Interventions by site, for each kind of the sites."""
    changes: list[tuple[At, list[int]]]
    """Positions, and the sites that are changed at them."""
    kept: list[Kept]
    made: Made | None
    """Order of the uses of vectors on a GPU."""
    slot: int = 0
    """Row of the tables that has its vectors; 0 for none."""

    @cached_property
    def sites(self) -> frozenset[int]:
        """The sites at which it does anything."""
        changed = (site for _, sites in self.changes for site in sites)
        return frozenset(changed).union(*(kept.sites for kept in self.kept))

    @cached_property
    def everywhere(self) -> bool:
        """True if it changes all sites at all positions."""
        return self.changes == [(None, [*range(len(self.vectors))])]


class SiteRows:
    """Rows of the members of a batch at each site, as the tables take them."""

    def __init__(self, sites: int, count: int, nobody: int) -> None:
        self.slots = [0] * count
        """Slot of each row, for plans that change all sites at all positions."""
        self.at_sites: Tensor | None = None
        """Slot of each row at each site, for other plans."""
        self._shape = sites, count
        self._nobody = nobody
        self._kept: dict[tuple[int, ...], list[int]] = {}
        """Rows that are kept, by their sites."""
        self.wanted: list[Wanted] = []

    def add(
        self,
        number: int,
        request: Request,
        program: Program,
        rows: list[int],
        positions: list[int] | None,
    ) -> None:
        """Adds the rows of a member; none if a function of `at` raises."""
        sites, count = self._shape
        changes = [
            (_chosen(request, at, positions, len(rows)), changed)
            for at, changed in ([] if program.everywhere else program.changes)
        ]
        keeps = [(kept, _chosen(request, kept.at, positions, len(rows))) for kept in program.kept]
        if program.everywhere:
            for row in rows:
                self.slots[row] = program.slot
        elif changes:
            if self.at_sites is None:
                self.at_sites = torch.zeros(sites, count, dtype=torch.long, device="cpu")
            for places, changed in changes:
                columns = torch.tensor(
                    [rows[place] for place in places], dtype=torch.long, device="cpu"
                )
                self.at_sites[torch.tensor(changed, device="cpu")[:, None], columns] = program.slot
        for kept, places in keeps:
            taken = [rows[place] for place in places]
            known = None if positions is None else [positions[place] for place in places]
            self._kept.setdefault(kept.sites, []).extend(taken)
            self.wanted.append(Wanted(number, request, kept, taken, known))

    def places(self) -> Tensor:
        """Returns the place of each row at each site; `nobody` for rows without a capture."""
        places = torch.full(self._shape, self._nobody, device="cpu")
        for sites, rows in self._kept.items():
            columns = torch.tensor(rows, dtype=torch.long, device="cpu")
            places[torch.tensor(sites, device="cpu")[:, None], columns] = columns
        return places

    def index(self) -> Tensor:
        """Returns the slot of each row at each site."""
        everywhere = torch.tensor(self.slots, dtype=torch.long, device="cpu")
        return everywhere if self.at_sites is None else everywhere + self.at_sites


def check_positions(program: Program, positions: list[int] | None) -> None:
    """Validates that the positions of a plan can be found among a request's rows.

    Raises:
        RowsError: they cannot.
    """
    ats: list[At] = [at for at, _ in program.changes if at is not None]
    ats.extend(kept.at for kept in program.kept if kept.at is not None)
    if ats and positions is None:
        msg = (
            f"positions {ats[0]!r} at a site are found from the positions of the batch: pass "
            "positions to the batch"
        )
        raise RowsError(msg)


def _chosen(request: Request, at: At, positions: list[int] | None, count: int) -> list[int]:
    """Returns the places of the positions `at` among a request's rows."""
    if at is None or positions is None:
        return [*range(count)]
    lengths = request.prompt_lengths
    return places_at(native_at(at), positions, lengths[0] if lengths else None)
