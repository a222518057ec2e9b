"""Stores of activations, in memory and in folders."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.captures import tensor_files
from ferrohook.data import LocalStore, Store
from ferrohook.data.stores.local import lent
from support.interpreters import assert_ends_well, run_with_torch
from support.limits import LIMIT
from support.stores import check, fill, forked, wait_for
from support.threads import Together, in_threads, run_together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e5m2,
]


# All stores


def test_tensors_are_read_by_run_batch_and_layer(store: Store) -> None:
    x = torch.randn(3, 2)
    store.put("b", 7, "encoder.0/attention", {"output": x, "output.1": x[0]})
    store.put("b", 7, "", {"output": x[:, 0]})
    store.complete("b", 7)
    store.put("a-1.x", 10**9, "l", {})
    assert store.runs() == ["a-1.x", "b"]
    assert store.batches("b") == store.completed("b") == [7]
    assert store.completed("a-1.x") == []
    assert store.layers("b", 7) == ["encoder.0/attention", ""]
    read = store.get("b", 7, "encoder.0/attention")
    assert list(read) == ["output", "output.1"]
    assert torch.equal(read["output"], x)
    assert torch.equal(read["output.1"], x[0])
    assert torch.equal(store.get("b", 7, "")["output"], x[:, 0])
    assert store.get("a-1.x", 10**9, "l") == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_type_and_layout(store: Store, dtype: torch.dtype) -> None:
    x = (torch.randn(4, 6) * 3).to(dtype)
    wide = x if dtype == torch.float8_e5m2 else x.repeat_interleave(2, 1)[:, ::2]
    tensors = {"plain": x, "strided": wide, "transposed": x.T, "scalar": x[0, 0], "none": x[:0]}
    if dtype.is_complex:
        tensors |= {"conj": x.conj(), "imag": x.conj().imag}
    for copy in (True, False):
        store.put("run", int(copy), "l", tensors, copy=copy)
        for name, tensor in store.get("run", int(copy), "l").items():
            assert tensor.dtype == tensors[name].dtype
            assert tensor.shape == tensors[name].shape
            plain = (tensor, tensors[name])
            if dtype == torch.float8_e5m2:
                plain = (tensor.float(), tensors[name].float())
            assert torch.equal(*plain)


def test_put_copies_the_tensors(store: Store) -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        y = torch.ones(3)
    base = torch.zeros(2, 3)
    store.put("run", 0, "l", {"x": x, "y": y, "view": base[1]})
    with torch.no_grad():
        x.zero_()
        base.fill_(5)
    with torch.inference_mode():
        y.zero_()
    read = store.get("run", 0, "l")
    assert [t.tolist() for t in read.values()] == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert not any(t.requires_grad or t.is_inference() for t in read.values())
    read["x"].zero_()
    assert store.get("run", 0, "l")["x"].tolist() == [1.0] * 3


@pytest.mark.parametrize("flush", [False, True])
def test_a_second_put_adds_to_the_layer(store: Store, flush: bool) -> None:
    store.put("run", 0, "l", {"a": torch.zeros(1), "b": torch.zeros(1)})
    store.put("run", 0, "other", {"a": torch.zeros(1)})
    if flush:
        store.flush()
    store.put("run", 0, "l", {"c": torch.zeros(1), "a": torch.ones(1)})
    store.put("run", 0, "l", {})
    store.complete("run", 0)
    found = store.get("run", 0, "l")
    assert {name: tensor.item() for name, tensor in found.items()} == {"a": 1, "b": 0, "c": 0}
    assert [*found] == ["a", "b", "c"]
    assert store.layers("run", 0) == ["l", "other"]
    store.put("run", 0, "late", {})
    assert (store.layers("run", 0), store.completed("run")) == (["l", "other", "late"], [0])


def test_a_discarded_batch_is_gone(store: Store) -> None:
    fill(store, 0)
    store.put("run", 1, "layer", {"output": torch.ones(3)})
    store.discard("run", 1)
    store.discard("run", 0)
    store.discard("never", 5)
    check(store, 0)


def test_missing_runs_batches_and_layers_raise(store: Store) -> None:
    with pytest.raises(fh.SelectionError, match="no run 'run' there: it has none"):
        store.batches("run")
    assert store.completed("run") == []
    fill(store, *range(8))
    with pytest.raises(fh.SelectionError, match="no run 'other' there: it has 'run'"):
        store.layers("other", 0)
    with pytest.raises(fh.SelectionError, match=r"batch 9 there: it has 0, 1, 2, 3, 4 and 3 more"):
        store.get("run", 9, "layer")
    with pytest.raises(fh.SelectionError, match="no layer 'x' there: it has 'layer'"):
        store.get("run", 0, "x")


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ((3, 0, "l", {}), fh.HookTypeError, "run must be a str, got int"),
        (("", 0, "l", {}), ValueError, "run must be a name of letters"),
        (("../up", 0, "l", {}), ValueError, "got '../up'"),
        ((".hidden", 0, "l", {}), ValueError, "got '.hidden'"),
        (("a\n", 0, "l", {}), ValueError, "run must be a name"),
        (("r", "0", "l", {}), fh.HookTypeError, "batch must be an int, got str"),
        (("r", True, "l", {}), fh.HookTypeError, "batch must be an int, got bool"),
        (("r", -1, "l", {}), ValueError, "at least 0, got -1"),
        (("r", 0, None, {}), fh.HookTypeError, "layer must be a str, got NoneType"),
        (("r", 0, "l", torch.ones(1)), fh.HookTypeError, "mapping from their names, got Tensor"),
        (("r", 0, "l", {"x": 1}), fh.HookTypeError, "layer 'l': .* from str to int"),
        (("r", 0, "l", {1: torch.ones(1)}), fh.HookTypeError, "from int to Tensor"),
        (("r", 0, "l", {"a/b": torch.ones(1)}), ValueError, "contain a slash, got 'a/b'"),
        (("r", 0, "l", {"": torch.ones(1)}), ValueError, "must not be empty"),
        (("r", 0, "l", {"x": torch.ones(1).to_sparse()}), fh.HookTypeError, "store its to_dense"),
        (
            ("r", 0, "l", {"x": torch.ones(1).to(torch.complex128)}),
            fh.HookTypeError,
            "complex128, which",
        ),
    ],
)
def test_wrong_arguments_of_put_are_refused(
    store: Store, arguments: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        store.put(*arguments)
    assert store.runs() == []


def test_wrong_arguments_of_complete_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="run must be a name"):
        store.complete("a/b", 0)
    with pytest.raises(fh.HookTypeError, match="batch must be an int"):
        store.complete("run", 1.0)  # type: ignore[arg-type]
    assert store.runs() == []


def test_a_closed_store_is_readable_and_refuses_put(store: Store) -> None:
    fill(store, 0)
    store.close()
    store.close()
    store.flush()
    check(store, 0)
    with pytest.raises(fh.errors.StoreError, match=r"closed: put tensors before close"):
        store.put("run", 1, "l", {})
    with pytest.raises(fh.errors.StoreError, match="closed"):
        store.complete("run", 1)


@pytest.mark.usefixtures("switch_often")
def test_threads_put_and_read_concurrently(store: Store) -> None:
    threads, batches = 8, 12

    def work(number: int) -> None:
        for batch in range(number, threads * batches, threads):
            fill(store, batch)
            assert batch in store.batches("run")
            assert store.get("run", batch, "layer")["output"][0] == batch
            store.put("run", batch, f"more{number}", {"x": torch.ones(1)})

    in_threads(threads, work)
    assert store.completed("run") == [*range(threads * batches)]
    for batch in store.batches("run"):
        assert store.layers("run", batch) == ["layer", f"more{batch % threads}"]


# Folders


def test_a_folder_can_be_read_concurrently_and_continued(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, 0, 1)
        store.flush()
        reader = LocalStore(tmp_path, read_only=True)
        check(reader, 0, 1)
        fill(store, 2)
        store.flush()
        check(reader, 0, 1, 2)
    with LocalStore(tmp_path) as store:
        fill(store, 3)
        check(store, 0, 1, 2, 3)
    check(reader, 0, 1, 2, 3)
    assert not [*tmp_path.rglob("*.part")]
    with pytest.raises(fh.errors.StoreError, match="opened read_only: open another LocalStore"):
        reader.put("run", 4, "layer", {})
    reader.close()


def test_a_complete_batch_is_one_file_with_default_permissions(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, 3)
        store.put("run", 4, "a", {"x": torch.ones(1)})
        store.flush()
        store.put("run", 4, "b", {"x": torch.ones(1)})
        store.complete("run", 4)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [
        "00000003.safetensors",
        "00000004.1.safetensors",
        "00000004.safetensors",
        "index.jsonl",
    ]
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "run" / names[0]).stat().st_mode == plain.stat().st_mode
    with pytest.raises(fh.HookError, match="contains no activations"):
        tensor_files.load(tmp_path / "run" / names[0])


def test_tensors_may_share_memory(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    with LocalStore(tmp_path) as store:
        store.put("run", 0, "l", {"x": x, "again": x, "row": x[1]}, copy=False)
        store.put("run", 0, "m", {"x": x}, copy=False)
        read = store.get("run", 0, "l")
        assert torch.equal(read["again"], x)
        assert torch.equal(read["row"], x[1])
        assert torch.equal(store.get("run", 0, "m")["x"], x)


def test_reading_is_lazy(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        fill(store, *range(5))
        store.flush()
        for batch in (0, 1, 3, 4):
            (tmp_path / "run" / f"{batch:08}.safetensors").unlink()
        assert store.get("run", 2, "layer")["output"][0] == 2
        assert store.layers("run", 4) == ["layer"]


def test_synced_writes_have_equal_contents(tmp_path: Path) -> None:
    with LocalStore(tmp_path, sync=True) as store:
        fill(store, 0, 1)
        check(store, 0, 1)


class SlowDisk:
    """A disk whose writes block until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Semaphore(0)
        self.most = 0
        write = tensor_files.write

        def slow(*args: Any, **kwargs: Any) -> None:
            assert self.go.acquire(timeout=LIMIT)
            write(*args, **kwargs)

        monkeypatch.setattr(tensor_files, "write", slow)


