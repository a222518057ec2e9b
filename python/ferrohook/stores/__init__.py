"""Stores of collected tensors by run, batch and layer, read back lazily."""

from ferrohook.stores.local import LocalStore as LocalStore
from ferrohook.stores.memory import MemoryStore as MemoryStore
from ferrohook.stores.store import Store as Store

__all__ = ["LocalStore", "MemoryStore", "Store"]
