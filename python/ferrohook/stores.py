"""Stores: where what was collected is put, by run, batch and layer, and read back lazily."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import weakref
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from ferrohook import shards
from ferrohook.arguments import at_least_one
from ferrohook.errors import HookTypeError, SelectionError, StoreError
from ferrohook.never_fired import MOST_NAMED

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = re.compile(r"\w[\w.-]*")


class Store(ABC):
    """Keeps tensors by run, batch and layer.

    A batch is open until `complete` is called for it. Closing flushes; as a context manager a store
    is closed at exit. All methods may be called from any thread.
    """

    @abstractmethod
    def put(
        self,
        run: str,
        batch: int,
        layer: str,
        tensors: Mapping[str, Tensor],
        *,
        copy: bool = True,
    ) -> None:
        """Adds tensors to a layer of a batch; replaces those of the same names.

        Args:
            run: a name of letters, digits, `_`, and after the first also `-` and `.`.
            batch: its number, from 0.
            layer: any name, `""` included.
            tensors: by names without a slash. They are kept detached, on the CPU.
            copy: False where nobody will change the tensors in place: they are kept as they are
                then.

        Raises:
            HookTypeError: something of another type, or a tensor that is not strided or of a type
                that safetensors does not know.
            ValueError: a name or number of another form.
            StoreError: the store is closed, read only, or could not write what was put before.
        """

    @abstractmethod
    def complete(self, run: str, batch: int) -> None:
        """Marks a batch as complete: all that belongs to it was put.

        Raises:
            StoreError: as for `put`.
        """

    @abstractmethod
    def discard(self, run: str, batch: int) -> None:
        """Forgets what was put into an open batch and was not written yet."""

    @abstractmethod
    def flush(self) -> None:
        """Returns when all that was put is where it stays, open batches included.

        Raises:
            StoreError: something could not be written, now or before.
        """

    @abstractmethod
    def close(self) -> None:
        """Flushes and gives everything back that the store holds open. Idempotent.

        Raises:
            StoreError: as for `flush`; it is closed all the same.
        """

    @abstractmethod
    def runs(self) -> list[str]:
        """The names of the runs, sorted."""

    @abstractmethod
    def batches(self, run: str) -> list[int]:
        """The numbers of the batches that hold something, sorted.

        Raises:
            SelectionError: there is no such run.
        """

    @abstractmethod
    def completed(self, run: str) -> list[int]:
        """The numbers of the batches that were marked as complete, sorted.

        Empty where there is no such run: what is to be resumed may never have begun.
        """

    @abstractmethod
    def layers(self, run: str, batch: int) -> list[str]:
        """The layers of a batch, in the order in which they were put.

        Raises:
            SelectionError: there is no such run or batch.
        """

    @abstractmethod
    def get(self, run: str, batch: int, layer: str) -> dict[str, Tensor]:
        """The tensors of a layer by name, on the CPU; the caller's own.

        Raises:
            SelectionError: there is no such run, batch or layer.
            StoreError: what was stored is damaged.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self.close()
        except StoreError:
            # One that is on its way says what happened first, as often as not the same.
            if error is None:
                raise


@dataclass
class _Batch:
    """The tensors of a batch by layer and name."""

    layers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    nbytes: int = 0
    complete: bool = False

    def add(self, layer: str, tensors: Mapping[str, Tensor]) -> None:
        old = self.layers.get(layer, {})
        replaced = (old[name].nbytes for name in old.keys() & tensors.keys())
        self.nbytes += sum(tensor.nbytes for tensor in tensors.values()) - sum(replaced)
        self.layers[layer] = {**old, **tensors}  # another one: readers may have the old


