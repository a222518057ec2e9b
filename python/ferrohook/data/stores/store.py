"""`Store`: tensors by run, batch and layer, and the checks of its arguments."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from ferrohook.captures import tensor_files
from ferrohook.captures.tensor_files import Pieces
from ferrohook.data.hugging_face import to_datasets
from ferrohook.errors import HookTypeError, SelectionError, StoreError
from ferrohook.util.arguments import at_least, expect
from ferrohook.util.texts import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import datasets  # pyright: ignore[reportMissingImports] (no dependency)

OwnedTensor: TypeAlias = Tensor | Pieces
"""Tensor of a store."""
_NAME = re.compile(r"\w[\w.-]*")


class DamagedBatch(NamedTuple):
    """A batch with a missing, truncated or changed file."""

    run: str
    batch: int
    problem: str
    """Sentence that names the file."""


class Store(ABC):
    """Stores tensors by run, batch and layer.

    A batch is open until `complete` is called for it. Closing flushes; the context manager closes
    at exit. Methods are thread-safe.
    """

    def put(
        self,
        run: str,
        batch: int,
        layer: str,
        tensors: Mapping[str, Tensor | Sequence[Tensor]],
        *,
        copy: bool = True,
    ) -> None:
        """Adds tensors to a layer of a batch; replaces tensors of the same names.

        Args:
            run: a name of letters, digits, `_`, and after the first also `-` and `.`.
            batch: index of the batch, from 0.
            layer: any name, `""` included.
            tensors: tensors by names without a slash; stored detached, on the CPU. A list of
                tensors is stored as one, joined along the first dimension.
            copy: False if no code will write to the tensors in place; then they are not copied.

        Raises:
            HookTypeError: an argument has the wrong type, or a tensor is not strided or has a dtype
                that safetensors lacks.
            ValueError: an invalid name or index, or a list of tensors that cannot be joined.
            StoreError: the store is closed, read only, or failed to write an earlier batch.
        """
        self._check_writable()
        self._put(run, batch, layer, own_tensors(run, batch, layer, tensors, copy=copy))

    def restart(self, run: str, batch: int) -> None:
        """Reopens a batch: tensors put from now on replace all earlier ones.

        Raises:
            StoreError: as for `put`.
        """
        check_batch(run, batch)
        self._check_writable()
        self._restart(run, batch)

    def complete(
        self,
        run: str,
        batch: int,
        *,
        fingerprint: str = "",
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        """Marks a batch as complete. A `LocalStore` has written it when the next `flush` returns.

        Args:
            run: name of the run.
            batch: index of the batch.
            fingerprint: fingerprint of the input of the batch.
            manifest: description of the run in plain data, stored with its first batch.

        Raises:
            StoreError: as for `put`.
        """
        check_batch(run, batch)
        self._check_writable()
        self._complete(run, batch, fingerprint, manifest)

    @abstractmethod
    def _check_writable(self) -> object:
        """Checks that tensors may be put, see `put`."""

    @abstractmethod
    def _put(self, run: str, batch: int, layer: str, owned: dict[str, OwnedTensor]) -> None:
        """Adds tensors that the store may keep, see `put`."""

    @abstractmethod
    def _restart(self, run: str, batch: int) -> None:
        """Reopens a batch, see `restart`."""

    @abstractmethod
    def _complete(
        self, run: str, batch: int, fingerprint: str, manifest: Mapping[str, Any] | None
    ) -> None:
        """Marks a batch as complete, see `complete`."""

    @abstractmethod
    def discard(self, run: str, batch: int) -> None:
        """Drops the tensors of an open batch that are not yet written."""

    @abstractmethod
    def flush(self) -> None:
        """Waits until all tensors are written, also of open batches.

        Raises:
            StoreError: a write failed, now or before.
        """

    @abstractmethod
    def close(self) -> None:
        """Flushes and releases all resources. Idempotent.

        Raises:
            StoreError: as for `flush`; the store is closed nevertheless.
        """

    @abstractmethod
    def runs(self) -> list[str]:
        """Lists the names of the runs, sorted."""

    @abstractmethod
    def batches(self, run: str) -> list[int]:
        """Lists the indices of the stored batches, sorted.

        Raises:
            SelectionError: the store has no such run.
        """

    @abstractmethod
    def completed(self, run: str) -> list[int]:
        """Lists the indices of the complete batches, sorted.

        Empty for an unknown run, because a run to be resumed may never have started.
        """

    @abstractmethod
    def manifest(self, run: str) -> Mapping[str, Any] | None:
        """Returns the manifest of a run; None if it has none, or for an unknown run."""

    @abstractmethod
    def fingerprints(self, run: str) -> dict[int, str]:
        """Returns the fingerprints of batches by index, also of damaged batches.

        Empty for an unknown run.
        """

    @abstractmethod
    def verify(
        self, run: str | None = None, *, contents: bool = True, progress: bool = False
    ) -> list[DamagedBatch]:
        """Lists damaged batches: a file is missing, of another size, or of another checksum.

        Args:
            run: name of the run; None for all runs.
            contents: read all files and compare checksums; False compares only their sizes.
            progress: show a progress bar, as `collect` does.

        Raises:
            SelectionError: the store has no such run.
            StoreError: the index of a run is damaged.
        """

    @abstractmethod
    def layers(self, run: str, batch: int) -> list[str]:
        """Lists the layers of a batch, in the order of `put`.

        Raises:
            SelectionError: the store has no such run or batch.
        """

    @abstractmethod
    def get(self, run: str, batch: int, layer: str, *, verify: bool = False) -> dict[str, Tensor]:
        """Reads the tensors of a layer by name, on the CPU; the caller owns them.

        Args:
            run: name of the run.
            batch: index of the batch.
            layer: name of the layer.
            verify: compare the checksum of the batch first, which reads the whole of its files.

        Raises:
            SelectionError: the store has no such run, batch or layer.
            StoreError: a file is damaged.
        """

    def to_datasets(
        self,
        *layers: str,
        run: str = "run",
        name: str = "output",
        context: int | None = None,
    ) -> datasets.Dataset:
        """Makes a Hugging Face data set of the rows of layers, see `ActivationDataset`.

        Each layer is a column, and so are `token`, `position` and `text` of a run that was
        collected with `tokens`. The data set is a view of the store's memory maps; `save_to_disk`
        copies it to a folder.

        Args:
            *layers: names of the layers; none for all layers of the first complete batch.
            run: name of the run.
            name: name of the layers' tensor.
            context: rows of an example, in the format of the cached activations of SAELens: columns
                of (context, width), and `token_ids`. Last rows that do not fill an example are left
                out. None for an example for each row.

        Raises:
            SelectionError: no complete batch of the run has the tensors.
            HookError: layers differ in their numbers of rows, or the package datasets is not
                installed.
            ValueError: `context` is below 1.
        """
        return to_datasets(self, layers, run, name, context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self.close()
        except StoreError:
            # An exception in flight came first, and often has the same cause.
            if error is None:
                raise


@dataclass
class StoredBatch:
    """Tensors of a batch by layer and name."""

    layers: dict[str, dict[str, OwnedTensor]] = field(default_factory=dict)
    nbytes: int = 0
    complete: bool = False
    restarted: bool = False
    fingerprint: str = ""
    manifest: Mapping[str, Any] | None = None

    def add(self, layer: str, tensors: Mapping[str, OwnedTensor]) -> None:
        """Adds tensors to a layer; replaces tensors of the same names."""
        old = self.layers.get(layer, {})
        replaced = (old[name].nbytes for name in old.keys() & tensors.keys())
        self.nbytes += sum(tensor.nbytes for tensor in tensors.values()) - sum(replaced)
        self.layers[layer] = {**old, **tensors}  # a new dict: readers may have the old


def check_batch(run: str, batch: int) -> None:
    """Validates the name of a run and the index of a batch."""
    expect(run, str, "run must be a str")
    if not _NAME.fullmatch(run):
        msg = (
            "run must be a name of letters, digits and '_', and after the first character also '-' "
            f"and '.', got {run!r}"
        )
        raise ValueError(msg)
    at_least(0, "batch", batch)


def own_tensors(
    run: str,
    batch: int,
    layer: str,
    tensors: Mapping[str, Tensor | Sequence[Tensor]],
    *,
    copy: bool,
) -> dict[str, OwnedTensor]:
    """Validates tensors and makes them the store's own: detached, contiguous, on the CPU."""
    check_batch(run, batch)
    expect(layer, str, "layer must be a str")
    expect(tensors, Mapping, "the tensors of a layer must be a mapping from their names")
    return {
        name: _own_pieces(layer, name, value, copy=copy)
        if isinstance(value, list | tuple) and value
        else _own_tensor(layer, name, value, copy=copy)
        for name, value in tensors.items()
    }


