"""Checksums of stores: a changed bit is found, in files and in the index."""

from __future__ import annotations

import os
import random
import zlib
from typing import TYPE_CHECKING

import pytest
import torch

import ferrohook as fh
from ferrohook._core import crc32
from ferrohook.data import LocalStore, MemoryStore
from support.amounts import amount
from support.stores import check, fill

if TYPE_CHECKING:
    from pathlib import Path


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def bits(path: Path) -> range:
    """Every seventh bit of a file, at each place in a byte; with `--whole` every bit."""
    return range(0, 8 * path.stat().st_size, amount(7, whole=1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with LocalStore(tmp_path) as store:
        fill(store, 0, 1, 2)
        fill(store, 0, run="other")
    return tmp_path


@pytest.mark.parametrize("size", [0, 1, 7, 1000, 100_003])
def test_the_checksum_is_that_of_zlib(size: int) -> None:
    data = random.Random(size).randbytes(size)  # noqa: S311 (not for cryptography)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[size // 3 :], 5) == zlib.crc32(data[size // 3 :], 5)
    if size > 1:
        with pytest.raises(BufferError, match="needs a contiguous buffer"):
            crc32(memoryview(data)[::2])


def test_a_changed_bit_of_a_file_is_found(folder: Path) -> None:
    path = folder / "run" / "00000001.safetensors"
    store = LocalStore(folder, read_only=True)
    for bit in bits(path):
        flip(path, bit)
        ((run, batch, problem),) = store.verify()
        assert (run, batch) == ("run", 1)
        assert f"{path} is damaged: its checksum is " in problem
        flip(path, bit)
    assert store.verify() == []


def test_a_changed_bit_is_found_by_reading_on_wish(folder: Path) -> None:
    path = folder / "run" / "00000001.safetensors"
    flip(path, 8 * path.stat().st_size - 8)
    store = LocalStore(folder, read_only=True)
    assert store.get("run", 1, "layer")["output"][-1] != 1  # unnoticed without `verify`
    with pytest.raises(
        fh.errors.StoreError, match=rf"{path} is damaged: its checksum is \w{{8}}, but that"
    ):
        store.get("run", 1, "layer", verify=True)
    for batch in (0, 2):
        assert (store.get("run", batch, "layer", verify=True)["output"] == batch).all()


def test_all_damaged_batches_are_named(folder: Path) -> None:
    flip(folder / "run" / "00000000.safetensors", 1000)
    os.truncate(folder / "run" / "00000001.safetensors", 20)
    (folder / "other" / "00000000.safetensors").unlink()
    store = LocalStore(folder, read_only=True)
    found = store.verify()
    assert [(it.run, it.batch) for it in found] == [("other", 0), ("run", 0), ("run", 1)]
    for each, told in zip(found, ("cannot be read", "checksum", "it has 20 bytes"), strict=True):
        assert told in each.problem
    assert store.verify("run") == found[1:]
    assert store.verify("run", contents=False) == found[2:]
    with pytest.raises(fh.SelectionError, match="no run 'none' there"):
        store.verify("none")


def test_a_changed_bit_of_the_index_is_found(folder: Path) -> None:
    index = folder / "run" / "index.jsonl"
    for bit in bits(index):
        flip(index, bit)
        store = LocalStore(folder, read_only=True)
        if bit >= 8 * (index.stat().st_size - 1):  # an incomplete last line: not yet written
            assert store.completed("run") == [0, 1]
        else:
            with pytest.raises(
                fh.errors.StoreError, match=r"index.jsonl is damaged: the line at byte"
            ):
                store.verify()
        flip(index, bit)
    check(LocalStore(folder, read_only=True), 0, 1, 2)


def test_a_batch_in_several_files_is_verified(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        store.put("run", 0, "a", {"x": torch.ones(9)})
        store.flush()
        store.put("run", 0, "b", {"x": torch.ones(9)})
        store.complete("run", 0)
        assert store.verify() == []
        for name in ("00000000.safetensors", "00000000.1.safetensors"):
            flip(tmp_path / "run" / name, 800)
            assert [each.batch for each in store.verify()] == [0]
            flip(tmp_path / "run" / name, 800)


def test_a_restarted_batch_has_the_new_tensors_alone(tmp_path: Path) -> None:
    for store in (MemoryStore(), LocalStore(tmp_path)):
        with store:
            fill(store, 0)
            store.put("run", 0, "more", {"x": torch.ones(1)})
            store.complete("run", 0, fingerprint="of 0")
            store.restart("run", 0)
            assert store.fingerprints("run") == {0: "of 0"}
            fill(store, 0)
            check(store, 0)
            assert store.verify() == []
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "00000000.safetensors",
        "index.jsonl",
    }


def test_records_of_runs(store: fh.data.Store) -> None:
    assert store.manifest("run") is None
    assert store.fingerprints("run") == {}
    store.complete("run", 0, fingerprint="a", manifest={"of": 1})
    store.complete("run", 1, fingerprint="b", manifest={"of": 2})
    store.complete("run", 2)
    store.complete("other", 0)
    assert store.manifest("run") == {"of": 1}
    assert store.fingerprints("run") == {0: "a", 1: "b"}
    assert (store.manifest("other"), store.fingerprints("other")) == (None, {})
    assert store.verify("run") == []


def test_repair_removes_damaged_batches_and_no_others(folder: Path) -> None:
    flip(folder / "run" / "00000000.safetensors", 1000)
    (folder / "other" / "00000000.safetensors").unlink()
    with pytest.raises(fh.errors.StoreError, match="read_only"):
        LocalStore(folder, read_only=True).repair()
    with LocalStore(folder) as store:
        with pytest.raises(fh.SelectionError, match="no run 'none' there"):
            store.repair("none")
        assert [(each.run, each.batch) for each in store.repair("run")] == [("run", 0)]
        assert [(each.run, each.batch) for each in store.verify()] == [("other", 0)]
        store.repair()
        assert store.verify() == store.repair() == []
        assert store.batches("run") == store.completed("run") == [1, 2]
    assert not (folder / "run" / "00000000.safetensors").exists()
    check(LocalStore(folder, read_only=True), 1, 2)


@pytest.mark.parametrize("repair", [False, True])
def test_collect_makes_a_damaged_batch_again(tmp_path: Path, repair: bool) -> None:
    model = torch.nn.Linear(4, 4)
    batches = torch.ones(6, 4).split(2)
    with LocalStore(tmp_path) as store:
        assert fh.collect(model, batches, "", store) == (3, 0)
        expected = store.get("run", 1, "")["output"]
    flip(tmp_path / "run" / "00000001.safetensors", 8 * 100)
    with LocalStore(tmp_path) as store:
        if repair:
            store.repair()
        assert fh.collect(model, batches, "", store) == (1, 2)
        assert store.verify() == []
        assert torch.equal(store.get("run", 1, "", verify=True)["output"], expected)
