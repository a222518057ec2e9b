"""Indices that no store wrote: they name no file outside of their batch, and raise `StoreError`."""

from __future__ import annotations

import json
import random
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh

if TYPE_CHECKING:
    from pathlib import Path


def _line(text: str) -> bytes:
    """Returns a line of an index, with its checksum."""
    content = text.removesuffix("}").encode()
    return content + b', "crc32": %d}\n' % zlib.crc32(content)


def _hostile_store(folder: Path, text: str) -> Path:
    (folder / "store" / "run").mkdir(parents=True)
    (folder / "store" / "run" / "index.jsonl").write_bytes(_line(text))
    return folder / "store"


@pytest.mark.parametrize(
    "name",
    [
        "../../victim",
        "../../victim.safetensors",
        "../00000000.safetensors",
        "./00000000.safetensors",
        "/victim.safetensors",
        "00000000.safetensors/../../../victim",
        "00000001.safetensors",  # of another batch
        "index.jsonl",
        "",
        ".",
        "00000000.safetensors\n",
        "00000000.safetensors\0",
        "00000000.x.safetensors",
        3,
        None,
        ["00000000.safetensors"],
    ],
)
def test_a_name_from_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    file = {"name": name, "bytes": 8, "crc32": zlib.crc32(b"precious")}
    line = {"batch": 0, "file": file, "layers": {"0": ["output"]}, "complete": False}
    folder = _hostile_store(tmp_path, json.dumps(line))
    model, batches = torch.nn.Sequential(torch.nn.Linear(4, 4)), [torch.randn(2, 4)]
    with fh.data.LocalStore(folder) as store:
        with pytest.raises(fh.errors.StoreError, match="damaged"):
            fh.collect(model, batches, "0", store, progress=False)
        for read in (
            lambda: store.get("run", 0, "0"),
            lambda: store.verify("run"),
            lambda: store.completed("run"),
        ):
            with pytest.raises(fh.errors.StoreError, match="damaged"):
                read()
    assert victim.read_text() == "precious"


def _mutated(chosen: random.Random, value: Any) -> Any:
    """Replaces one part of JSON by something else."""
    odd: list[Any] = [None, True, -1, 2**70, 0.5, "", "..", "a/b", [], {}, [[]], {"a": {}}]
    if isinstance(value, dict) and value and chosen.random() < 0.8:
        key = chosen.choice([*value])
        return {**value, key: _mutated(chosen, value[key])}
    if isinstance(value, list) and value and chosen.random() < 0.8:
        return [_mutated(chosen, value[0]), *value[1:]]
    return chosen.choice(odd)


def test_mutated_indices_raise_store_errors(tmp_path: Path) -> None:
    chosen = random.Random(0)  # noqa: S311 (no secret)
    model, batches = torch.nn.Sequential(torch.nn.Linear(4, 4)), [torch.randn(2, 4)]
    with fh.data.LocalStore(tmp_path / "whole") as store:
        fh.collect(model, batches, "0", store, progress=False)
    path = tmp_path / "whole" / "run" / "index.jsonl"
    entry = json.loads(path.read_text())
    del entry["crc32"]
    refused = 0
    for _ in range(300):
        path.write_bytes(_line(json.dumps(_mutated(chosen, entry))))
        try:
            with fh.data.LocalStore(tmp_path / "whole") as store:
                store.verify()
                fh.collect(model, batches, "0", store, progress=False)
        except (fh.errors.StoreError, fh.errors.ResumeError, fh.errors.UnverifiedWarning):
            refused += 1
    assert 100 < refused < 300
    assert sorted(each.name for each in tmp_path.iterdir()) == ["whole"]


def test_deep_nesting_is_a_damaged_index(tmp_path: Path) -> None:
    folder = _hostile_store(tmp_path, "[" * 100_000)
    with fh.data.LocalStore(folder) as store, pytest.raises(fh.errors.StoreError, match="damaged"):
        store.completed("run")
