"""`Slice`: an index into one dimension of a tensor."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

SliceInput: TypeAlias = (
    "int | np.integer[Any] | Sequence[int] | slice | Tensor | np.ndarray[Any, Any] | None"
)
"""Argument of `Slice`."""

Mode: TypeAlias = Literal["int", "slice", "array", "identity"]


class Slice:
    """An index into one dimension of a tensor.

    Follows TransformerLens' `Slice`. Distinguishes an int from a list of one.

    Args:
        input_slice: an int selects that index and drops the dimension; a tuple is the arguments of
            `slice` (`(5,)` is `:5`, `(1, 5)` is `1:5`, `(1, 5, 2)` is `1:5:2`); a `slice` is
            itself; a list, tensor or array contains indices or is a mask; None selects everything.

    Attributes:
        slice: the index of the dimension.
        mode: `int`, `slice`, `array` or `identity`.

    Raises:
        ValueError: `input_slice` is none of these.
    """

    slice: Any
    mode: Mode

    def __init__(self, input_slice: SliceInput = None) -> None:
        index = _as_int(input_slice)
        if index is not None:
            self.slice, self.mode = index, "int"
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
                "a Slice must be created from an int, a tuple of one to three ints, a slice, a "
                f"list, tensor or array of indices, or None, got {input_slice!r}"
            )
            raise ValueError(msg)

    @classmethod
    def unwrap(cls, slice_input: Slice | SliceInput) -> Slice:
        """Makes a `Slice`, or returns one unchanged.

        An int becomes a list of one: the dimension stays.
        """
        if isinstance(slice_input, Slice):
            return slice_input
        index = _as_int(slice_input)
        return cls(slice_input if index is None else [index])

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Indexes one dimension of a tensor.

        Args:
            tensor: any shape that has the dimension.
            dim: the dimension; a negative one counts from the end.

        Returns:
            The part; a view if PyTorch's indexing returns one.

        Raises:
            IndexError: the tensor lacks the dimension or the indices.
        """
        index: list[Any] = [slice(None)] * tensor.ndim
        index[dim] = self.slice
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray[Any, Any]:
        """Lists the selected indices of a dimension.

        Args:
            max_ctx: the dimension's size; an int `Slice` needs none.

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


def _as_int(value: Any) -> int | None:
    """Converts an int, a NumPy integer or an integer scalar tensor or array; else None."""
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        return None  # Python and PyTorch take it for an int
    try:
        return None if getattr(value, "ndim", 0) else operator.index(value)
    except TypeError:
        return None
