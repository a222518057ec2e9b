"""Rows: many requests in one forward, each with its own hooks."""

# A batch is a frame in the context, like a scope. Its members are frames that are not entered
# themselves. In a call, the hooks of the members run between the hooks of the whole batch, in the
# one order of all hooks, and get their member's rows of each tensor. The order of members does not
# matter: their rows are disjoint.

from ferrohook.rows.batches import Batch as Batch
from ferrohook.rows.batches import batch as batch
from ferrohook.rows.generation import generating as generating
from ferrohook.rows.laying import sites as sites
from ferrohook.rows.sites import Sites as Sites

__all__ = ["Batch", "Sites", "batch", "generating", "sites"]


def __dir__() -> list[str]:
    return __all__
