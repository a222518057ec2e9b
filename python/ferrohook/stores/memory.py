"""`MemoryStore`: a store in memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ferrohook.errors import StoreError
from ferrohook.stores.store import Batch, Store, check_batch, find, own_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class MemoryStore(Store):
    """A store in memory."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, Batch]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def put(  # noqa: D102 (Store's docstring, here and below)
        self,
        run: str,
        batch: int,
        layer: str,
        tensors: Mapping[str, Tensor],
        *,
        copy: bool = True,
    ) -> None:
        owned = own_tensors(run, batch, layer, tensors, copy=copy)
        self._check_open()
        with self._lock:
            self._opened(run, batch).add(layer, owned)

    def complete(self, run: str, batch: int) -> None:  # noqa: D102
        check_batch(run, batch)
        self._check_open()
        with self._lock:
            self._opened(run, batch).complete = True

    def _check_open(self) -> None:
        if self._closed:
            msg = "the store is closed: put tensors before close()"
            raise StoreError(msg)

    def _opened(self, run: str, batch: int) -> Batch:
        return self._runs.setdefault(run, {}).setdefault(batch, Batch())

    def discard(self, run: str, batch: int) -> None:  # noqa: D102
        with self._lock:
            batches = self._runs.get(run, {})
            if batch in batches and not batches[batch].complete:
                del batches[batch]

    def flush(self) -> None:
        """Does nothing: `put` stores at once."""

    def close(self) -> None:
        """Ends putting; stored tensors stay readable."""
        self._closed = True

    def runs(self) -> list[str]:  # noqa: D102
        return sorted(self._runs)

    def batches(self, run: str) -> list[int]:  # noqa: D102
        return sorted(find(self._runs, run, "run"))

    def completed(self, run: str) -> list[int]:  # noqa: D102
        batches = self._runs.get(run, {})
        return sorted(number for number, batch in list(batches.items()) if batch.complete)

    def layers(self, run: str, batch: int) -> list[str]:  # noqa: D102
        return list(self._batch(run, batch).layers)

    def get(self, run: str, batch: int, layer: str) -> dict[str, Tensor]:  # noqa: D102
        tensors = find(self._batch(run, batch).layers, layer, "layer")
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def _batch(self, run: str, batch: int) -> Batch:
        return find(find(self._runs, run, "run"), batch, "batch")
