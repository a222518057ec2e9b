"""`Folder`: the files of a `LocalStore`, and the lock on them."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

from ferrohook.captures import tensor_files
from ferrohook.data.stores.index import IndexedBatch, RunIndex, ShardFile
from ferrohook.errors import StoreError
from ferrohook.util.texts import imported

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from ferrohook.data.stores.shard import Shard


class FolderLock:
    """Exclusive lock for writing to a folder; the kernel releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A file object: closes the descriptor if an exception ends `__init__`.
        self._file = (folder / ".lock").open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            number = self._file.read(20).decode()
            self._file.close()
            owner = f"process {number}" if number else "another process"
            msg = (
                f"{folder} is being written by a store of {owner}: close that store, use another "
                "folder, or open it with read_only=True"
            )
            raise StoreError(msg) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Explicit unlock: a forked process may still have the descriptor.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


class Folder:
    """Files of a store."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.path = path
        self.sync = sync
        self._indices: dict[str, RunIndex] = {}

    def check(self) -> None:
        """Validates that the folder exists."""
        if not self.path.is_dir():
            msg = f"{self.path} is not a folder: open the store without read_only to create it"
            raise StoreError(msg)

    def lock(self) -> FolderLock:
        """Creates and locks the folder, and removes partial files."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.path)
        except OSError as error:
            msg = (
                f"{self.path} cannot be written: {error}. Use a folder that this process can write "
                "to"
            )
            raise StoreError(msg) from error
        try:
            # Left by a process that was killed while writing.
            for part in self.path.glob("*/*.part"):
                part.unlink(missing_ok=True)
        except BaseException:  # explicit: after Ctrl-C, frames in the traceback keep it alive
            lock.__exit__()
            raise
        return lock

    def runs(self) -> list[str]:
        """Lists the names of the runs, sorted."""
        return sorted(index.parent.name for index in self.path.glob(f"*/{RunIndex.NAME}"))

    def index(self, run: str) -> RunIndex:
        """Returns the index of a run."""
        return self._indices.setdefault(run, RunIndex(self.path / run))

    def find(self, run: str, batch: int) -> IndexedBatch | None:
        """Returns a batch of an index that was read before; None without one."""
        try:
            index = self._indices.get(run)
            return None if index is None else index.find(batch)
        except TypeError:  # not hashable
            return None

    def write(self, shard: Shard) -> None:
        """Writes a shard to a new file and adds it to the index."""
        index = self.index(shard.run)
        index.folder.mkdir(exist_ok=True)
        content = shard.content
        before = index.find(shard.batch) or IndexedBatch()
        restarted = content.restarted and before != IndexedBatch()
        files = () if restarted else before.files
        tensors = {
            _tensor_key(layer, name): tensor
            for layer, named in content.layers.items()
            for name, tensor in named.items()
        }
        file: ShardFile | None = None
        if tensors:
            # A kill before the line is written leaves the files of the index as they are.
            used = {each.name for each in before.files}
            names = (ShardFile.numbered(shard.batch, each) for each in itertools.count(len(files)))
            path = index.folder / next(name for name in names if name not in used)
            metadata = {"ferrohook.store": str(shard)}
            checksum = tensor_files.Checksum()
            tensor_files.write(path, tensors, metadata, sync=self.sync, checksum=checksum)
            file = ShardFile(path.name, path.stat().st_size, checksum.value)
        line: dict[str, Any] = {
            "batch": shard.batch,
            "file": None if file is None else file._asdict(),
            "layers": {layer: list(named) for layer, named in content.layers.items()},
            "complete": content.complete,
        }
        if restarted:
            line["restarted"] = True
        if content.fingerprint:
            line["fingerprint"] = content.fingerprint
        if content.manifest is not None and index.manifest is None:
            line["manifest"] = content.manifest
        index.append(line, sync=self.sync)
        if restarted:
            for old in before.files:
                (index.folder / old.name).unlink(missing_ok=True)

    def damage(self, run: str, file: ShardFile, *, contents: bool) -> str | None:
        """Compares a file with its index entry.

        Args:
            run: name of the run.
            file: the entry.
            contents: compare the checksum too, which reads the file.

        Returns:
            A sentence on the damage; None if there is none.
        """
        path = self.path / run / file.name
        try:
            if (size := path.stat().st_size) != file.bytes:
                return f"{path} is damaged: it has {size} bytes, but {file.bytes} were written"
            if contents and (found := tensor_files.Checksum.of(path)) != file.crc32:
                return (
                    f"{path} is damaged: its checksum is {found:08x}, but that of the written "
                    f"bytes was {file.crc32:08x}"
                )
        except OSError as error:
            return f"{path} cannot be read, although the index of its run lists it: {error}"
        return None

    def read(
        self, run: str, layer: str, files: Mapping[str, ShardFile], *, verify: bool
    ) -> dict[str, Tensor]:
        """Reads the tensors of a layer from their files; `verify` compares checksums first."""
        names: dict[ShardFile, list[str]] = defaultdict(list)
        for name, file in files.items():
            names[file].append(name)
        tensors: dict[str, Tensor] = {}
        for file, contained in names.items():
            if problem := self.damage(run, file, contents=verify):
                raise StoreError(problem)
            tensors |= self._read(self.path / run / file.name, layer, contained)
        return {name: tensors[name] for name in files}

    def _read(self, path: Path, layer: str, names: list[str]) -> dict[str, Tensor]:
        library = imported("safetensors", "reading")
        try:
            with library.safe_open(path, framework="pt") as tensors:
                return {name: tensors.get_tensor(_tensor_key(layer, name)) for name in names}
        except (OSError, library.SafetensorError) as error:
            msg = f"{path} cannot be read, although the index of its run lists it: {error}"
            raise StoreError(msg) from error


def _tensor_key(layer: str, name: str) -> str:
    return f"{layer}/{name}"
