"""Tensors in structures: tuples, lists, dicts, dataclasses and packed sequences.

Native code walks the same ones (`torch/tensors.rs`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import UserDict
from collections.abc import Mapping
from copy import copy
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_bdim,
    maybe_get_level,
)
from torch.nn.utils.rnn import PackedSequence

from ferrohook.errors import HookTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


DEEPEST: Final = 64
"""Depth below which structures count as leaves, in native code too."""


def parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Returns the items of a tuple, list, dict or dataclass with their keys; None for others.

    A `UserDict` (a transformers `BatchFeature`) counts as a dict. Keys are indices, dict keys or
    field names. An unset field of a dataclass counts as None. A `PackedSequence` has its data: the
    other tensors say where sequences are in it.
    """
    if isinstance(value, PackedSequence):
        return [("data", value.data)]
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
    if isinstance(value, PackedSequence):
        return repacked(value, *items)
    if isinstance(value, tuple):
        return same_tuple(value, items)
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


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor as it is; makes one on the host of numbers."""
    # torch's own moves tensors to the default device.
    if isinstance(value, Tensor):
        return value
    return torch.as_tensor(value, dtype=dtype, device="cpu")


def same_tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    """Makes a tuple of the class of another."""
    cls: Any = type(value)
    # One of torch.return_types, or a shape: `tuple.__new__` refuses both.
    if hasattr(cls, "n_sequence_fields") or cls is torch.Size:
        return cls(items)
    if cls is tuple or hasattr(cls, "_make"):
        return getattr(cls, "_make", tuple)(items)
    made: Any = tuple.__new__(cls, items)  # the constructor may take anything
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def repacked(sequence: PackedSequence, data: Any) -> Any:
    """Returns a packed sequence with other data; only the data if they have other tokens.

    A sequence of another number of tokens could not be unpacked.
    """
    made: Any = type(sequence)
    former, sizes, *orders = sequence
    if isinstance(data, Tensor) and isinstance(former, Tensor):
        if not data.dim() or len(data) != len(former):
            return data
        orders = [None if order is None else order.to(data.device) for order in orders]
    return made._make([data, sizes, *orders])


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
    by_key = by_key and not isinstance(value, PackedSequence)
    for key, item in parts(value) or ():
        yield from leaves_by_path(item, f"{path}[{key!r}]" if by_key else f"{path}.{key}")


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yields the tensors of a structure in order."""
    if isinstance(value, Tensor):
        yield value
    elif depth <= DEEPEST and (inside := parts(value)):
        for _, item in inside:
            yield from tensors_in(item, depth + 1)


def map_tensors(convert: Callable[[Tensor], Any], value: Any, depth: int = 0) -> Any:
    """Converts every tensor of a structure; the classes of the structure stay."""
    if isinstance(value, Tensor):
        return convert(value)
    inside = parts(value) if depth <= DEEPEST else None
    if inside is None:
        return value
    return rebuilt(value, [map_tensors(convert, item, depth + 1) for _, item in inside])


def shape_of(tensor: Tensor) -> tuple[int | None, ...]:
    """Returns the shape of a tensor; of a nested one with None where its components differ."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    shapes = [component.shape for component in tensor.unbind()]
    sizes = zip(*shapes, strict=True)
    return (len(shapes), *(each[0] if len({*each}) == 1 else None for each in sizes))


def nested_of(components: list[Tensor], layout: torch.layout) -> Tensor:
    """Makes a nested tensor; its gradients reach the components."""
    return torch.nested.as_nested_tensor(components, layout=layout)


def indexed(tensor: Tensor, index: Any) -> Tensor:
    """Returns `tensor[index]`; for a nested tensor the index applies to each component.

    Raises:
        HookTypeError: the index of a nested tensor has more than ints, slices and an ellipsis.
    """
    if not tensor.is_nested:
        return tensor[index]
    steps = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(step, int | slice | EllipsisType) for step in steps):
        msg = (
            "the slice of a nested tensor may contain only ints, slices and an ellipsis, got "
            f"{index!r}"
        )
        raise HookTypeError(msg)
    if ... in steps:
        place = steps.index(...)
        missing = tensor.dim() - len(steps) + 1
        steps = (*steps[:place], *[slice(None)] * missing, *steps[place + 1 :])
    first, *rest = steps or (slice(None),)
    components = tensor.unbind()
    if not isinstance(first, slice):
        return components[first][tuple(rest)]
    taken = [component[tuple(rest)] for component in components[first]]
    dense = not taken or not taken[0].dim()
    return torch.stack(taken) if dense else nested_of(taken, tensor.layout)


def padded(tensor: Tensor) -> Tensor:
    """Returns a nested tensor as a dense one, with NaN where a component has no number.

    Raises:
        HookTypeError: its dtype has no NaN.
    """
    if not tensor.is_nested:
        return tensor
    if not tensor.is_floating_point():
        msg = (
            f"a nested tensor of {tensor.dtype} cannot be padded, since its dtype has no NaN: "
            "stack its components"
        )
        raise HookTypeError(msg)
    return tensor.to_padded_tensor(math.nan)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor; for a sparse one the bytes of its indices and values."""
    match tensor.layout:
        case torch.sparse_coo:
            stored = [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            stored = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            stored = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case _:
            return tensor.numel() * tensor.itemsize
    return sum(each.nbytes for each in stored)


def as_leaf(tensor: Tensor) -> Tensor:
    """Cuts a tensor from autograd's graph, which cannot be copied."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


class ByContent:
    """Base of objects that are compared by their content."""

    __slots__ = ()

    def content(self) -> tuple[Any, ...]:
        """Returns what identifies it, hashable: its class, and the fields of a dataclass."""
        own = (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return (type(self), *map(content_of, own))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByContent) and self.content() == other.content()

    def __hash__(self) -> int:
        return hash(self.content())


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


def physical(tensor: Tensor) -> Tensor:
    """Returns the tensor with the memory of one that transforms of `torch.func` wrap."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def after_transforms(tensor: Tensor) -> Tensor:
    """Returns a tensor without the transforms of `torch.func` that have ended.

    The dimensions that `vmap` took away come first, the outermost one ahead of all.
    """
    current = maybe_current_level() or 0
    dims = []
    while is_functorch_wrapped_tensor(tensor):
        if 0 < maybe_get_level(tensor) <= current:
            break
        if is_batchedtensor(tensor):
            dims.append(maybe_get_bdim(tensor))
        tensor = get_unwrapped(tensor)
    for place, dim in enumerate(reversed(dims)):
        tensor = tensor.movedim(dim + place, place)
    return tensor


def unbatched(tensor: Tensor) -> Tensor:
    """Returns a gradient of `torch.autograd.grad(is_grads_batched=True)` with its batch first."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    remove: Any = vars(torch)["_remove_batch_dim"]  # for type checkers torch does not export it
    found: Tensor = remove(tensor, max(level, 1), 1, 0)
    return found


def normal(tensor: Tensor) -> Tensor:
    """Returns a tensor with a version, which autograd can save: a copy if of inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def share_memory(one: Tensor, other: Tensor) -> bool | None:
    """Returns True if two tensors are views of one storage; None for wrappers, which have none."""
    if one is other:
        return True
    one, other = physical(one), physical(other)
    if one.layout != torch.strided or other.layout != torch.strided:
        return False  # other layouts have several storages and are never views
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def version_of(tensor: Tensor) -> int | None:
    """Returns the version of a tensor; None for an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return None