class MemoryStore(Store):
    """Keeps everything in memory."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, _Batch]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def put(  # noqa: D102 (the base says it, here and below)
        self,
        run: str,
        batch: int,
        layer: str,
        tensors: Mapping[str, Tensor],
        *,
        copy: bool = True,
    ) -> None:
        owned = _owned(run, batch, layer, tensors, copy=copy)
        self._check_open()
        with self._lock:
            self._opened(run, batch).add(layer, owned)

    def complete(self, run: str, batch: int) -> None:  # noqa: D102
        _check_place(run, batch)
        self._check_open()
        with self._lock:
            self._opened(run, batch).complete = True

    def _check_open(self) -> None:
        if self._closed:
            msg = "the store is closed: put what you collect before close()"
            raise StoreError(msg)

    def _opened(self, run: str, batch: int) -> _Batch:
        return self._runs.setdefault(run, {}).setdefault(batch, _Batch())

    def discard(self, run: str, batch: int) -> None:  # noqa: D102
        with self._lock:
            batches = self._runs.get(run, {})
            if batch in batches and not batches[batch].complete:
                del batches[batch]

    def flush(self) -> None:
        """Does nothing: what was put is where it stays."""

    def close(self) -> None:
        """Refuses to take more; what is there stays readable."""
        self._closed = True

    def runs(self) -> list[str]:  # noqa: D102
        return sorted(self._runs)

    def batches(self, run: str) -> list[int]:  # noqa: D102
        return sorted(_found(self._runs, run, "run"))

    def completed(self, run: str) -> list[int]:  # noqa: D102
        batches = self._runs.get(run, {})
        return sorted(number for number, batch in list(batches.items()) if batch.complete)

    def layers(self, run: str, batch: int) -> list[str]:  # noqa: D102
        return list(self._batch(run, batch).layers)

    def get(self, run: str, batch: int, layer: str) -> dict[str, Tensor]:  # noqa: D102
        tensors = _found(self._batch(run, batch).layers, layer, "layer")
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def _batch(self, run: str, batch: int) -> _Batch:
        return _found(_found(self._runs, run, "run"), batch, "batch")


class LocalStore(Store):
    """Keeps everything in a folder: a file in the format of safetensors for each batch.

    A thread writes in the background what was put. When more than `max_pending` bytes wait for it,
    putting waits too: a slow disk slows the model and loses nothing. A file appears whole or not at
    all, and is then noted in the index of its run (`index.jsonl`): whatever kills the process,
    batches in the index are complete and readable. That is every batch after `flush` or `close`
    returned. Batches that are open then are written as they are and go on in a second file.

    One store writes to a folder at a time; any number read it meanwhile. Reading flushes first what
    the store itself was given. A store that nobody closed is closed at the end of the process.

    Reading needs the package safetensors (`ferrohook[safetensors]`).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        read_only: bool = False,
        max_pending: int = 2**28,
        sync: bool = False,
    ) -> None:
        """Opens a folder, which is made where it is not there.

        Args:
            folder: where the runs are, a folder for each.
            read_only: leave it as it is, beside a store that writes to it.
            max_pending: how many bytes may wait to be written; a larger batch waits alone.
            sync: what was acknowledged survives a loss of power too, which takes time.

        Raises:
            StoreError: the folder cannot be written, another store writes to it, or it is not there
                and `read_only`.
            HookTypeError: an option of the wrong type.
            ValueError: a `max_pending` below 1.
        """
        max_pending = at_least_one("max_pending", max_pending, "a number of bytes")
        self._folder = _Folder(Path(folder), sync=sync)
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], _Batch] = {}
        self._writer: _Writer | None = None
        if read_only:
            self._folder.check()
        else:
            self._writer = _Writer(self._folder.claim(), self._folder.write, max_pending)
        # Not one of its own methods: it would keep the store alive.
        self._finalizer = weakref.finalize(self, _close, self._writer, self._lock, self._open)
        if self._writer is not None:
            self._writer.start()  # now that Ctrl-C in between would end it again

    def put(  # noqa: D102
        self,
        run: str,
        batch: int,
        layer: str,
        tensors: Mapping[str, Tensor],
        *,
        copy: bool = True,
    ) -> None:
        writer = self._check_writable()
        owned = _owned(run, batch, layer, tensors, copy=copy)
        with self._lock:
            self._check_writable()  # once more: closing takes what is open under this lock
            opened = self._open.setdefault((run, batch), _Batch())
            opened.add(layer, owned)
            # Nor may open batches fill the memory: the largest goes ahead.
            full = sum(each.nbytes for each in self._open.values()) > self._max_pending
            ahead = max(self._open, key=lambda it: self._open[it].nbytes) if full else None
            early = None if ahead is None else self._open.pop(ahead)
        if ahead is not None and early is not None:
            writer.put(_Shard(*ahead, early))

    def complete(self, run: str, batch: int) -> None:
        """Marks a batch as complete and hands it to the writer.

        It is acknowledged by the next `flush`, or when `completed` lists it.
        """
        _check_place(run, batch)
        writer = self._check_writable()
        with self._lock:
            finished = self._open.pop((run, batch), _Batch())
        finished.complete = True
        writer.put(_Shard(run, batch, finished))

    def discard(self, run: str, batch: int) -> None:  # noqa: D102
        with self._lock:
            self._open.pop((run, batch), None)

    def flush(self) -> None:  # noqa: D102
        if self._writer is not None and not self._writer.closed:
            _hand_over(self._writer, self._lock, self._open)
            self._writer.drain()

    def close(self) -> None:  # noqa: D102
        if not self._finalizer.alive:
            return
        try:
            _close(self._writer, self._lock, self._open)
        except StoreError:
            self._finalizer.detach()
            raise
        # What ends this before, Ctrl-C for one, leaves the rest to the finaliser.
        self._finalizer.detach()

    def _check_writable(self) -> _Writer:
        if self._writer is None:
            msg = (
                f"{self._folder.path} was opened read_only: open another LocalStore to put into it"
            )
            raise StoreError(msg)
        if self._writer.closed:
            raise StoreError(_closed(self._folder.path))
        if self._writer.process != os.getpid():
            msg = (
                f"the store of {self._folder.path} writes in process {self._writer.process}, which "
                "this one was forked from: open another LocalStore on another folder"
            )
            raise StoreError(msg)
        return self._writer

    def runs(self) -> list[str]:  # noqa: D102
        self.flush()
        return self._folder.runs()

    def batches(self, run: str) -> list[int]:  # noqa: D102
        return sorted(self._index(run))

    def completed(self, run: str) -> list[int]:  # noqa: D102
        _check_place(run, 0)
        if run not in self.runs():
            return []
        return sorted(number for number, noted in self._index(run).items() if noted.complete)

    def layers(self, run: str, batch: int) -> list[str]:  # noqa: D102
        return list(_found(self._index(run), batch, "batch").layers)

    def get(self, run: str, batch: int, layer: str) -> dict[str, Tensor]:  # noqa: D102
        noted = _found(self._index(run), batch, "batch")
        files = _found(noted.layers, layer, "layer")
        return self._folder.read(run, layer, files)

    def _index(self, run: str) -> Mapping[int, _Noted]:
        _found(dict.fromkeys(self.runs()), run, "run")
        return self._folder.index(run).read()


