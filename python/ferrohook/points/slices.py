"""`Slice`: what part of one dimension of a tensor is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

SliceInput: TypeAlias = (
    "int | np.integer[Any] | Sequence[int] | slice | Tensor | np.ndarray[Any, Any] | None"
)
"""What a `Slice` is made from: see there."""

Mode: TypeAlias = Literal["int", "slice", "array", "identity"]


class Slice:
    """What part of one dimension of a tensor is wanted.

    Follows TransformerLens' `Slice`. Python's own syntax is not enough, as an integer is to be told
    from a list of one.

    Args:
        input_slice: an integer takes that place and drops the dimension; a tuple is the arguments
            of `slice` (`(5,)` is `:5`, `(1, 5)` is `1:5`, `(1, 5, 2)` is `1:5:2`), which is taken
            too; a list, tensor or array holds the indices that are wanted, or a mask; None takes
            everything.

    Attributes:
        slice: what the dimension is indexed by.
        mode: `int`, `slice`, `array` or `identity`.

    Raises:
        ValueError: `input_slice` is none of these.
    """

    slice: Any
    mode: Mode

    def __init__(self, input_slice: SliceInput = None) -> None:
        whole = _whole_number(input_slice)
        if whole is not None:
            self.slice, self.mode = whole, "int"
        elif input_slice is None:
            self.slice, self.mode = slice(None), "identity"
        elif isinstance(input_slice, slice):
            self.slice, self.mode = input_slice, "slice"
        elif isinstance(input_slice, tuple) and 1 <= len(input_slice) <= len(("a", "b", "c")):
            self.slice, self.mode = slice(*input_slice), "slice"
        elif isinstance(input_slice, list | Tensor | np.ndarray):
            if isinstance(input_slice, Tensor):
                input_slice = input_slice.detach().cpu().numpy()
            self.slice, self.mode = np.asarray(input_slice), "array"
        else:
            msg = (
                "a Slice is made from an int, a tuple of one to three ints, a slice, a list, "
                f"tensor or array of indices, or None, got {input_slice!r}"
            )
            raise ValueError(msg)

    @classmethod
    def unwrap(cls, slice_input: Slice | SliceInput) -> Slice:
        """A `Slice` of what one is made from; one that is a `Slice` stays as it is.

        An integer becomes a list of one: the dimension stays.
        """
        if isinstance(slice_input, Slice):
            return slice_input
        whole = _whole_number(slice_input)
        return cls(slice_input if whole is None else [whole])

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """That part of a tensor.

        Args:
            tensor: of any shape that has the dimension.
            dim: which one; below 0 counted from the end.

        Returns:
            A view where PyTorch's indexing gives one.

        Raises:
            IndexError: the tensor lacks the dimension or the indices.
        """
        index: list[Any] = [slice(None)] * tensor.ndim
        index[dim] = self.slice
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray[Any, Any]:
        """The indices that are taken of a dimension.

        Args:
            max_ctx: the size of the dimension; an integer `Slice` needs none.

        Raises:
            ValueError: `max_ctx` is missing.
        """
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            msg = f"the indices of {self!r} depend on the dimension's size: pass max_ctx"
            raise ValueError(msg)
        taken: np.ndarray[Any, Any] = np.arange(max_ctx, dtype=np.int64)[self.slice]
        return taken

    def __repr__(self) -> str:
        return f"Slice({self.slice!r}, mode={self.mode!r})"


def _whole_number(value: object) -> int | None:
    """The value of a whole number, however it is stored; None for anything else."""
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return int(value.item()) if whole and value.ndim == 0 else None
    if isinstance(value, np.ndarray) and value.ndim == 0 and np.issubdtype(value.dtype, np.integer):
        return int(value)
    return None
