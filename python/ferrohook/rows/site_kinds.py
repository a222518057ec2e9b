"""Tables of the kinds of interventions that sites serve beside `Add`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ferrohook.effects.intervention import Intervention, number_dtype
from ferrohook.effects.interventions import KINDS, Add
from ferrohook.errors import HookTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def check_kinds(kinds: Sequence[type[Intervention]]) -> None:
    """Validates the kinds of interventions beside `Add` that sites serve.

    Raises:
        HookTypeError: one is no such kind, or stands twice.
    """
    for kind in kinds:
        is_kind = isinstance(kind, type) and KINDS.get(kind.__name__) is kind
        if not is_kind or kind is Add or [*kinds].count(kind) > 1:
            msg = (
                "kinds must contain interventions other than Add, each once, such as fh.Scale, got "
                f"{kind!r}"
            )
            raise HookTypeError(msg)
        if not kind.broadcasts:
            msg = f"{kind.__name__} takes a vector of any shape, but sites hold one row per plan"
            raise HookTypeError(msg)


def operands_of(kind: type[Intervention], width: int, dtype: torch.dtype) -> list[Tensor]:
    """Makes a row of each table of a kind: whether it is used, its vector, its numbers."""
    vector = [] if kind.vector_field is None else [torch.empty(width, dtype=dtype, device="cpu")]
    of_numbers = dtype if vector else number_dtype(dtype)
    numbers = [torch.empty(1, dtype=of_numbers, device="cpu") for _ in kind.number_fields]
    return [torch.empty(1, dtype=torch.bool, device="cpu"), *vector, *numbers]


class KindTables:
    """Operands of one kind of intervention at all sites, with a row for each plan of a batch."""

    def __init__(
        self, kind: type[Intervention], shape: tuple[int, int, int], like: Mapping[str, Any]
    ) -> None:
        """Makes empty tables; `shape`: sites, rows and width; `like`: dtype and device."""
        self.kind = kind
        *counts, width = shape
        device = like["device"]
        one = operands_of(kind, width, like["dtype"])
        self.used, *self.operands = (
            torch.zeros((*counts, len(each)), dtype=each.dtype, device=device) for each in one
        )

    @property
    def tables(self) -> list[Tensor]:
        """All of them; the first says which rows have operands."""
        return [self.used, *self.operands]

    def write(self, row: int, changes: Mapping[int, Intervention]) -> None:
        """Writes the operands of a plan into a row of the tables, by their sites."""
        self.used[:, row] = False
        for site, change in changes.items():
            values: list[Any] = [*change.numbers]
            if change.vector is not None:
                table = self.operands[0]
                values.insert(0, change.vector_as(table.dtype, table.device))
            for table, value in zip(self.operands, values, strict=True):
                table[site, row] = value
            self.used[site, row] = True