def _own_pieces(layer: str, name: Any, pieces: Sequence[Any], *, copy: bool) -> Pieces:
    owned = [_own_tensor(layer, name, each, copy=copy) for each in pieces]
    kinds = {(it.dtype, it.shape[1:], it.dim() > 0) for it in owned}
    if len(kinds) > 1 or not owned[0].dim():
        msg = (
            f"layer {layer!r}: the tensors of {name!r} cannot be joined: they must have one dtype, "
            "and equal dimensions but for the first"
        )
        raise ValueError(msg)
    return Pieces(owned)


def _own_tensor(layer: str, name: Any, tensor: Any, *, copy: bool) -> Tensor:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        types = f"from {type(name).__name__} to {type(tensor).__name__}"
        msg = f"layer {layer!r}: tensors must be a dict from str to Tensor, got an item {types}"
        raise HookTypeError(msg)
    if "/" in name or not name:
        msg = (
            f"layer {layer!r}: the name of a tensor must not be empty or contain a slash, got "
            f"{name!r}"
        )
        raise ValueError(msg)
    if tensor.is_nested:
        msg = f"layer {layer!r}: {name!r} is a nested tensor: store its to_padded_tensor(0.0)"
        raise HookTypeError(msg)
    if tensor.layout != torch.strided:
        msg = f"layer {layer!r}: {name!r} has layout {tensor.layout}: store its to_dense()"
        raise HookTypeError(msg)
    if tensor.dtype not in tensor_files.FORMATS:
        msg = f"layer {layer!r}: {name!r} is of {tensor.dtype}, which safetensors does not support"
        raise HookTypeError(msg)
    moved = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    shared = copy and moved.data_ptr() == tensor.data_ptr()
    contiguous = torch.contiguous_format
    return moved.clone(memory_format=contiguous) if shared else moved.contiguous()


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def find(entries: Mapping[_Key, _Value], key: _Key, kind: str) -> _Value:
    """Looks a key up.

    Raises:
        SelectionError: the key is missing; the message lists the first keys.
    """
    try:
        return entries[key]
    except (KeyError, TypeError):
        msg = f"the store has no {kind} {key!r} there: it has {listed(entries) or 'none'}"
        raise SelectionError(msg) from None
