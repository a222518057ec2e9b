"""Damaged files, full disks and killed writers."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from ferrohook.data import LocalStore
from ferrohook.data.stores import index, writer
from support.stores import check, fill, forked, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def write_for_ever(folder: Path, acknowledge: int) -> None:
    store = LocalStore(folder, max_pending=100_000)
    for batch in itertools.count(len(store.completed("run"))):
        store.put("run", batch, "a", {"output": torch.full((batch % 7000,), float(batch))})
        store.put("run", batch, "b", {"output": torch.full((10,), float(batch))})
        store.complete("run", batch)
        if batch % 5 == 0:
            store.flush()
            os.write(acknowledge, b"%d\n" % batch)


def test_killing_the_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    chance = random.Random(3)  # noqa: S311 (not for cryptography)
    acknowledged = -1
    for _ in range(12):
        receive, send = os.pipe()
        child = forked(functools.partial(write_for_ever, tmp_path, send))
        os.close(send)
        with open(receive, "rb") as told:  # noqa: PTH123 (a descriptor)
            told.readline()
            time.sleep(chance.random() / 10)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            acknowledged = int([b"%d" % acknowledged, *told.read().split()][-1])
        reader = LocalStore(tmp_path, read_only=True)
        found = reader.completed("run")
        assert found == [*range(len(found))]
        assert found[-1] >= acknowledged
    for batch in found:
        assert reader.layers("run", batch) == ["a", "b"]
        for layer, size in (("a", batch % 7000), ("b", 10)):
            tensor = reader.get("run", batch, layer)["output"]
            assert tensor.shape == (size,)
            assert (tensor == batch).all()
    with LocalStore(tmp_path):
        assert not [*tmp_path.rglob("*.part")]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_an_incomplete_last_line_of_the_index_is_ignored(tmp_path: Path, cut: int) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, 0, 1)
    index = tmp_path / "run" / "index.jsonl"
    whole = index.read_bytes()
    index.write_bytes(whole[:-cut])
    check(LocalStore(tmp_path, read_only=True), 0)
    assert index.read_bytes() == whole[:-cut]
    with LocalStore(tmp_path) as store:
        check(store, 0)
        fill(store, 1)
        check(store, 0, 1)
    assert index.read_bytes() == whole


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"batch": 1, "file": null}', "\x80"])
def test_a_damaged_index_raises(tmp_path: Path, line: str) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, 0)
    index = tmp_path / "run" / "index.jsonl"
    index.write_text(line + "\n" + index.read_text(), encoding="latin-1")
    with pytest.raises(fh.errors.StoreError, match=r"index.jsonl is damaged: the line at byte 0"):
        LocalStore(tmp_path, read_only=True).batches("run")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def scramble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("harm", [truncate, scramble, os.unlink])
def test_a_damaged_file_raises_and_leaves_other_batches_readable(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, 0, 1, 2)
        store.flush()
        harm(tmp_path / "run" / "00000001.safetensors")
        with pytest.raises(
            fh.errors.StoreError, match=r"00000001.safetensors (is damaged|cannot be read)"
        ):
            store.get("run", 1, "layer")
        for batch in (0, 2):
            assert (store.get("run", batch, "layer")["output"] == batch).all()


def test_only_one_store_may_write_a_folder(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, 0)
        told = rf"{tmp_path} is being written by a store of process {os.getpid()}: close that"
        with pytest.raises(fh.errors.StoreError, match=told):
            LocalStore(tmp_path)

        def work() -> None:
            with pytest.raises(fh.errors.StoreError, match=told):
                LocalStore(tmp_path)
            check(LocalStore(tmp_path, read_only=True), 0)

        store.flush()
        wait_for(forked(work))
        check(store, 0)
    LocalStore(tmp_path).close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("started", [False, True])
def test_an_interrupted_open_releases_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    start = writer.start_new_thread

    def interrupted(*args: Any) -> None:
        if started:
            start(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if started:
            patch.setattr(writer, "start_new_thread", interrupted)
        else:
            patch.setattr(writer.Writer, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            LocalStore(tmp_path)
    gc.collect()
    with LocalStore(tmp_path) as store:
        fill(store, 0)
    check(LocalStore(tmp_path, read_only=True), 0)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Drops root's rights, which bypass permissions."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(parent.stat().st_mode | 0o055)  # lets another user reach the folder
    (tmp_path / "file").touch()
    with nobody():
        for folder in (locked, locked / "below", tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(
                fh.errors.StoreError, match=r"cannot be written: .*Use a folder that"
            ):
                LocalStore(folder)
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(
            fh.errors.StoreError, match="is not a folder: open the store without read_only"
        ):
            LocalStore(folder, read_only=True)
    assert not [*locked.iterdir()]


def test_a_folder_that_becomes_unwritable_raises(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    fill(store, 0)
    store.flush()
    shutil.rmtree(tmp_path / "store" / "run")
    (tmp_path / "store" / "run").touch()
    fill(store, 1)
    with pytest.raises(fh.errors.StoreError, match=r"writing batch 1 of run 'run' to .* failed"):
        store.flush()
    with pytest.raises(fh.errors.StoreError, match="batch 1"):
        fill(store, 2)
    with pytest.raises(fh.errors.StoreError, match="batch 1"):
        store.close()
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mount = shutil.which("mount")
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S607 (on the path, like mount)


@pytest.mark.parametrize("small", [5_000, 100_000])
def test_a_full_disk_raises_and_flushed_batches_are_readable(small_disk: Path, small: int) -> None:
    store = LocalStore(small_disk / "store")
    acknowledged = -1
    full = r"(?is)writing batch \d+ of run 'run' .*no space|room"
    with pytest.raises(fh.errors.StoreError, match=full):  # noqa: PT012
        for batch in range(2_000):
            fill(store, batch, size=small // 4)
            store.flush()
            acknowledged = batch
    assert acknowledged >= 5
    with pytest.raises(fh.errors.StoreError, match="make room or repair the folder"):
        store.close()
    done = store.completed("run")
    check(store, *range(len(done)))
    assert len(done) > acknowledged
    # With room again, writing continues after the last complete batch.
    (small_disk / "store" / "run" / "00000000.safetensors").unlink()
    with LocalStore(small_disk / "store") as again:
        fill(again, len(done), size=1)
        assert again.completed("run") == [*range(len(done) + 1)]


def test_a_file_size_limit_raises(tmp_path: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        store = LocalStore(tmp_path)
        fill(store, 0)
        store.flush()
        fill(store, 1, size=20_000)
        with pytest.raises(fh.errors.StoreError, match="writing batch 1 of run"):
            store.close()

    wait_for(forked(work))
    check(LocalStore(tmp_path, read_only=True), 0)
    assert not [*tmp_path.rglob("*.part")]


def test_an_error_while_closing_does_not_replace_the_error_of_the_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), LocalStore(tmp_path) as store:  # noqa: PT012
        (tmp_path / "run").touch()
        fill(store, 0)
        raise ZeroDivisionError


def test_options_of_wrong_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fh.HookTypeError, match="max_pending must be a number of bytes, got str"):
        LocalStore(tmp_path, max_pending="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        LocalStore(tmp_path, max_pending=0)
    with pytest.raises(TypeError):
        LocalStore(3)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_an_index_lists_file_layers_and_completeness(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, 0)
    (line,) = (tmp_path / "run" / "index.jsonl").read_text().splitlines()
    written = (tmp_path / "run" / "00000000.safetensors").read_bytes()
    content = {"name": "00000000.safetensors", "bytes": len(written), "crc32": zlib.crc32(written)}
    before, _, _ = line.rpartition(", ")
    assert json.loads(line) == {
        "batch": 0,
        "file": content,
        "layers": {"layer": ["output"]},
        "complete": True,
        "crc32": zlib.crc32(before.encode()),
    }


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("batches", [1, 3, 5])
def test_a_run_that_is_deleted_and_written_anew_is_the_new_one(
    tmp_path: Path, read_only: bool, batches: int
) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, *range(3))
    opened = LocalStore(tmp_path, read_only=read_only)
    check(opened, 0, 1, 2)
    shutil.rmtree(tmp_path / "run")
    assert opened.completed("run") == []
    if read_only:
        with LocalStore(tmp_path) as store:
            fill(store, *range(batches), size=6)
    else:
        fill(opened, *range(batches), size=6)
        opened.flush()
    for each in (opened, LocalStore(tmp_path, read_only=True)):
        check(each, *range(batches))
        assert len(each.get("run", 0, "layer")["output"]) == 6
    opened.close()


def test_a_kill_before_the_line_of_a_restarted_batch_leaves_the_old_one(tmp_path: Path) -> None:
    def restart() -> None:
        store = LocalStore(tmp_path)
        store.restart("run", 0)
        store.put("run", 0, "layer", {"output": torch.ones(9)})
        store.complete("run", 0)
        index.RunIndex.append = lambda *_, **__: os._exit(0)  # type: ignore[method-assign, assignment]
        store.flush()

    with LocalStore(tmp_path) as store:
        fill(store, 0)
    wait_for(forked(restart))
    with LocalStore(tmp_path) as store:
        check(store, 0)
        assert store.verify() == []
        store.restart("run", 0)
        store.put("run", 0, "layer", {"output": torch.zeros(9)})
        store.complete("run", 0)
        store.flush()
        check(store, 0)
        assert len([*tmp_path.glob("run/*.safetensors")]) <= 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_before_they_are_written(tmp_path: Path, layout: Any) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    with LocalStore(tmp_path) as store:
        with pytest.raises(fh.errors.HookTypeError, match="nested tensor: store its to_padded"):
            store.put("run", 0, "layer", {"output": nested})
        fill(store, 0)
        check(store, 0)
