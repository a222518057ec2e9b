"""`LocalStore`: a store in a folder."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ferrohook.data.stores.folder import Folder
from ferrohook.data.stores.shard import Shard
from ferrohook.data.stores.store import (
    DamagedBatch,
    Store,
    StoredBatch,
    check_batch,
    find,
)
from ferrohook.data.stores.writer import Writer, closed_message
from ferrohook.errors import HookTypeError, StoreError
from ferrohook.util.arguments import at_least
from ferrohook.util.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from ferrohook.data.stores.index import IndexedBatch
    from ferrohook.data.stores.store import OwnedTensor


MOST_PENDING: Final = 2**28
"""Bytes that may wait to be written."""


class LentFolder(NamedTuple):
    """Options of a store in a folder that another store lends."""

    folder: str
    max_pending: int
    sync: bool

    def opened(self) -> LocalStore:
        """Opens the store."""
        return LocalStore(self.folder, max_pending=self.max_pending, sync=self.sync)


class LocalStore(Store):
    """A store in a folder: one safetensors file per batch.

    A background thread writes. `put` blocks while more than `max_pending` bytes wait to be written:
    a slow disk slows the model and loses nothing. A file appears whole or not at all, and is then
    added to its run's index (`index.jsonl`): whatever kills the process, files in the index are
    complete and readable, and after `flush` or `close` all files are in it. Open batches are
    written as they are at that time, and continued in a second file.

    The index has a CRC-32 (`zlib.crc32`) of each file, computed as it is written, and of each of
    its own lines. `verify`, and `get` with `verify=True`, check the files; the lines are
    always checked.

    One store writes to a folder at a time; any number may read it meanwhile. Reading flushes this
    store first. A store that is not closed is closed at the end of the process.

    Reading needs the package safetensors.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        read_only: bool = False,
        max_pending: int | None = None,
        sync: bool = False,
    ) -> None:
        """Opens a folder; creates it if it is missing.

        Args:
            folder: folder of the store, with a folder for each run.
            read_only: only read, beside a store that writes to the folder.
            max_pending: bytes that may wait to be written, 256 MiB by default; a larger batch may
                wait if no other does.
            sync: written batches survive a loss of power too; slower.

        Raises:
            StoreError: the folder cannot be written, another store writes to it, or with
                `read_only` it is missing.
            HookTypeError: an option has the wrong type, or is for writing, with `read_only`.
            ValueError: `max_pending` is below 1.
        """
        if read_only and (sync or max_pending is not None):
            msg = "max_pending and sync only work when writing: leave them out with read_only"
            raise HookTypeError(msg)
        if max_pending is None:
            max_pending = MOST_PENDING
        max_pending = at_least(1, "max_pending", max_pending, "a number of bytes")
        self._folder = Folder(Path(folder), sync=sync)
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], StoredBatch] = {}
        self._writer: Writer | None = None
        self._open_folder(read_only=read_only)

    def _open_folder(self, *, read_only: bool = False) -> None:
        if read_only:
            self._folder.check()
        else:
            self._writer = Writer(self._folder.lock(), self._folder.write, self._max_pending)
        # A function: a bound method would keep the store alive.
        self._finalizer = weakref.finalize(self, _close, self._writer, self._lock, self._open)
        if self._writer is not None:
            self._writer.start()  # last: if Ctrl-C interrupts it, the finaliser ends the writer

    def __reduce__(self) -> Any:
        return functools.partial(LocalStore, read_only=True), (self._folder.path,)

    def __repr__(self) -> str:
        state = "read only" if self._writer is None else "closed" if self._writer.closed else "open"
        return f"<LocalStore of {self._folder.path}, {state}>"

    def _put(self, run: str, batch: int, layer: str, owned: dict[str, OwnedTensor]) -> None:
        with self._lock:
            writer = self._check_writable()  # again: `close` removes open batches under this lock
            self._open.setdefault((run, batch), StoredBatch()).add(layer, owned)
            # Bounds the memory of open batches: writes the largest early.
            if sum(each.nbytes for each in self._open.values()) > self._max_pending:
                largest = max(self._open, key=lambda it: self._open[it].nbytes)
                # Under the lock, as whatever follows of the batch is queued after it.
                writer.put(Shard(*largest, self._open.pop(largest)))

    def _restart(self, run: str, batch: int) -> None:
        with self._lock:
            self._check_writable()  # see `_put`
            self._open[run, batch] = StoredBatch(restarted=True)

    def _complete(
        self, run: str, batch: int, fingerprint: str, manifest: Mapping[str, Any] | None
    ) -> None:
        """Queues a batch for writing: it is there once `flush` returns or `completed` lists it."""
        writer = self._check_writable()
        with self._lock:
            finished = self._open.pop((run, batch), StoredBatch())
            finished.complete = True
            finished.fingerprint = fingerprint
            finished.manifest = manifest
            writer.put(Shard(run, batch, finished))

    def discard(self, run: str, batch: int) -> None:  # noqa: D102
        with self._lock:
            self._open.pop((run, batch), None)

    def flush(self) -> None:  # noqa: D102
        writer = self._writer
        # A forked process has nothing to write: the one that opened the store writes it.
        if writer is not None and not writer.closed and writer.process == os.getpid():
            with self._lock:
                _submit(writer, self._open)
            writer.drain()

    def close(self) -> None:  # noqa: D102
        if not self._finalizer.alive:
            return
        try:
            _close(self._writer, self._lock, self._open)
        except StoreError:
            self._finalizer.detach()
            raise
        # Detached last: after Ctrl-C the finaliser does the rest.
        self._finalizer.detach()

    def _check_writable(self) -> Writer:
        if self._writer is None:
            msg = (
                f"{self._folder.path} was opened read_only: open another LocalStore to write to it"
            )
            raise StoreError(msg)
        if self._writer.closed:
            raise StoreError(closed_message(self._folder.path))
        if self._writer.process != os.getpid():
            msg = (
                f"the store of {self._folder.path} writes in process {self._writer.process}, from "
                "which this process was forked: open another LocalStore on another folder"
            )
            raise StoreError(msg)
        return self._writer

    def runs(self) -> list[str]:  # noqa: D102
        self.flush()
        return self._folder.runs()

    def batches(self, run: str) -> list[int]:  # noqa: D102
        # One without files and incomplete was removed by `repair`.
        batches = self._index(run).items()
        return sorted(number for number, batch in batches if batch.files or batch.complete)

    def completed(self, run: str) -> list[int]:  # noqa: D102
        return sorted(number for number, batch in self._known(run).items() if batch.complete)

    def manifest(self, run: str) -> Mapping[str, Any] | None:  # noqa: D102
        self._known(run)  # reads new lines
        return self._folder.index(run).manifest

    def fingerprints(self, run: str) -> dict[int, str]:  # noqa: D102
        batches = self._known(run).items()
        return {number: batch.fingerprint for number, batch in batches if batch.fingerprint}

    def verify(  # noqa: D102
        self, run: str | None = None, *, contents: bool = True, progress: bool = False
    ) -> list[DamagedBatch]:
        damaged: list[DamagedBatch] = []
        batches = [
            (name, number, batch)
            for name in (self.runs() if run is None else [run])
            for number, batch in sorted(self._index(name).items())
            if batch.files
        ]
        with progress_bar("verify", len(batches), "batch", shown=progress) as advance:
            for name, number, batch in batches:
                damages = (
                    self._folder.damage(name, file, contents=contents) for file in batch.files
                )
                if problem := next(filter(None, damages), None):
                    damaged.append(DamagedBatch(name, number, problem))
                advance()
        return damaged

    def repair(self, run: str | None = None, *, progress: bool = False) -> list[DamagedBatch]:
        """Removes damaged batches, so that `collect` recomputes them.

        Args:
            run: name of the run; None for all runs.
            progress: show a progress bar, as `collect` does.

        Returns:
            The batches that it removed, as `verify` lists them.

        Raises:
            SelectionError: the store has no such run.
            StoreError: the index of a run is damaged, or the store is read only or closed.
        """
        writer = self._check_writable()
        damaged = self.verify(run, progress=progress)
        for each in damaged:
            writer.put(Shard(each.run, each.batch, StoredBatch(restarted=True)))
        self.flush()
        return damaged

    def layers(self, run: str, batch: int) -> list[str]:  # noqa: D102
        return list(self._batch(run, batch).layers)

    def get(  # noqa: D102
        self, run: str, batch: int, layer: str, *, verify: bool = False
    ) -> dict[str, Tensor]:
        files = find(self._batch(run, batch).layers, layer, "layer")
        return self._folder.read(run, layer, files, verify=verify)

    def _batch(self, run: str, batch: int) -> IndexedBatch:
        self.flush()
        return self._folder.find(run, batch) or find(self._index(run), batch, "batch")

    def _index(self, run: str) -> Mapping[int, IndexedBatch]:
        find(dict.fromkeys(self.runs()), run, "run")
        return self._folder.index(run).read()

    def _known(self, run: str) -> Mapping[int, IndexedBatch]:
        """Returns the index of a run; empty for an unknown run."""
        check_batch(run, 0)
        return self._index(run) if run in self.runs() else {}


