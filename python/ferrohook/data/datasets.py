"""`ActivationDataset` and `ActivationStream`: stored activations as rows to train on."""

from __future__ import annotations

import copy
import functools
import math
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ferrohook.data.hugging_face import rows_of
from ferrohook.data.stores.store import Store
from ferrohook.data.token_rows import LAYER
from ferrohook.errors import HookError, HookTypeError, ResumeError, SelectionError
from ferrohook.util.arguments import at_least, expect
from ferrohook.util.texts import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAPPED = 4096
"""Batches of a store that a data set has mapped at a time: Linux allows 65,530 of a process."""

_Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class ActivationDataset(Dataset[Tensor]):
    """Rows of one stored tensor: the vectors along its last dimension, batch after batch.

    A batch of shape (4, 128, 384) has 512 rows of 384. The data set has the batches that are
    complete when it is created, and reads rows lazily: `data[3]` is one row; a slice, or a list,
    array or tensor of ints, returns rows as one tensor.

    After `collect(..., tokens=)`, each row has the id of its token, its position and the number of
    its text: `tokens`, `positions`, `texts`.

    A `DataLoader` may read it in worker processes, also in spawned ones with a `LocalStore`. To
    shuffle more rows than fit into memory, see `ActivationStream`.

    Args:
        store: the store.
        layer: name of the layer.
        run: name of the run.
        name: name of the tensor. Batches without it have no rows.
        verify: compare the checksum of each batch now, which reads all of its files.

    Raises:
        SelectionError: no complete batch of the run has that tensor.
        HookError: rows of two batches differ in width or dtype.
        StoreError: a file is damaged.
    """

    def __init__(
        self,
        store: Store,
        layer: str,
        *,
        run: str = "run",
        name: str = "output",
        verify: bool = False,
    ) -> None:
        expect(store, Store, "store must be a Store")
        self.layer, self.run, self.name = layer, run, name
        complete = store.completed(run)
        # A copy of a LocalStore only reads, which forked processes may do.
        self._store = copy.copy(store)
        self._batches: list[int] = []
        sizes: list[int] = []
        empty: Tensor | None = None
        for batch in complete:
            if layer not in self._store.layers(run, batch):
                continue
            tensor = self._store.get(run, batch, layer, verify=verify).get(name)
            if tensor is None:
                continue
            rows = rows_of(tensor)
            empty = rows[:0].clone() if empty is None else empty
            if rows.shape[1] != empty.shape[1] or rows.dtype != empty.dtype:
                msg = (
                    f"rows of {name!r} of layer {layer!r} have width {rows.shape[1]} and "
                    f"{rows.dtype} in batch {batch} of run {run!r}, but width {empty.shape[1]} and "
                    f"{empty.dtype} in earlier batches: collect them in separate runs"
                )
                raise HookError(msg)
            self._batches.append(batch)
            sizes.append(len(rows))
        if empty is None:
            msg = f"no complete batch of run {run!r} has a tensor {name!r} of layer {layer!r}"
            raise SelectionError(msg)
        self._empty = empty
        self.sizes: _Numbers = np.array(sizes, np.int64)
        """Number of rows of each batch."""
        self.ends: _Numbers = np.cumsum(self.sizes)
        """Number of rows up to the end of each batch."""
        self._mapped = functools.lru_cache(MAPPED)(self._read)

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return self._empty.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self._empty.dtype

    @functools.cached_property
    def tokens(self) -> Tensor:
        """Token id of each row, int64; read when it is asked for first, as the next two.

        Raises:
            SelectionError: the run was collected without `tokens`.
        """
        return self._of_rows("token")

    @functools.cached_property
    def positions(self) -> Tensor:
        """Position of each row's token in its text, int64."""
        return self._of_rows("position")

    @functools.cached_property
    def texts(self) -> Tensor:
        """Index in the run of each row's text, int64."""
        return self._of_rows("text")

    def _of_rows(self, part: str) -> Tensor:
        found = []
        for batch, size in zip(self._batches, self.sizes.tolist(), strict=True):
            if LAYER not in self._store.layers(self.run, batch):
                msg = (
                    f"run {self.run!r} has no token ids: collect it with tokens=, such as "
                    "tokens='input_ids'"
                )
                raise SelectionError(msg)
            described = self._store.get(self.run, batch, LAYER)[part]
            # A token may have several rows, such as one for each head.
            times = size // max(len(described), 1)
            found.append(described.repeat_interleave(times))
        return torch.cat(found)

    def _read(self, place: int) -> Tensor:
        tensors = self._store.get(self.run, self._batches[place], self.layer)
        return rows_of(tensors[self.name])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __repr__(self) -> str:
        return (
            f"<ActivationDataset of {len(self)} rows of {self.width} {self.dtype}, {self.name!r} "
            f"of {self.layer!r} of run {self.run!r}>"
        )

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | _Numbers) -> Tensor:
        chosen = range(len(self))[index] if isinstance(index, slice) else index
        numbers = np.asarray(chosen)
        if numbers.ndim > 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            msg = (
                f"rows must be chosen with an int, a slice or ints in one dimension, got {index!r}"
            )
            raise HookTypeError(msg)
        numbers = numbers.astype(np.int64)
        outside = numbers[(numbers < -len(self)) | (numbers >= len(self))]
        if outside.size:
            msg = f"row {outside.flat[0]} is out of range: the data set has {len(self)} rows"
            raise IndexError(msg)
        rows = self._gather(np.atleast_1d(numbers) % len(self))
        return rows if numbers.ndim else rows[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Returns several rows; torch's loaders call it."""
        return [*self[indices]]

    def __iter__(self) -> Iterator[Tensor]:
        for place in range(len(self._batches)):
            yield from self._mapped(place).clone()

    def _gather(self, numbers: _Numbers) -> Tensor:
        places = np.searchsorted(self.ends, numbers, side="right")
        rows = self._empty.new_empty(len(numbers), self.width)
        order = np.argsort(places, kind="stable")
        found, starts = np.unique(places[order], return_index=True)
        for place, own in zip(found.tolist(), np.split(order, starts)[1:], strict=True):
            within = numbers[own] - (self.ends[place] - self.sizes[place])
            rows[torch.from_numpy(own)] = self._mapped(place)[torch.from_numpy(within)]
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mapped"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _mapped=functools.lru_cache(MAPPED)(self._read))


class ActivationStream(IterableDataset[Tensor]):
    """Shuffled batches of rows of a data set, for training: an iterable of (rows, width) tensors.

    The stored batches pass in random order through a reservoir, from which rows are drawn at
    random. The reservoir has only the indices of rows, 8 bytes each; rows are read when a batch is
    made. A reservoir as long as the data set shuffles uniformly.

    An iteration is an epoch, each in another order. If it is interrupted, the next iteration
    continues it, in this process, or in another with `state_dict` and `load_state_dict`. Batches
    are the same for any number of workers.

    Ranks get different rows, and none twice. A `DataLoader(stream, batch_size=None)` of your own
    may have workers too, but then `epoch` and `batch` stay as they are in this process: prefer
    `workers`.

    Args:
        data: the rows.
        batch_size: rows of a batch. The last of an epoch may have fewer.
        seed: seed of the order.
        reservoir: rows that a batch is drawn from; at least `batch_size`.
        drop_last: leave out the last rows of an epoch (other rows in each epoch), so that all ranks
            get the same number of batches, all full.
        workers: processes that read ahead.
        rank: index of this process; None for the rank in torch.distributed, or 0.
        ranks: number of processes; None for the world size of torch.distributed, or 1.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Examples:
        >>> data = fh.data.ActivationDataset(store, "layers.5")
        >>> stream = fh.data.ActivationStream(data, 4096)
        >>> for rows in stream:
        ...     train(rows)
    """

    def __init__(  # noqa: PLR0913 (the options by keyword)
        self,
        data: ActivationDataset,
        batch_size: int,
        *,
        seed: int = 0,
        reservoir: int = 2**16,
        drop_last: bool = False,
        workers: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        expect(data, ActivationDataset, "data must be an ActivationDataset")
        self.data = data
        self.batch_size = at_least(1, "batch_size", batch_size)
        at_least(0, "seed", seed)  # no cap: a larger seed is another one
        self.seed = seed
        self.reservoir = max(at_least(1, "reservoir", reservoir), self.batch_size)
        expect(drop_last, bool, "drop_last must be a bool")
        self.drop_last = drop_last
        self.workers = at_least(0, "workers", workers)
        own, count = _of_distributed()
        self.ranks = at_least(1, "ranks", count if ranks is None else ranks)
        self.rank = at_least(0, "rank", own if rank is None else rank)
        if self.rank >= self.ranks:
            msg = f"rank must be below ranks={self.ranks}, got {self.rank}"
            raise ValueError(msg)
        self.epoch = 0
        """Number of the epoch, from 0."""
        self.batch = 0
        """Number of the next batch in it."""

    def __repr__(self) -> str:
        return (
            f"<ActivationStream of {counted(len(self), 'batch')} of {self.batch_size}, "
            f"at batch {self.batch} of epoch {self.epoch}, of {self.data!r}>"
        )

    def __len__(self) -> int:
        first, last = self._part()
        return math.ceil((last - first) / self.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        batches: Iterator[Tensor]
        if worker is not None:
            batches = self._share(worker.id, worker.num_workers)
        elif self.workers:
            batches = iter(DataLoader(self, batch_size=None, num_workers=self.workers))
        else:
            batches = self._share(0, 1)
        for batch in batches:
            self.batch += 1
            yield batch
        self.epoch += 1
        self.batch = 0

    def epochs(self) -> Iterator[Tensor]:
        """Yields batches forever, one epoch after the other, as trainers of SAELens take them.

        Raises:
            HookError: an epoch has no batch.
        """
        if not len(self):
            msg = (
                f"an epoch of {self.data!r} has no batch of {self.batch_size} rows for rank "
                f"{self.rank} of {self.ranks}: make batch_size smaller"
            )
            raise HookError(msg)
        while True:
            yield from self

    def _share(self, worker: int, workers: int) -> Iterator[Tensor]:
        """Yields each batch that is this worker's: a loader asks its workers in turn."""
        first = self.batch
        for number, rows in enumerate(self._order()):
            if number >= first and (number - first) % workers == worker:
                yield self.data[rows]

    def _order(self) -> Iterator[_Numbers]:
        """Yields the numbers of the rows of each batch of the epoch."""
        random = np.random.default_rng([self.seed, self.epoch])
        places = random.permutation(len(self.data.sizes))
        ends = np.cumsum(self.data.sizes[places])
        shifts = self.data.ends[places] - ends
        first, last = self._part()
        # Half of the reservoir, in full batches, so that only the last batch may have fewer.
        drawn = max(self.reservoir // 2 // self.batch_size, 1) * self.batch_size
        pool = np.arange(0)
        while first < last or len(pool):
            added = np.arange(first, min(last, first + self.reservoir - len(pool)))
            first += len(added)
            pool = random.permutation(np.concatenate([pool, added]))
            taken, pool = np.split(pool, [len(pool) if first == last else drawn])
            numbers = taken + shifts[np.searchsorted(ends, taken, side="right")]
            for start in range(0, len(numbers), self.batch_size):
                yield numbers[start : start + self.batch_size]

    def _part(self) -> tuple[int, int]:
        """Returns the bounds of this rank's part of the ordered rows."""
        rows = len(self.data)
        if self.drop_last:
            each = rows // self.ranks // self.batch_size * self.batch_size
            return self.rank * each, (self.rank + 1) * each
        return rows * self.rank // self.ranks, rows * (self.rank + 1) // self.ranks

    def _made_of(self) -> dict[str, object]:
        data = {name: getattr(self.data, name) for name in ("run", "layer", "name")}
        options = ("batch_size", "seed", "reservoir", "drop_last", "ranks")
        own = {name: getattr(self, name) for name in options}
        rows = {"rows": len(self.data), "checksum of sizes": crc32(self.data.sizes.tobytes())}
        return {**data, **rows, **own}

    def state_dict(self) -> dict[str, Any]:
        """Returns the place after the last batch in plain data, the same on all ranks."""
        return {"epoch": self.epoch, "batch": self.batch, "made_of": self._made_of()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the place of a `state_dict`.

        Raises:
            ResumeError: the state is from a stream with other rows or options.
        """
        before = state["made_of"]
        changed = [
            f"{name}: {before.get(name)!r}, now {value!r}"
            for name, value in self._made_of().items()
            if before.get(name) != value
        ]
        if changed:
            msg = (
                f"the state is from a different stream ({'; '.join(changed)}): create the stream "
                "as before"
            )
            raise ResumeError(msg)
        self.epoch, self.batch = state["epoch"], state["batch"]


def _of_distributed() -> tuple[int, int]:
    """Returns the rank and the number of ranks of torch.distributed; (0, 1) if it is not in use."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