def test_a_slow_disk_blocks_put_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    size = 1000
    store = LocalStore(tmp_path, max_pending=3 * 4 * size)
    put = []

    def work() -> None:
        for batch in range(8):
            fill(store, batch, size=size)
            put.append(batch)

    worker = Together(work)
    for written in range(6):
        deadline = time.monotonic() + LIMIT
        while len(put) < 3 + written and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        # Three batches are pending, the first on the disk; the fourth `put` blocks.
        assert len(put) == min(8, 3 + written)
        disk.go.release()
    disk.go.release(2)
    worker.join()
    store.close()
    check(store, *range(8))


def test_open_batches_respect_max_pending(tmp_path: Path) -> None:
    with LocalStore(tmp_path, max_pending=10_000) as store:
        for layer in range(40):
            store.put("run", 0, f"l{layer}", {"x": torch.full((500,), float(layer))})
            held = [batch for (_, batch) in store._open.items()]
            assert sum(batch.nbytes for batch in held) <= 10_000
            assert all(
                batch.nbytes
                == sum(x.nbytes for named in batch.layers.values() for x in named.values())
                for batch in held
            )
        store.complete("run", 0)
        assert store.layers("run", 0) == [f"l{layer}" for layer in range(40)]
        assert all(store.get("run", 0, f"l{n}")["x"][0] == n for n in range(40))
        # A batch larger than `max_pending` is written alone.
        fill(store, 1, size=10_000)
        assert store.get("run", 1, "layer")["output"].shape == (10_000,)


