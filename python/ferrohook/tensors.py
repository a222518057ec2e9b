"""Tensors in structures of tuples, lists, dicts and dataclasses."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Returns the items of a tuple, list, dict or dataclass with their keys; None for others.

    A `UserDict` (a transformers `BatchFeature`) counts as a dict. Keys are indices, dict keys or
    field names. An unset field of a dataclass counts as None.
    """
    if isinstance(value, tuple | list):
        return enumerate(value)
    if isinstance(value, dict | UserDict):
        return value.items()
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [(name, getattr(value, name, None)) for name in value.__dataclass_fields__]
    return None


def rebuilt(value: Any, items: list[Any]) -> Any:
    """Rebuilds a structure of the same class with new items, in the order of `parts`."""
    # Dynamo cannot trace `copy` of plain lists and dicts.
    if type(value) is list:
        return items
    if type(value) is dict:
        return dict(zip(value, items, strict=True))
    if isinstance(value, tuple):
        cls: Any = type(value)
        if hasattr(cls, "n_sequence_fields"):  # one of torch.return_types
            return cls(items)
        # Constructors of tuple subclasses may take anything; only `_make` of named tuples is safe.
        return getattr(cls, "_make", tuple)(items)
    copied = copy(value)
    if isinstance(value, list):
        copied[:] = items
    elif isinstance(value, dict | UserDict):
        for key, item in zip(value, items, strict=True):
            copied[key] = item
    else:
        for name, item in zip(value.__dataclass_fields__, items, strict=True):
            if hasattr(value, name):
                object.__setattr__(copied, name, item)  # the dataclass may be frozen
    return copied


def tensors_by_path(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Tensor]]:
    """Yields the tensors of a structure in order, each with its tuple of keys."""
    if isinstance(value, Tensor):
        yield path, value
    elif inside := parts(value):
        for key, item in inside:
            yield from tensors_by_path(item, (*path, key))


def leaves_by_path(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields tensors and parts without tensors, each with the Python expression of its path."""
    if isinstance(value, Tensor) or not any(True for _ in tensors_in(value)):
        yield path, value
        return
    by_key = isinstance(value, tuple | list | dict | UserDict)
    for key, item in parts(value) or ():
        yield from leaves_by_path(item, f"{path}[{key!r}]" if by_key else f"{path}.{key}")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a structure in order."""
    if isinstance(value, Tensor):
        yield value
    elif inside := parts(value):
        for _, item in inside:
            yield from tensors_in(item)


def map_tensors(convert: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Converts every tensor of a structure; the classes of the structure stay."""
    if isinstance(value, Tensor):
        return convert(value)
    inside = parts(value)
    if inside is None:
        return value
    return rebuilt(value, [map_tensors(convert, item) for _, item in inside])


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor: of a sparse one those of its indices and values."""
    match tensor.layout:
        case torch.sparse_coo:
            stored = [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            stored = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            stored = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case _:
            return tensor.nbytes
    return sum(each.nbytes for each in stored)


def as_leaf(tensor: Tensor) -> Tensor:
    """Cuts a tensor from autograd's graph, which cannot be copied."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


def content_of(value: Any) -> Any:  # noqa: PLR0911 (one for each kind of value)
    """Returns what identifies a value, hashable: equal for equal values of the same types.

    `True` is not `1`, and `0.0` is not `-0.0`: as an index or a factor each has its own meaning. A
    tensor that is trained is identified by itself.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            return ("trained", id(value))
        data = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), data.view(torch.uint8).numpy().tobytes()
    if isinstance(value, int | float):
        return (type(value).__name__, repr(value))
    if isinstance(value, slice):
        return ("slice", *map(content_of, (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return (type(value).__name__, *map(content_of, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(content_of, value))
    if isinstance(value, Mapping):
        return tuple(sorted((name, content_of(each)) for name, each in value.items()))
    return value


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors are views of one storage."""
    if one is other:
        return True
    if one.layout != torch.strided or other.layout != torch.strided:
        return False  # other layouts have several storages and are never views
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