@dataclass(frozen=True)
class _Shard:
    """What is to be written of a batch."""

    run: str
    batch: int
    content: _Batch

    def __str__(self) -> str:
        return f"batch {self.batch} of run {self.run!r}"


class _Writer:
    """Writes shards in the background, in the order in which they come.

    After an error it writes nothing more: what comes later would leave a gap.
    """

    def __init__(self, claim: _Claim, write: Callable[[_Shard], None], most_bytes: int) -> None:
        self._claim = claim
        self._write = write
        self._most_bytes = most_bytes
        self.process = os.getpid()
        # Ctrl-C may leave the lock of a Condition taken, and nobody would write any more: that of
        # a `with` it does not, nor are the queues ever half-way through something. Recursive: the
        # garbage collector may run, and close a store that was forgotten, on any thread.
        self._lock = threading.RLock()
        # The one that is being written stays the first until it is there.
        self._waiting: deque[tuple[_Shard, int]] = deque()
        self._told: SimpleQueue[None] = SimpleQueue()
        self._to_tell: list[SimpleQueue[None]] = []
        self.closed = False
        self._error: StoreError | None = None
        self._thread: int | None = None
        self._started = False
        self._over = threading.Lock()
        self._over.acquire()

    def start(self) -> None:
        # Not by a Thread, whose start waits by a Condition. As a daemon: the end of the process is
        # not to wait for a store that is closed only then.
        self._started = True  # ahead, where no Ctrl-C comes in between
        try:
            start_new_thread(self._run, ())
        except RuntimeError:
            self._started = False
            raise

    def put(self, shard: _Shard) -> None:
        nbytes = shard.content.nbytes
        own = threading.get_ident() == self._thread  # a forgotten store's, see above

        def fits() -> bool:
            pending = sum(waiting for _, waiting in self._waiting)
            return own or not self._waiting or pending + nbytes <= self._most_bytes

        self._when(lambda: self.closed or fits(), lambda: self._add(shard, nbytes))
        self._told.put(None)

    def _add(self, shard: _Shard, nbytes: int) -> None:
        if self.closed:
            raise StoreError(_closed(self._claim.folder))
        self._waiting.append((shard, nbytes))

    def drain(self) -> None:
        self._when(lambda: not self._waiting, lambda: None)

    def _when(self, ready: Callable[[], bool], act: Callable[[], None]) -> None:
        """Acts as soon as that is possible, with nobody coming in between."""
        while True:
            with self._lock:
                self._check()
                if ready():
                    act()
                    return
                news: SimpleQueue[None] = SimpleQueue()
                self._to_tell.append(news)
            # It may not know: of what was put when Ctrl-C came.
            self._told.put(None)
            news.get()

    def _tell(self) -> None:
        """Has all look again who wait for something."""
        for news in self._to_tell:
            news.put(None)
        self._to_tell.clear()

    def close(self) -> None:
        """Ends it when all is written."""
        with self._lock:
            self.closed = True
            self._tell()
        self._told.put(None)
        if threading.get_ident() == self._thread:
            return  # see `put`
        if self._started:  # not where starting it was interrupted
            with self._over:
                self._check()

    def _check(self) -> None:
        if self._error is not None:
            # Another one each time: a traceback grows with each raise.
            raise StoreError(*self._error.args) from self._error.__cause__

    def _run(self) -> None:
        self._thread = threading.get_ident()
        try:
            with self._claim:
                self._write_all()
        finally:
            self._over.release()

    def _write_all(self) -> None:
        while not self._ended():
            self._told.get()
            while self._waiting:
                shard, _ = self._waiting[0]
                try:
                    self._write(shard)
                except Exception as error:  # noqa: BLE001 (told to whoever puts or flushes next)
                    self._fail(shard, error)
                    return
                with self._lock:
                    self._waiting.popleft()
                    self._tell()
                del shard  # not to be kept while waiting for the next

    def _ended(self) -> bool:
        with self._lock:
            return self.closed and not self._waiting

    def _fail(self, shard: _Shard, error: Exception) -> None:
        msg = (
            f"writing {shard} to {self._claim.folder} failed: {error}. Everything before it is "
            "there: make room or mend the folder, open the store again and go on with this batch"
        )
        with self._lock:
            self._error = StoreError(msg)
            self._error.__cause__ = error
            self._waiting.clear()
            self._tell()


