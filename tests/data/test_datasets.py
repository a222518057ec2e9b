"""Data sets and shuffled streams of the rows of a store."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ferrohook as fh
from ferrohook.data import LocalStore, MemoryStore, Store
from ferrohook.data.stores.folder import Folder
from ferrohook.data.stores.index import RunIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

pytest.importorskip("safetensors")

SIZES = (7, 1, 12, 0, 30, 5, 9)
ROWS = sum(SIZES)
BATCH = 4
FORKS = pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning",
    "ignore:This DataLoader will create:UserWarning",
)


def fill(store: Store) -> Store:
    """Stores rows (number, 1000 + number); batch 3 is empty, batches 7 and 8 are not of the set."""
    numbers = torch.arange(ROWS).float()
    for batch, part in enumerate(torch.stack([numbers, numbers + 1000], dim=1).split(SIZES)):
        # One batch has the shape (batch, tokens, width).
        shaped = part.unflatten(0, (3, 10)) if len(part) == 30 else part
        store.put("run", batch, "layer", {"output": shaped, "rest": torch.zeros(1)})
        store.complete("run", batch)
    store.put("run", 7, "another", {"output": torch.zeros(1, 2)})
    store.complete("run", 7)
    store.put("run", 8, "layer", {"output": torch.zeros(1, 2)})  # never completed
    return store


@pytest.fixture
def data(store: Store) -> fh.data.ActivationDataset:
    return fh.data.ActivationDataset(fill(store), "layer")


@pytest.fixture
def on_disk(tmp_path: Path) -> fh.data.ActivationDataset:
    with LocalStore(tmp_path / "on_disk") as store:
        return fh.data.ActivationDataset(fill(store), "layer")


@pytest.mark.parametrize("batches", [3, 30])
def test_opening_copies_the_index_once_for_any_number_of_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    counts: Counter[str] = Counter()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return call

    monkeypatch.setattr(RunIndex, "read", counted("index", RunIndex.read))
    monkeypatch.setattr(Folder, "runs", counted("runs", Folder.runs))
    monkeypatch.setattr(Folder, "_read", counted("file", Folder._read))
    with LocalStore(tmp_path) as store:
        for batch in range(batches):
            store.put("run", batch, "layer", {"output": torch.ones(2, 3)})
            store.complete("run", batch)
        store.flush()
        assert not counts  # writing has no need of them
        data = fh.data.ActivationDataset(store, "layer")
    assert len(data) == 2 * batches
    assert counts["file"] == batches  # for the shape
    assert counts["index"] <= 2
    assert counts["runs"] <= 4


def numbers(rows: Tensor) -> list[int]:
    """Numbers of rows; asserts that each row is whole."""
    assert torch.equal(rows[:, 1], rows[:, 0] + 1000)
    return rows[:, 0].int().tolist()


def epoch(stream: Any) -> list[list[int]]:
    return [numbers(batch) for batch in stream]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


# ActivationDataset


def test_rows_follow_each_other_over_batches(data: fh.data.ActivationDataset) -> None:
    assert (len(data), data.width, data.dtype) == (ROWS, 2, torch.float32)
    assert numbers(data[:]) == numbers(torch.stack([*data])) == [*range(ROWS)]
    assert data[3].tolist() == [3, 1003]
    assert data[-1].tolist() == [ROWS - 1, 999 + ROWS]
    wanted = [60, 0, 7, 8, 7, -2]
    for index in (wanted, torch.tensor(wanted), np.array(wanted)):
        assert numbers(data[index]) == [60, 0, 7, 8, 7, ROWS - 2]
    assert numbers(data[10:30:7]) == [10, 17, 24]
    assert data[[]].shape == data[5:5].shape == (0, 2)
    for outside in (ROWS, -ROWS - 1, [0, ROWS]):
        with pytest.raises(IndexError, match=f"is out of range: the data set has {ROWS} rows"):
            data[outside]
    for wrong in (1.5, [True, False], [[1]], "1"):
        with pytest.raises(fh.HookTypeError, match="rows must be chosen with an int"):
            data[wrong]  # type: ignore[index]


def test_rows_are_the_callers_own(data: fh.data.ActivationDataset) -> None:
    for rows in (data[:2], data[0], next(iter(data))):
        rows.zero_()
    assert numbers(data[:2]) == [0, 1]


def test_what_no_batch_has_is_refused(store: Store) -> None:
    fill(store)
    for layer, run, name in (("layr", "run", "output"), ("layer", "run", "input"), ("l", "x", "o")):
        with pytest.raises(fh.SelectionError, match=f"run '{run}' has a tensor '{name}' of layer"):
            fh.data.ActivationDataset(store, layer, run=run, name=name)
    with pytest.raises(fh.HookTypeError, match="store must be a Store, got str"):
        fh.data.ActivationDataset("folder", "layer")  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float16)])
def test_rows_that_differ_are_refused(store: Store, other: Tensor) -> None:
    fill(store).put("run", 9, "layer", {"output": other})
    store.complete("run", 9)
    with pytest.raises(
        fh.HookError, match=r"in batch 9 of run 'run', but width 2 and torch.float32"
    ):
        fh.data.ActivationDataset(store, "layer")


def test_damage_is_found_if_asked_for(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        fill(store)
    file = tmp_path / "run" / "00000002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert len(fh.data.ActivationDataset(store, "layer")) == ROWS
    with pytest.raises(fh.errors.StoreError, match=r"00000002\.safetensors is damaged"):
        fh.data.ActivationDataset(store, "layer", verify=True)


def test_more_batches_than_are_mapped_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrohook.data.datasets.MAPPED", 1)
    data = fh.data.ActivationDataset(fill(MemoryStore()), "layer")
    assert numbers(data[[*range(ROWS - 1, -1, -1)]]) == [*range(ROWS - 1, -1, -1)]


def test_a_pickle_reads_the_folder(on_disk: fh.data.ActivationDataset, tmp_path: Path) -> None:
    assert numbers(pickle.loads(pickle.dumps(on_disk))[:]) == [*range(ROWS)]
    store = pickle.loads(pickle.dumps(LocalStore(tmp_path / "on_disk")))
    with pytest.raises(fh.errors.StoreError, match="was opened read_only"):
        store.put("run", 0, "layer", {})


@FORKS
def test_a_loader_of_torch_reads_it(on_disk: fh.data.ActivationDataset) -> None:
    loader = DataLoader(on_disk, batch_size=8, shuffle=True, num_workers=2)
    assert sorted(flat(epoch(loader))) == [*range(ROWS)]


def test_stored_tensors_are_memory_maps(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        store.put("run", 0, "layer", {"output": torch.ones(300, 4)})
        store.complete("run", 0)
    array = store.get("run", 0, "layer")["output"].numpy()
    assert str(tmp_path / "run" / "00000000.safetensors") in Path("/proc/self/maps").read_text()
    array[:] = 7
    assert torch.equal(store.get("run", 0, "layer")["output"], torch.ones(300, 4))
    assert store.verify() == []


def test_hugging_face_datasets_read_it(
    on_disk: fh.data.ActivationDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()

    def rows() -> Any:
        for row in on_disk:
            yield {"activation": row.numpy()}

    made = datasets.Dataset.from_generator(rows, cache_dir=str(tmp_path / "cache"))
    assert numbers(torch.tensor(made["activation"][:])) == [*range(ROWS)]


# ActivationStream


@pytest.mark.parametrize("reservoir", [1, 10, 24, 1000])
def test_an_epoch_has_each_row_once(data: fh.data.ActivationDataset, reservoir: int) -> None:
    stream = fh.data.ActivationStream(data, BATCH, reservoir=reservoir)
    epochs = [epoch(stream) for _ in range(3)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [BATCH] * (ROWS // BATCH)
        assert len(batches) == len(stream)
        assert sorted(flat(batches)) == [*range(ROWS)]
    assert flat(epochs[0]) != flat(epochs[1]) != flat(epochs[2])
    assert stream.epoch == 3
    again = fh.data.ActivationStream(data, BATCH, reservoir=reservoir)
    assert [epoch(again) for _ in range(3)] == epochs
    other = fh.data.ActivationStream(data, BATCH, reservoir=reservoir, seed=1)
    assert epoch(other) != epochs[0]
    assert fh.data.ActivationStream(data, BATCH, seed=2**64).seed == 2**64


def test_a_reservoir_bounds_the_batches_that_are_read() -> None:
    store = MemoryStore()
    for batch in range(100):
        store.put("run", batch, "layer", {"output": torch.full((10, 2), float(batch))})
        store.complete("run", batch)
    stream = fh.data.ActivationStream(fh.data.ActivationDataset(store, "layer"), 10, reservoir=40)
    order = [batch[:, 0].int().tolist() for batch in stream]
    # Rows of several stored batches are mixed ...
    assert sum(len(set(batch)) for batch in order) > 200
    # ... which are read one after the other: at most the reservoir's new at a time.
    seen: set[int] = set()
    for place, batch in enumerate(order):
        seen |= {*batch}
        assert len(seen) <= (10 * place + 40) / 10 + 1


def test_a_long_reservoir_shuffles_uniformly() -> None:
    store = MemoryStore()
    store.put("run", 0, "layer", {"output": torch.arange(4.0)[:, None]})
    store.complete("run", 0)
    stream = fh.data.ActivationStream(fh.data.ActivationDataset(store, "layer"), 4)
    orders = {tuple(batch.flatten().int().tolist()) for _ in range(300) for batch in stream}
    assert len(orders) == 24


@FORKS
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_the_same_for_any_number_of_workers(
    on_disk: fh.data.ActivationDataset, workers: int
) -> None:
    expected = fh.data.ActivationStream(on_disk, BATCH, reservoir=20)
    stream = fh.data.ActivationStream(on_disk, BATCH, reservoir=20, workers=workers)
    assert epoch(stream) == epoch(expected)
    own = DataLoader(expected, batch_size=None, num_workers=workers)
    assert epoch(own) == epoch(stream)


@pytest.mark.parametrize("done", [0, 1, 7, 15, 16, 21])
def test_a_stream_goes_on_where_another_stopped(data: fh.data.ActivationDataset, done: int) -> None:
    def stream() -> fh.data.ActivationStream:
        return fh.data.ActivationStream(data, BATCH, reservoir=20)

    whole = stream()
    expected = epoch(whole) + epoch(whole)
    stopped, found = stream(), []
    while len(found) < done:
        for batch in stopped:
            found.append(numbers(batch))
            if len(found) == done:
                break
    other = stream()
    other.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for each in (stopped, other):
        rest = []
        while each.epoch < 2:
            rest += epoch(each)
        assert found + rest == expected


@FORKS
def test_a_stream_with_workers_goes_on(on_disk: fh.data.ActivationDataset) -> None:
    expected = epoch(fh.data.ActivationStream(on_disk, BATCH))
    stream = fh.data.ActivationStream(on_disk, BATCH, workers=2)
    batches = iter(stream)
    found = [numbers(next(batches)) for _ in range(5)]
    state = stream.state_dict()
    assert state["batch"] == 5  # although the workers are ahead
    other = fh.data.ActivationStream(on_disk, BATCH, workers=3)
    other.load_state_dict(state)
    assert found + epoch(other) == expected


def test_a_state_of_another_stream_is_refused(data: fh.data.ActivationDataset) -> None:
    state = fh.data.ActivationStream(data, BATCH, seed=1).state_dict()
    stream = fh.data.ActivationStream(data, 2 * BATCH)
    with pytest.raises(fh.errors.ResumeError, match=r"\(batch_size: 4, now 8; seed: 1, now 0\)"):
        stream.load_state_dict(state)
    assert (stream.epoch, stream.batch) == (0, 0)


@FORKS
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_have_different_rows(
    on_disk: fh.data.ActivationDataset, ranks: int, workers: int
) -> None:
    def rows(**options: Any) -> list[list[list[int]]]:
        return [
            epoch(
                fh.data.ActivationStream(
                    on_disk, BATCH, rank=rank, ranks=ranks, workers=workers, **options
                )
            )
            for rank in range(ranks)
        ]

    everything = [flat(batches) for batches in rows()]
    assert sorted(flat(everything)) == [*range(ROWS)]
    assert max(map(len, everything)) - min(map(len, everything)) <= 1
    even = rows(drop_last=True)
    assert {len(batches) for batches in even} == {ROWS // ranks // BATCH}
    assert {len(batch) for batches in even for batch in batches} == {BATCH}
    once = flat([flat(batches) for batches in even])
    assert len(once) == len({*once})


def test_ranks_of_torch_distributed_are_the_default(
    data: fh.data.ActivationDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fh.data.ActivationStream(data, BATCH).ranks == 1
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 3}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value, raising=False)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    stream = fh.data.ActivationStream(data, BATCH)
    assert (stream.rank, stream.ranks) == (1, 3)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 1.0}, fh.HookTypeError, "seed must be an int, got float"),
        ({"reservoir": 0}, ValueError, "reservoir must be at least 1, got 0"),
        ({"drop_last": 1}, fh.HookTypeError, "drop_last must be a bool, got int"),
        ({"workers": True}, fh.HookTypeError, "workers must be an int, got bool"),
        ({"rank": 2, "ranks": 2}, ValueError, "rank must be below ranks=2, got 2"),
        ({"data": [1]}, fh.HookTypeError, "data must be an ActivationDataset, got list"),
    ],
)
def test_wrong_options_are_refused(
    data: fh.data.ActivationDataset, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        fh.data.ActivationStream(**{"data": data, "batch_size": BATCH, **options})


def test_a_stream_of_the_same_rows_in_other_batches_is_another_one() -> None:
    streams = []
    for sizes in ((4, 4), (5, 3)):
        store = MemoryStore()
        for batch, part in enumerate(torch.arange(16.0).reshape(8, 2).split(sizes)):
            store.put("run", batch, "layer", {"output": part})
            store.complete("run", batch)
        data = fh.data.ActivationDataset(store, "layer")
        streams.append(fh.data.ActivationStream(data, BATCH))
    one, other = streams
    with pytest.raises(fh.errors.ResumeError, match="checksum of sizes"):
        other.load_state_dict(one.state_dict())


def test_epochs_without_a_batch_are_refused(data: fh.data.ActivationDataset) -> None:
    stream = fh.data.ActivationStream(data, ROWS + 1, drop_last=True)
    with pytest.raises(fh.HookError, match=f"no batch of {ROWS + 1} rows for rank 0 of 1"):
        next(stream.epochs())
