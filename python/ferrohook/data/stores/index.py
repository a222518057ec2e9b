"""`RunIndex`: the batches of a run and their files."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ferrohook._core import crc32
from ferrohook.captures import tensor_files
from ferrohook.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import UnionType


class ShardFile(NamedTuple):
    """Name, size and checksum of a file."""

    name: str
    bytes: int
    crc32: int

    @classmethod
    def numbered(cls, batch: int, place: int) -> str:
        """Returns the name of a file of a batch."""
        return f"{batch:08}{f'.{place}' if place else ''}.safetensors"

    @classmethod
    def read(cls, batch: int, entry: dict[str, Any]) -> Self:
        """Validates the entry of a file of a batch.

        Raises:
            TypeError: no store wrote this entry.
            ValueError: the name is no file of this batch, so it may point out of the store.
        """
        file = cls(**entry)
        _expect(file.name, str)
        _expect(file.bytes, int)
        _expect(file.crc32, int)
        if not re.fullmatch(rf"{batch:08}(\.[0-9]+)?\.safetensors", file.name):
            msg = f"{file.name!r} is not a file of batch {batch}"
            raise ValueError(msg)
        return file


@dataclass
class IndexedBatch:
    """Entry of a batch in an index."""

    layers: dict[str, dict[str, ShardFile]] = field(default_factory=dict)
    files: tuple[ShardFile, ...] = ()
    complete: bool = False
    fingerprint: str = ""


class RunIndex:
    """Index of a run: one line of JSON per file, with its batch and layers.

    Lines are only appended. A last line without a line end is ignored: its process was killed. A
    line ends with the checksum of what stands before it.
    """

    NAME = "index.jsonl"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / self.NAME
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        """Starts anew, as for a file that nothing was read of."""
        self._batches: dict[int, IndexedBatch] = {}
        self._bytes_read = 0
        self._last_line = b""
        self.manifest: Mapping[str, Any] | None = None
        """Manifest of the run, once `read` has come by it."""

    def read(self) -> Mapping[int, IndexedBatch]:
        """Reads new lines; returns the batches by index."""
        with self._lock:
            self._read_new_lines()
            return dict(self._batches)

    def find(self, batch: int) -> IndexedBatch | None:
        """Reads new lines; returns a batch, without a copy of all of them."""
        with self._lock:
            return self._batches.get(batch) if self._read_new_lines() else None

    def _read_new_lines(self) -> bool:
        """Returns False if the file is missing."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._bytes_read - len(self._last_line))
                if file.read(len(self._last_line)) != self._last_line:
                    self._forget()  # the run was deleted, and another one has its name
                    file.seek(0)
                added = file.read()
        except FileNotFoundError:
            self._forget()
            return False
        for line in added.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                self._add(_decode(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                msg = (
                    f"{self._path} is damaged: the line at byte {self._bytes_read} is {line[:80]!r}"
                )
                raise StoreError(msg) from error
            self._bytes_read += len(line)
            self._last_line = line
        return True

    def _add(self, line: dict[str, Any]) -> None:
        _expect(line["batch"], int)
        _expect(line.get("manifest"), dict | None)
        _expect(line.get("fingerprint", ""), str)
        for names in line["layers"].values():
            _expect(names, list)
        old = self._batches.get(line["batch"], IndexedBatch())
        if line.get("restarted"):
            old = IndexedBatch(fingerprint=old.fingerprint)
        file = None if line["file"] is None else ShardFile.read(line["batch"], line["file"])
        new = {
            # A line without a file has no names.
            layer: old.layers.get(layer, {}) | {name: file for name in names if file is not None}
            for layer, names in line["layers"].items()
        }
        # A new object: readers may have the old.
        self._batches[line["batch"]] = IndexedBatch(
            old.layers | new,
            old.files if file is None else (*old.files, file),
            old.complete or line["complete"],
            line.get("fingerprint", old.fingerprint),
        )
        self.manifest = self.manifest or line.get("manifest")

    def append(self, line: dict[str, Any], *, sync: bool) -> None:
        """Appends a line, whole or not at all."""
        encoded = _encode(line)
        with self._lock:
            self._read_new_lines()
            with self._path.open("ab", buffering=0) as file:
                try:
                    file.truncate(self._bytes_read)
                    if file.write(encoded) != len(encoded):
                        msg = f"no room for the whole line in {self._path}"
                        raise OSError(msg)  # noqa: TRY301 (like an error of the write itself)
                    if sync:
                        os.fsync(file.fileno())
                        tensor_files.sync_to_disk(self.folder)
                        tensor_files.sync_to_disk(self.folder.parent)
                except BaseException:
                    file.truncate(self._bytes_read)
                    raise
            self._read_new_lines()


def _expect(value: object, kind: type | UnionType) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        msg = f"{value!r} is not of type {kind}"
        raise TypeError(msg)


_CHECKSUM = b', "crc32": '


def _encode(line: dict[str, Any]) -> bytes:
    content = json.dumps(line).encode().removesuffix(b"}")
    return b"%b%b%d}\n" % (content, _CHECKSUM, crc32(content))


def _decode(line: bytes) -> dict[str, Any]:
    # No other member `crc32` follows it, and a str has its quotes escaped.
    content, separator, checksum = line.rpartition(_CHECKSUM)
    if not separator or int(checksum.removesuffix(b"}\n")) != crc32(content):
        msg = "its checksum is missing or wrong"
        raise ValueError(msg)
    return dict(json.loads(line))