def _closed(folder: Path) -> str:
    return f"the store of {folder} is closed: put what you collect before close()"


def _hand_over(
    writer: _Writer, lock: threading.Lock, opened: dict[tuple[str, int], _Batch]
) -> None:
    """Has open batches written as they are."""
    while True:
        with lock:
            if not opened:
                return
            place = next(iter(opened))
            batch = opened.pop(place)
        writer.put(_Shard(*place, batch))


def _close(
    writer: _Writer | None, lock: threading.Lock, opened: dict[tuple[str, int], _Batch]
) -> None:
    # A forked process has the queue, and no thread that writes.
    if writer is None or writer.process != os.getpid():
        return
    try:
        _hand_over(writer, lock, opened)
    finally:
        writer.close()


class _Claim:
    """The right to write to a folder: the kernel takes it back when the process ends, however."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A file object: where something ends this half-way, the descriptor is closed with it.
        self._file = (folder / ".lock").open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            number = self._file.read(20).decode()
            self._file.close()
            owner = f"process {number}" if number else "another process"
            msg = (
                f"{folder} is being written by a store of {owner}: close that one, take another "
                "folder, or open it with read_only=True"
            )
            raise StoreError(msg) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # By name: a forked process may have the descriptor too.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


class _Folder:
    """The files of a store."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.path = path
        self._sync = sync
        self._indices: dict[str, _Index] = {}

    def check(self) -> None:
        if not self.path.is_dir():
            msg = f"{self.path} is no folder that could be read: a store makes it when it writes"
            raise StoreError(msg)

    def claim(self) -> _Claim:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            claim = _Claim(self.path)
        except OSError as error:
            msg = (
                f"{self.path} cannot be written: {error}. Give a folder that this process may write"
            )
            raise StoreError(msg) from error
        try:
            # What one left that was killed while it wrote.
            for part in self.path.glob("*/*.part"):
                part.unlink(missing_ok=True)
        except BaseException:  # by Ctrl-C: what the generators' frames hold may live on for a while
            claim.__exit__()
            raise
        return claim

    def runs(self) -> list[str]:
        return sorted(index.parent.name for index in self.path.glob(f"*/{_Index.NAME}"))

    def index(self, run: str) -> _Index:
        return self._indices.setdefault(run, _Index(self.path / run))

    def write(self, shard: _Shard) -> None:
        index = self.index(shard.run)
        index.folder.mkdir(exist_ok=True)
        noted = index.read().get(shard.batch, _Noted())
        tensors = {
            _key(layer, name): tensor
            for layer, named in shard.content.layers.items()
            for name, tensor in named.items()
        }
        file: _File | None = None
        if tensors:
            again = f".{noted.files}" if noted.files else ""
            path = index.folder / f"{shard.batch:08}{again}.safetensors"
            shards.write(path, tensors, {"ferrohook.store": str(shard)}, sync=self._sync)
            file = _File(path.name, path.stat().st_size)
        index.append(
            {
                "batch": shard.batch,
                "file": None if file is None else file._asdict(),
                "layers": {layer: list(named) for layer, named in shard.content.layers.items()},
                "complete": shard.content.complete,
            },
            sync=self._sync,
        )

    def read(self, run: str, layer: str, files: Mapping[str, _File]) -> dict[str, Tensor]:
        """The tensors of a layer, which of them is in which file being known."""
        names: dict[_File, list[str]] = defaultdict(list)
        for name, file in files.items():
            names[file].append(name)
        tensors: dict[str, Tensor] = {}
        for file, inside in names.items():
            tensors |= self._read(self.path / run, file, layer, inside)
        return {name: tensors[name] for name in files}

    def _read(self, folder: Path, file: _File, layer: str, names: list[str]) -> dict[str, Tensor]:
        path = folder / file.name
        library = shards.safetensors_library()
        try:
            size = path.stat().st_size
            if size != file.bytes:
                msg = f"{path} is damaged: it has {size} bytes where {file.bytes} were written"
                raise StoreError(msg)
            with library.safe_open(path, framework="pt") as tensors:
                return {name: tensors.get_tensor(_key(layer, name)) for name in names}
        except (OSError, library.SafetensorError) as error:
            msg = f"{path} cannot be read, although the index of its run has it: {error}"
            raise StoreError(msg) from error


