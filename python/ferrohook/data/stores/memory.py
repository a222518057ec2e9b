"""`MemoryStore`: a store in memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ferrohook.captures.tensor_files import Pieces
from ferrohook.data.stores.store import (
    DamagedBatch,
    Store,
    StoredBatch,
    find,
)
from ferrohook.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ferrohook.data.stores.store import OwnedTensor


class MemoryStore(Store):
    """A store in memory."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, StoredBatch]] = {}
        self._manifests: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryStore of {len(self.runs())} runs>"

    def _put(self, run: str, batch: int, layer: str, owned: dict[str, OwnedTensor]) -> None:
        with self._lock:
            self._opened(run, batch).add(layer, owned)

    def _restart(self, run: str, batch: int) -> None:
        with self._lock:
            fingerprint = self._opened(run, batch).fingerprint
            self._runs[run][batch] = StoredBatch(fingerprint=fingerprint)

    def _complete(
        self, run: str, batch: int, fingerprint: str, manifest: Mapping[str, Any] | None
    ) -> None:
        with self._lock:
            opened = self._opened(run, batch)
            opened.fingerprint = fingerprint or opened.fingerprint
            if manifest is not None:
                self._manifests.setdefault(run, manifest)
            opened.complete = True

    def _check_writable(self) -> None:
        if self._closed:
            msg = "the store is closed: put tensors before close()"
            raise StoreError(msg)

    def _opened(self, run: str, batch: int) -> StoredBatch:
        return self._runs.setdefault(run, {}).setdefault(batch, StoredBatch())

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

    def manifest(self, run: str) -> Mapping[str, Any] | None:  # noqa: D102
        return self._manifests.get(run)

    def fingerprints(self, run: str) -> dict[int, str]:  # noqa: D102
        batches = list(self._runs.get(run, {}).items())
        return {number: batch.fingerprint for number, batch in batches if batch.fingerprint}

    def verify(
        self,
        run: str | None = None,
        *,
        contents: bool = True,  # noqa: ARG002 (there are no files)
        progress: bool = False,  # noqa: ARG002
    ) -> list[DamagedBatch]:
        """Returns no batches: there are no files."""
        if run is not None:
            find(self._runs, run, "run")
        return []

    def layers(self, run: str, batch: int) -> list[str]:  # noqa: D102
        return list(self._batch(run, batch).layers)

    def get(  # noqa: D102
        self,
        run: str,
        batch: int,
        layer: str,
        *,
        verify: bool = False,  # noqa: ARG002 (there are no files)
    ) -> dict[str, Tensor]:
        tensors = find(self._batch(run, batch).layers, layer, "layer")
        return {
            name: tensor.joined() if isinstance(tensor, Pieces) else tensor.clone()
            for name, tensor in tensors.items()
        }

    def _batch(self, run: str, batch: int) -> StoredBatch:
        return find(find(self._runs, run, "run"), batch, "batch")