@pytest.mark.parametrize("at_exit", [False, True])
def test_an_unclosed_store_is_closed_by_its_finaliser_and_at_exit(
    tmp_path: Path, at_exit: bool
) -> None:
    code = (
        "store = fh.data.LocalStore(folder)\n"
        "store.put('run', 0, 'layer', {'output': torch.zeros(4)})\n"
        "store.complete('run', 0)\n"
        "store.put('run', 1, 'layer', {'output': torch.ones(4)})\n"
    )
    if at_exit:
        assert_ends_well(run_with_torch(f"folder = {str(tmp_path)!r}\n{code}"))
    else:
        exec(code, {"fh": fh, "torch": torch, "folder": tmp_path})
        gc.collect()
    with LocalStore(tmp_path) as store:
        assert store.completed("run") == [0]
        assert (store.get("run", 1, "layer")["output"] == 1).all()


def test_close_loses_no_batch_that_other_threads_complete_meanwhile(
    tmp_path: Path, switch_often: None
) -> None:
    threads = 4
    for attempt in range(20):
        store = LocalStore(tmp_path / str(attempt), max_pending=200)
        done: list[int] = []

        def work(first: int, store: Store = store, done: list[int] = done) -> None:
            with contextlib.suppress(fh.errors.StoreError):
                for batch in range(first, 10_000, threads):
                    fill(store, batch)
                    done.append(batch)

        workers = Together(*(functools.partial(work, first) for first in range(threads)))
        time.sleep(0.002 * (attempt % 5))
        store.close()
        workers.join()
        found = {*store.completed("run")}
        assert found >= {*done}
        assert len(found) < 10_000


