"""Stores of collected tensors by run, batch and layer, and data sets of their rows."""

# A batch is a file: one background thread writes it under another name, renames it and appends a
# line to the index of its run, with the checksums of the file and of the line. Files that are not
# in the index and an incomplete last line are leftovers of a process that was killed, and are
# ignored: a resumed run has the bytes of an uninterrupted one. Bytes that wait to be written are
# bounded; `put` waits for room at a queue with no lock held, as a `Condition` that Ctrl-C
# interrupts may keep its lock. After an error the writer writes nothing more. A kernel lock on
# `.lock` refuses a second writer and ends with the process.

from ferrohook.data.datasets import ActivationDataset as ActivationDataset
from ferrohook.data.datasets import ActivationStream as ActivationStream
from ferrohook.data.stores.local import LocalStore as LocalStore
from ferrohook.data.stores.memory import MemoryStore as MemoryStore
from ferrohook.data.stores.store import DamagedBatch as DamagedBatch
from ferrohook.data.stores.store import Store as Store

__all__ = [
    "ActivationDataset",
    "ActivationStream",
    "DamagedBatch",
    "LocalStore",
    "MemoryStore",
    "Store",
]


def __dir__() -> list[str]:
    return __all__
