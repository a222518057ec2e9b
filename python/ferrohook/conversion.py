"""Conversion of captured tensors: sliced, cast and moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from ferrohook.arguments import expect
from ferrohook.tensors import share_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import EllipsisType

    import torch

    from ferrohook.host_copies import HostCopies

Index: TypeAlias = "int | slice | EllipsisType | Tensor | list[int] | tuple[Any, ...] | None"


def converter(
    copies: HostCopies,
    device: torch.device | None,
    dtype: torch.dtype | None,
    index: Index,
    copy: str,
) -> Callable[[Tensor], Tensor] | None:
    """The function that a collector calls with each tensor; None where it would do nothing."""
    # Holds the copies and not the collector, which holds it: tensors are not to wait for the
    # garbage collector.
    if device is None and dtype is None and index is None:
        return None

    def convert(tensor: Tensor) -> Tensor:
        result = tensor if index is None else tensor[index]
        if dtype is not None and result.is_floating_point():
            result = result.to(dtype)
        if device is not None and device != result.device:
            if device.type == "cpu" and result.is_cuda and not result.requires_grad:
                clone = copy != "ref" and share_memory(result, tensor)
                return copies.start(result, clone=clone)
            result = result.to(device)
        # A slice is not to keep all of the tensor alive.
        own = copy == "clone" or index is not None
        return result.clone() if own and share_memory(result, tensor) else result

    return convert


def check_index(index: Any, *, inside: bool = False) -> None:
    """Refuses an index that no tensor takes.

    Raises:
        HookTypeError: it is of another type than an `Index`.
        ValueError: a slice with a step below 1.
    """
    if isinstance(index, slice):
        for bound in (index.start, index.stop, index.step):
            if isinstance(bound, bool) or not (bound is None or hasattr(bound, "__index__")):
                expect(bound, (), "the bounds of a slice are whole numbers")
        if index.step is not None and not isinstance(index.step, Tensor) and index.step < 1:
            msg = f"the step of a slice of a tensor is at least 1, got {index.step}"
            raise ValueError(msg)
    elif isinstance(index, tuple | list):
        for each in index:
            check_index(each, inside=True)
    elif not isinstance(index, int | type(...) | Tensor | None) or (
        # In a mask, not by itself: that adds a dimension.
        isinstance(index, bool) and not inside
    ):
        expect(index, (), "slice is what a tensor can be indexed by")
