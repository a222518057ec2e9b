"""`Shard`: the part of a batch in one file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrohook.data.stores.store import StoredBatch


@dataclass(frozen=True)
class Shard:
    """Part of a batch that is written to one file."""

    run: str
    batch: int
    content: StoredBatch

    def __str__(self) -> str:
        return f"batch {self.batch} of run {self.run!r}"