class _File(NamedTuple):
    name: str
    bytes: int


@dataclass
class _Noted:
    """What an index says of a batch."""

    layers: dict[str, dict[str, _File]] = field(default_factory=dict)
    files: int = 0
    complete: bool = False


class _Index:
    """Which batches and layers of a run are in which files: a line of JSON for each file.

    Lines are only ever added. One without its end is that of a process which was killed, and
    counts for nothing.
    """

    NAME = "index.jsonl"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / self.NAME
        self._lock = threading.Lock()
        self._batches: dict[int, _Noted] = {}
        self._bytes_read = 0

    def read(self) -> Mapping[int, _Noted]:
        """The batches by number, as they are now."""
        with self._lock:
            self._read_on()
            return dict(self._batches)

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._bytes_read)
                added = file.read()
        except FileNotFoundError:
            return
        for line in added.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            try:
                self._note(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                msg = f"{self._path} is damaged: line at byte {self._bytes_read} is {line[:80]!r}"
                raise StoreError(msg) from error
            self._bytes_read += len(line)

    def _note(self, line: dict[str, Any]) -> None:
        old = self._batches.get(line["batch"], _Noted())
        file = None if line["file"] is None else _File(**line["file"])
        new = {
            # Without a file there are no names.
            layer: old.layers.get(layer, {}) | {name: file for name in names if file is not None}
            for layer, names in line["layers"].items()
        }
        # Another one: readers may have the old.
        self._batches[line["batch"]] = _Noted(
            old.layers | new, old.files + (file is not None), old.complete or line["complete"]
        )

    def append(self, line: dict[str, Any], *, sync: bool) -> None:
        encoded = json.dumps(line).encode() + b"\n"
        with self._lock:
            self._read_on()
            with self._path.open("ab", buffering=0) as file:
                try:
                    file.truncate(self._bytes_read)
                    if file.write(encoded) != len(encoded):
                        msg = f"no room for the whole line in {self._path}"
                        raise OSError(msg)  # noqa: TRY301 (as if the write had raised it)
                    if sync:
                        os.fsync(file.fileno())
                        shards.sync_to_disk(self.folder)
                        shards.sync_to_disk(self.folder.parent)
                except BaseException:
                    file.truncate(self._bytes_read)
                    raise
            self._read_on()


def _key(layer: str, name: str) -> str:
    return f"{layer}/{name}"


def _check_place(run: str, batch: int) -> None:
    if not isinstance(run, str):
        msg = f"run is a str, got {type(run).__name__}"
        raise HookTypeError(msg)
    if not _NAME.fullmatch(run):
        msg = f"run is a name of letters, digits, '_', and later '-' and '.', got {run!r}"
        raise ValueError(msg)
    if not isinstance(batch, int) or isinstance(batch, bool):
        msg = f"batch is a number, got {type(batch).__name__}"
        raise HookTypeError(msg)
    if batch < 0:
        msg = f"batch is at least 0, got {batch}"
        raise ValueError(msg)


def _owned(
    run: str, batch: int, layer: str, tensors: Mapping[str, Tensor], *, copy: bool
) -> dict[str, Tensor]:
    """The tensors as a store keeps them."""
    _check_place(run, batch)
    if not isinstance(layer, str):
        msg = f"layer is a str, got {type(layer).__name__}"
        raise HookTypeError(msg)
    if not isinstance(tensors, Mapping):
        msg = f"the tensors of a layer are a mapping from their names, got {type(tensors).__name__}"
        raise HookTypeError(msg)
    owned = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            found = f"from {type(name).__name__} to {type(tensor).__name__}"
            msg = f"layer {layer!r}: a store keeps tensors by name, got an item {found}"
            raise HookTypeError(msg)
        if "/" in name or not name:
            msg = (
                f"layer {layer!r}: the name of a tensor has no slash and is not empty, got {name!r}"
            )
            raise ValueError(msg)
        if tensor.layout != torch.strided:
            msg = f"layer {layer!r}: {name!r} is of layout {tensor.layout}: store its to_dense()"
            raise HookTypeError(msg)
        if tensor.dtype not in shards.FORMATS:
            msg = f"layer {layer!r}: {name!r} is of {tensor.dtype}, which safetensors does not know"
            raise HookTypeError(msg)
        here = tensor.detach().resolve_conj().resolve_neg().to("cpu")
        mine = copy and here.data_ptr() == tensor.data_ptr()
        contiguous = torch.contiguous_format
        owned[name] = here.clone(memory_format=contiguous) if mine else here.contiguous()
    return owned


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _found(known: Mapping[_Key, _Value], wanted: _Key, what: str) -> _Value:
    try:
        return known[wanted]
    except (KeyError, TypeError):
        names = list(known)
        some = ", ".join(map(repr, names[:MOST_NAMED])) or "none"
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        msg = f"the store has no {what} {wanted!r} there: it has {some}{more}"
        raise SelectionError(msg) from None