@contextlib.contextmanager
def lent(store: LocalStore) -> Iterator[LentFolder]:
    """Lends the folder of a store to one of another process, which writes to it meanwhile.

    The store only reads meanwhile. It is left closed if the other one still has the folder after
    an error.

    Raises:
        StoreError: the store is closed or read only, or a write failed.
    """
    store._check_writable()
    store.close()
    folder = store._folder
    try:
        yield LentFolder(str(folder.path.resolve()), store._max_pending, folder.sync)
    except BaseException:
        with contextlib.suppress(StoreError):  # the error of the block comes first
            store._open_folder()
        raise
    store._open_folder()


def _submit(writer: Writer, opened: dict[tuple[str, int], StoredBatch]) -> None:
    """Queues open batches for writing as they are. Under the store's lock."""
    while opened:
        key = next(iter(opened))
        writer.put(Shard(*key, opened.pop(key)))


def _close(
    writer: Writer | None, lock: threading.Lock, opened: dict[tuple[str, int], StoredBatch]
) -> None:
    # A forked process has the queue without the writing thread.
    if writer is None or writer.process != os.getpid():
        return
    try:
        with lock:  # a `put` comes before the last batch is queued, or is refused
            try:
                _submit(writer, opened)
            finally:
                writer.refuse()
    finally:
        writer.close()
