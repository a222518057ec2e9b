"""Formulas of the interventions in torch, for traces and for the vectors that native code casts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def prepared_vector(kind: str, vector: Tensor, scale: Any) -> Tensor:
    """Returns the vector that meets tensors, before it is cast: scaled, or of unit length."""
    if kind in {"ablate", "clamp"}:
        exact = vector if vector.dtype == torch.float64 else vector.float()
        unit: Tensor = exact / exact.norm()
        return unit
    return vector if kind != "add" or scale is None else vector.mul(scale)


def change(kind: str, x: Tensor, vector: Tensor | None, numbers: tuple[Any, ...]) -> Tensor:
    """Applies an intervention to a tensor, as native code does."""
    if kind == "scale":
        return x.mul(numbers[0])
    if kind == "zero":
        return torch.zeros_like(x)
    scale = numbers[0] if kind == "add" else None
    vector = prepared_vector(kind, cast("Tensor", vector), scale).to(x.device, x.dtype)
    if kind == "add":
        return x + (vector.expand_as(x) if vector.dim() > 1 else vector)
    if kind == "replace":
        return vector.expand_as(x).clone()
    along = (x * vector).sum(-1, keepdim=True)
    if kind == "ablate":
        return x - along * vector
    return x + (along.clamp(*numbers) - along) * vector


_SUM: tuple[Any, ...] = ("sum",)


def change_part(kind: str, value: Any, part: Any, changed: Callable[[Tensor], Tensor]) -> Any:
    """Applies a change to the part of a value that `output_index` names."""
    if part is None:
        return changed(value)
    if isinstance(value, tuple) and part in _SUM:
        hidden, residual = value
        if kind == "add":
            return changed(hidden), residual
        return changed(hidden + residual) - residual, residual
    if isinstance(value, tuple):
        items = list(value)
        made: Any = type(value)
        place = made._fields.index(part) if isinstance(part, str) else part
        items[place] = changed(items[place])
        return tuple(items) if type(value) is tuple else type(value)(*items)
    if isinstance(value, list | dict):
        copied: Any = value.copy()
        copied[part] = changed(copied[part])
        return copied
    msg = f"output_index {part!r} of a {type(value).__name__}"
    raise NotImplementedError(msg)