@pytest.mark.parametrize("last", ["complete", "flush", "close"])
def test_a_batch_that_another_thread_writes_early_comes_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    store = LocalStore(tmp_path, max_pending=100)
    assert store._writer is not None
    put = store._writer.put
    taken, ended = threading.Event(), threading.Event()

    def held(shard: Any) -> None:
        if not taken.is_set():  # the early write, held before it is queued
            taken.set()
            ended.wait(0.2)  # longer than `end` takes where it does not wait
        put(shard)

    monkeypatch.setattr(store._writer, "put", held)
    store.put("run", 0, "layer", {"output": torch.zeros(20)})

    def put_more() -> None:  # exceeds `max_pending`: writes batch 0
        store.put("run", 1, "layer", {"output": torch.ones(8)})

    def end() -> None:
        assert taken.wait(LIMIT)
        if last == "complete":
            store.complete("run", 0)
        else:
            getattr(store, last)()
        ended.set()

    run_together(put_more, end)
    if last == "close":
        assert LocalStore(tmp_path, read_only=True).batches("run") == [0, 1]
        return
    reader = LocalStore(tmp_path, read_only=True)
    if last == "flush":
        assert reader.layers("run", 0) == ["layer"]
        store.complete("run", 0)
    store.flush()
    lines = (tmp_path / "run" / "index.jsonl").read_text().splitlines()
    complete = [json.loads(line)["complete"] for line in lines if json.loads(line)["batch"] == 0]
    assert complete == [False, True]
    assert (reader.get("run", 0, "layer")["output"] == 0).all()
    store.close()


def test_close_refuses_a_put_or_stores_it(tmp_path: Path, switch_often: None) -> None:
    for attempt in range(100):
        store = LocalStore(tmp_path / str(attempt))
        stored = []

        def put(store: Store = store, stored: list[int] = stored) -> None:
            with contextlib.suppress(fh.errors.StoreError):
                for batch in range(1000):
                    store.put("run", batch, "layer", {"output": torch.ones(1)})
                    stored.append(batch)

        run_together(put, store.close)
        reader = LocalStore(tmp_path / str(attempt), read_only=True)
        assert (reader.batches("run") if reader.runs() else []) == stored


def test_a_dropped_store_may_be_closed_on_its_writer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = threading.Event()
    write = tensor_files.write

    def collecting(*args: Any, **kwargs: Any) -> None:
        assert forgotten.wait(LIMIT)
        gc.collect()
        write(*args, **kwargs)

    monkeypatch.setattr(tensor_files, "write", collecting)
    store = LocalStore(tmp_path, max_pending=16)
    fill(store, 0)
    store.put("run", 1, "layer", {"output": torch.ones(1)})  # exceeds `max_pending`
    store.self = store  # type: ignore[attr-defined]  # a cycle: only the collector frees it
    assert store._writer is not None
    over = store._writer._finished
    gc.disable()
    try:
        del store
        forgotten.set()
        assert over.acquire(timeout=LIMIT)
    finally:
        gc.enable()
    reader = LocalStore(tmp_path, read_only=True)
    assert (reader.completed("run"), reader.batches("run")) == ([0], [0, 1])


def test_a_fork_does_not_write(tmp_path: Path) -> None:
    def work() -> None:
        with pytest.raises(
            fh.errors.StoreError, match=f"in process {os.getppid()}, from which this"
        ):
            store.put("run", 1, "layer", {})
        assert store.completed("run") == []  # reads the written batches, and waits for none
        store.close()

    with LocalStore(tmp_path) as store:
        store.put("run", 0, "layer", {"output": torch.zeros(4)})
        wait_for(forked(work))
        store.complete("run", 0)
    check(LocalStore(tmp_path, read_only=True), 0)


