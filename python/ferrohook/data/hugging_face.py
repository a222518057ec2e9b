"""`to_datasets`: stored rows as a data set of Hugging Face, whose columns are memory maps."""

from __future__ import annotations

import importlib
import uuid
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ferrohook.data.token_rows import LAYER
from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.util.arguments import at_least
from ferrohook.util.texts import imported

if TYPE_CHECKING:
    from collections.abc import Sequence

    import datasets  # pyright: ignore[reportMissingImports] (no dependency)
    from torch import Tensor

_CAST = {torch.bfloat16: torch.float32}
"""Dtypes that Arrow lacks, and others that have all of their values."""
_ARROW = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"}
"""Dtypes of Arrow, under the names that torch has for them too."""


class Readable(Protocol):
    """Part of a store that is read here."""

    def completed(self, run: str) -> list[int]: ...  # noqa: D102 (see Store)
    def layers(self, run: str, batch: int) -> list[str]: ...  # noqa: D102
    def get(self, run: str, batch: int, layer: str) -> dict[str, Tensor]: ...  # noqa: D102


def to_datasets(
    store: Readable, layers: Sequence[str], run: str, name: str, context: int | None
) -> datasets.Dataset:
    """Makes the data set, see `Store.to_datasets`."""
    hf = imported("datasets", "to_datasets")
    pa = importlib.import_module("pyarrow")  # a dependency of datasets
    columns = _columns(store, layers, run, name)
    if context is not None:
        at_least(1, "context", context)
        columns.pop("position", None)
        columns.pop("text", None)
        columns = {
            "token_ids" if title == "token" else title: _in_contexts(parts, context)
            for title, parts in columns.items()
        }
    features: dict[str, Any] = {}
    arrays = []
    for title, parts in columns.items():
        value = hf.Value(_arrow_name(title, parts[0].dtype))
        shape = parts[0].shape[1:]
        if len(shape) == 2:  # noqa: PLR2004 (context and width)
            features[title] = hf.Array2D(tuple(shape), value.dtype)
            kind = features[title]()
        else:
            features[title] = hf.Sequence(value, length=shape[0]) if shape else value
            kind = hf.Features({title: features[title]}).arrow_schema.types[0]
        arrays.append(pa.chunked_array([_array(pa, part, kind) for part in parts], kind))
    described = hf.Features(features)
    info = hf.DatasetInfo(features=described)
    table = pa.Table.from_arrays(arrays, schema=described.arrow_schema)
    # Random: with an equal fingerprint `map` would return results cached for other rows.
    return hf.Dataset(table, info=info, fingerprint=uuid.uuid4().hex)


def _columns(
    store: Readable, layers: Sequence[str], run: str, name: str
) -> dict[str, list[Tensor]]:
    """Reads the rows of each layer, and their token columns, batch by batch."""
    columns: dict[str, list[Tensor]] = {}
    chosen = [*layers]
    for batch in store.completed(run):
        stored = store.layers(run, batch)
        chosen = chosen or [each for each in stored if each != LAYER]
        if not chosen or not {*chosen} <= {*stored}:
            continue  # as batches of other layers
        found = {layer: store.get(run, batch, layer).get(name) for layer in chosen}
        rows = {layer: rows_of(tensor) for layer, tensor in found.items() if tensor is not None}
        if len(rows) < len(found):
            continue
        count = len(rows[chosen[0]])
        if LAYER in stored:
            for title, numbers in store.get(run, batch, LAYER).items():
                if title in rows:
                    msg = f"a layer has the same name as the column {title!r}: leave that layer out"
                    raise HookError(msg)
                rows[title] = numbers.repeat_interleave(count // max(len(numbers), 1))
        for title, part in rows.items():
            before = columns.setdefault(title, [])
            if len(part) != count or (before and _kind(before[0]) != _kind(part)):
                msg = (
                    f"{title!r} has {len(part)} rows of {_kind(part)} in batch {batch} of run "
                    f"{run!r}, unlike the others: make a separate data set of it"
                )
                raise HookError(msg)
            before.append(part)
    if not columns:
        wanted = ", ".join(map(repr, layers)) or "any layer"
        msg = f"no complete batch of run {run!r} has a tensor {name!r} of {wanted}"
        raise SelectionError(msg)
    return columns


def rows_of(tensor: Tensor) -> Tensor:
    """Returns the vectors along a tensor's last dimension."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _kind(rows: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(rows.shape[1:]), rows.dtype


def _in_contexts(parts: list[Tensor], size: int) -> list[Tensor]:
    """Joins rows to whole contexts of a size: (contexts, size, width)."""
    joined = []
    rest = parts[0][:0]
    for part in parts:
        rows = torch.cat([rest, part]) if len(rest) else part
        whole = len(rows) // size * size
        rest = rows[whole:]
        joined.append(rows[:whole].unflatten(0, (-1, size)))
    return joined


def _arrow_name(title: str, dtype: torch.dtype) -> str:
    found = str(_CAST.get(dtype, dtype)).removeprefix("torch.")
    if found not in _ARROW:
        msg = (
            f"Arrow does not support {dtype}, the dtype of {title!r}: collect it with "
            "dtype=torch.float16"
        )
        raise HookTypeError(msg)
    return found


def _array(pa: Any, part: Tensor, kind: Any) -> Any:
    """Makes an array of a type of Arrow that refers to the tensor's memory."""
    part = part.to(_CAST.get(part.dtype, part.dtype))
    flat = pa.array(part.reshape(-1).numpy())
    if part.dim() == 1:
        return flat
    if part.dim() == 2:  # noqa: PLR2004 (rows of a fixed length)
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    for size in reversed(part.shape[1:]):
        offsets = pa.array(np.arange(0, len(flat) + 1, size, dtype=np.int32))
        flat = pa.ListArray.from_arrays(offsets, flat)
    return pa.ExtensionArray.from_storage(kind, flat)
