"""Conversion of captured tensors: slice, cast, move to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ferrohook.util.arguments import expect
from ferrohook.util.tensors import indexed, share_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import EllipsisType

    from ferrohook.util.host_copies import HostCopies

Index: TypeAlias = "int | slice | EllipsisType | Tensor | list[int] | tuple[Any, ...] | None"


def converter(  # noqa: PLR0913, PLR0917 (the steps of a conversion)
    copies: HostCopies,
    device: torch.device | None,
    dtype: torch.dtype | None,
    index: Index,
    copy: str,
    read: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[Tensor], Tensor] | None:
    """Makes the function that a collector calls with each tensor; None if nothing is to convert.

    Args:
        copies: of tensors on a GPU.
        device: of the result; None for the tensor's.
        dtype: of a result of floating point; None for its own.
        index: part of the tensor; None for all.
        copy: see `capture`.
        read: reads what is stored of the tensor, in new memory.
    """
    # The collector refers to this function, which therefore refers only to the copies: a reference
    # cycle would keep tensors until the next garbage collection.
    if device is None and dtype is None and index is None and read is None:
        return None

    def convert(tensor: Tensor) -> Tensor:
        result = tensor if index is None else indexed(tensor, index)
        result = result if read is None else read(result)
        if dtype is not None and result.is_floating_point():
            result = result.to(dtype)
        if device is not None and device != result.device:
            to_host = device.type == "cpu" and result.is_cuda and not result.requires_grad
            if to_host and not torch.compiler.is_compiling():  # a graph cannot wait for the copy
                clone = copy != "ref" and share_memory(result, tensor) is not False
                return copies.start(result, clone=clone)
            result = result.to(device)
        # A view would keep the whole tensor alive.
        own = copy == "clone" or index is not None
        return result.clone() if own and share_memory(result, tensor) is not False else result

    return convert


def keeps_rows(index: Any, dim: int) -> bool:
    """Returns True if a `slice` keeps a dimension of rows, and its place."""
    for place, part in enumerate(index if isinstance(index, tuple) else (index,)):
        if part is ... or place > dim:
            break
        if not isinstance(part, slice) or (place == dim and part != slice(None)):
            return False
    return True


def check_index(index: Any, *, inside: bool = False) -> None:
    """Validates an index into a tensor.

    Raises:
        HookTypeError: it is not an `Index`.
        ValueError: a slice has a step below 1.
    """
    if isinstance(index, slice):
        for bound in (index.start, index.stop, index.step):
            if isinstance(bound, bool) or not (bound is None or hasattr(bound, "__index__")):
                expect(bound, (), "the bounds of a slice must be ints")
        if index.step is not None and not isinstance(index.step, Tensor) and index.step < 1:
            msg = f"the step of a slice of a tensor must be at least 1, got {index.step}"
            raise ValueError(msg)
    elif isinstance(index, tuple | list):
        for each in index:
            check_index(each, inside=True)
    elif not isinstance(index, int | type(...) | Tensor | None) or (
        # A bool is fine in a mask; by itself it adds a dimension.
        isinstance(index, bool) and not inside
    ):
        expect(index, (), "slice must be an index into a tensor")