@pytest.mark.parametrize("option", [{"sync": True}, {"max_pending": 2**28}])
def test_options_for_writing_are_refused_where_nothing_is_written(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    with LocalStore(tmp_path, **option) as store:
        fill(store, 0)
    with pytest.raises(
        fh.HookTypeError, match="only work when writing: leave them out with read_only"
    ):
        LocalStore(tmp_path, read_only=True, **option)


def test_reprs_name_what_they_show(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with fh.data.LocalStore(tmp_path) as store:
        assert repr(store) == f"<LocalStore of {tmp_path}, open>"
        fh.collect(model, [torch.ones(4, 2)] * 2, "0", store, progress=False)
        data = fh.data.ActivationDataset(store, "0")
        shown = "<ActivationDataset of 8 rows of 3 torch.float32, 'output' of '0' of run 'run'>"
        assert repr(data) == shown
        stream = fh.data.ActivationStream(data, 4)
        assert (
            repr(stream)
            == f"<ActivationStream of 2 batches of 4, at batch 0 of epoch 0, of {shown}>"
        )
    assert repr(store).endswith("closed>")
    assert repr(fh.data.LocalStore(tmp_path, read_only=True)).endswith("read only>")
    memory = fh.data.MemoryStore()
    fh.collect(model, [torch.ones(4, 2)], "0", memory, progress=False)
    assert repr(memory) == "<MemoryStore of 1 runs>"


def test_a_bare_batch_is_no_iterable_of_batches() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    for batch in torch.ones(4, 2), {"input": torch.ones(4, 2)}:
        with pytest.raises(fh.HookTypeError, match=r"iterable of batches, got .*pass \[batch\]"):
            fh.collect(model, batch, "0", fh.data.MemoryStore(), progress=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_of_tensors_is_stored_as_one(store: Store, dtype: torch.dtype) -> None:
    x = (torch.randn(9, 4) * 3).to(dtype)
    wide = x if dtype == torch.float8_e5m2 else x.repeat_interleave(2, 1)[:, ::2]
    pieces = [x[:2], x[:0], wide[2:8], x[8:]]
    for copy in (True, False):
        tensors = {"pieces": pieces, "one": (x,), "whole": x[0]}
        store.put("run", int(copy), "l", tensors, copy=copy)
        store.complete("run", int(copy))
    pieces[0].copy_(x[2:4])  # after the copy, and the write
    before = torch.cat(pieces)
    read = store.get("run", 1, "l")
    assert (read["pieces"].dtype, read["one"].dtype) == (dtype, dtype)
    assert torch.equal(read["pieces"][2:].view(torch.uint8), before[2:].view(torch.uint8))
    assert read["one"].shape == read["pieces"].shape == (9, 4)
    assert read["whole"].shape == (4,)
    assert store.verify("run") == []
    for wrong in ([x, x[:, :2]], [x, torch.ones(2, 4, dtype=torch.int32)], [x[0, 0]], [x, x[0]]):
        with pytest.raises(ValueError, match="'x' cannot be joined"):
            store.put("run", 2, "l", {"x": wrong})
    for other in ([], [x, "y"]):
        with pytest.raises(fh.errors.HookTypeError, match="must be a dict from str to Tensor"):
            store.put("run", 2, "l", {"x": other})  # type: ignore[dict-item, list-item]


def test_a_store_lends_its_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, max_pending=1000, sync=True)
    store.put("run", 0, "l", {"x": torch.ones(2)})
    with lent(store) as folder:
        assert folder == (str(tmp_path), 1000, True)
        with pytest.raises(fh.errors.StoreError, match="closed"):
            store.put("run", 1, "l", {"x": torch.ones(2)})
        with folder.opened() as other:
            assert store.batches("run") == [0]
            other.put("run", 1, "l", {"x": torch.zeros(2)})
    assert store.batches("run") == [0, 1]
    store.put("run", 2, "l", {"x": torch.ones(2)})
    with pytest.raises(KeyboardInterrupt), folder_of_another(store):
        raise KeyboardInterrupt
    with pytest.raises(fh.errors.StoreError, match="closed"):
        store.put("run", 3, "l", {"x": torch.ones(2)})
    with LocalStore(tmp_path) as again:
        assert again.batches("run") == [0, 1, 2]
    with (
        pytest.raises(fh.errors.StoreError, match="read_only"),
        lent(LocalStore(tmp_path, read_only=True)),
    ):
        pass


@contextlib.contextmanager
def folder_of_another(store: LocalStore) -> Iterator[None]:
    """Lends a folder to a store that still has it at the end."""
    with contextlib.ExitStack() as others, lent(store) as folder:
        others.enter_context(folder.opened())
        yield
