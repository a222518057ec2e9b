"""`RunIndex`: the batches of a run and their files."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrohook import shards
from ferrohook.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class ShardFile(NamedTuple):
    """Name and size of a file."""

    name: str
    bytes: int


@dataclass
class IndexedBatch:
    """Entry of a batch in an index."""

    layers: dict[str, dict[str, ShardFile]] = field(default_factory=dict)
    files: int = 0
    complete: bool = False


class RunIndex:
    """Index of a run: one line of JSON per file, with its batch and layers.

    Lines are only appended. A last line without a line end is ignored: its process was killed.
    """

    NAME = "index.jsonl"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / self.NAME
        self._lock = threading.Lock()
        self._batches: dict[int, IndexedBatch] = {}
        self._bytes_read = 0

    def read(self) -> Mapping[int, IndexedBatch]:
        """Reads new lines; returns the batches by index."""
        with self._lock:
            self._read_new_lines()
            return dict(self._batches)

    def _read_new_lines(self) -> None:
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
                self._add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                msg = f"{self._path} is damaged: line at byte {self._bytes_read} is {line[:80]!r}"
                raise StoreError(msg) from error
            self._bytes_read += len(line)

    def _add(self, line: dict[str, Any]) -> None:
        old = self._batches.get(line["batch"], IndexedBatch())
        file = None if line["file"] is None else ShardFile(**line["file"])
        new = {
            # A line without a file has no names.
            layer: old.layers.get(layer, {}) | {name: file for name in names if file is not None}
            for layer, names in line["layers"].items()
        }
        # A new object: readers may have the old.
        self._batches[line["batch"]] = IndexedBatch(
            old.layers | new, old.files + (file is not None), old.complete or line["complete"]
        )

    def append(self, line: dict[str, Any], *, sync: bool) -> None:
        """Appends a line, whole or not at all."""
        encoded = json.dumps(line).encode() + b"\n"
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
                        shards.sync_to_disk(self.folder)
                        shards.sync_to_disk(self.folder.parent)
                except BaseException:
                    file.truncate(self._bytes_read)
                    raise
            self._read_new_lines()
