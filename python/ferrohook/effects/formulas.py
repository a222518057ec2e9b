"""Formulas of the interventions in torch, for traces and for the vectors that native code casts."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from ferrohook.errors import HookTypeError
from ferrohook.util.tensors import same_tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


EXACT: Final = {torch.float64, torch.complex128}
"""Dtypes with which numbers are computed in float64; in float32 with others."""


def check_dtypes(kind: str, dtype: torch.dtype, vector: torch.dtype | None = None) -> None:
    """Raises unless an intervention with a vector can change tensors of a dtype.

    Raises:
        HookTypeError: a part of its result would be lost, or has no meaning.
    """
    name = kind.capitalize()
    if not (dtype.is_floating_point or dtype.is_complex):
        msg = f"{name} changes tensors of floating point, got {dtype}"
        raise HookTypeError(msg)
    if kind == "clamp" and dtype.is_complex:
        msg = f"{name} limits real components, got {dtype}: complex numbers have no order"
        raise HookTypeError(msg)
    if vector is not None and vector.is_complex and not dtype.is_complex:
        msg = (
            f"{name} of {vector} changes complex tensors, got {dtype}, which has no imaginary part"
        )
        raise HookTypeError(msg)


def prepared_vector(kind: str, vector: Tensor, scale: Any) -> Tensor:
    """Returns the vector that meets tensors, before it is cast: scaled, or of unit length."""
    if kind in {"ablate", "clamp"}:
        exact = vector
        if vector.dtype not in EXACT:
            exact = vector.to(torch.complex64 if vector.is_complex() else torch.float32)
        unit: Tensor = exact / exact.norm()
        return unit
    return vector if kind != "add" or scale is None else vector.mul(scale)


def change(kind: str, x: Tensor, prepared: Tensor | None, numbers: Sequence[Any]) -> Tensor:
    """Applies an intervention with a prepared vector to a tensor, as native code does."""
    if kind == "zero":
        return torch.zeros_like(x)
    check_dtypes(kind, x.dtype, None if prepared is None else prepared.dtype)
    if kind == "scale":
        return x.mul(numbers[0])
    vector = cast("Tensor", prepared).to(x.device, x.dtype)
    if x.is_nested:  # in the layout `jagged`: no graph has others
        nested: Any = x
        dense = _change_by(kind, nested.values(), vector, numbers)
        return torch.nested.nested_tensor_from_jagged(dense, nested.offsets(), nested.lengths())
    return _change_by(kind, x, vector, numbers)


def _change_by(kind: str, x: Tensor, vector: Tensor, numbers: Sequence[Any]) -> Tensor:
    if kind == "add":
        return x + (vector.expand_as(x) if vector.dim() > 1 else vector)
    if kind == "replace":
        return vector.expand_as(x).clone()
    along = (x * vector.conj()).sum(-1, keepdim=True)
    if kind == "ablate":
        return x - along * vector
    low, high = numbers
    # A sum takes a number of the host on any device, without a copy; `clamp` takes none.
    limited = along if low is None else along.clamp(min=torch.zeros_like(along) + low)
    limited = limited if high is None else limited.clamp(max=torch.zeros_like(along) + high)
    return x + (limited - along) * vector


SUM: Final = "sum"
"""`output_index` of the sum of the hidden state and the residual that a layer returns as a pair."""
_PLAIN = (list, dict, OrderedDict)


def _is_sum(value: Any, part: Any) -> bool:
    return isinstance(value, tuple) and len(value) == len(("hidden", "residual")) and part == SUM


def part_of(value: Any, part: Any) -> Any:
    """Finds the part that `output_index` names, as native code does; None if there is none."""
    if isinstance(part, tuple):
        for step in part:
            value = None if value is None else part_of(value, step)
        return value
    if part is None:
        return value
    if _is_sum(value, part):
        hidden, residual = value
        return hidden + residual
    if isinstance(value, tuple | list) and isinstance(part, int):
        return value[part] if -len(value) <= part < len(value) else None
    if isinstance(value, dict | UserDict) and isinstance(part, str):
        return value.get(part)
    return getattr(value, part, None) if isinstance(part, str) else value[part]


def change_part(kind: str, value: Any, part: Any, changed: Callable[[Tensor], Tensor]) -> Any:
    """Applies a change to the part of a value that `output_index` names."""
    if part is None:
        return changed(value)
    if isinstance(part, tuple):
        first, *rest = part
        if rest:
            inner = change_part(kind, part_of(value, first), tuple(rest), changed)
            return _with_part(value, first, inner)
        part = first
    if _is_sum(value, part):
        hidden, residual = value
        hidden = changed(hidden) if kind == "add" else changed(hidden + residual) - residual
        return _with_part(value, 0, hidden)
    found = part_of(value, part)
    if not isinstance(found, torch.Tensor):
        msg = f"output_index {part!r} of a {type(value).__name__} is {type(found).__name__}"
        raise HookTypeError(msg)
    return _with_part(value, part, changed(found))


def _with_part(value: Any, part: Any, item: Any) -> Any:
    """Copies a value with a part replaced."""
    if isinstance(value, tuple):
        items = list(value)
        fields: Any = type(value)
        items[fields.__match_args__.index(part) if isinstance(part, str) else part] = item
        return same_tuple(value, items)
    copied: Any
    if type(value) in _PLAIN:
        copied = value.copy()
    elif hasattr(value, "__dict__"):
        copied = copy.copy(value)
    else:
        # Dynamo traces the copy of an object with slots, but cannot return it.
        msg = f"a {type(value).__name__} is changed outside of graphs"
        raise HookTypeError(msg)
    if isinstance(value, dict):
        # The index of a transformers `ModelOutput`.
        copied[part if part in value else list(value)[part]] = item
    elif isinstance(value, list):
        copied[part] = item
    else:
        object.__setattr__(copied, part, item)  # for a frozen dataclass too
    return copied
