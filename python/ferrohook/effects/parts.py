"""Parts of a module's value that `output_index` names, found and replaced as native code does.

Dynamo traces these functions; native code has its own in `rust/py/src/torch/tensors.rs`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from typing import TYPE_CHECKING, Any, Final

import torch

from ferrohook.errors import HookTypeError
from ferrohook.util.tensors import same_tuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


SUM: Final = "sum"
"""`output_index` of the sum of the hidden state and the residual that a layer returns as a pair."""
_PLAIN = (list, dict, OrderedDict)


def _is_sum(value: Any, part: Any) -> bool:
    return isinstance(value, tuple) and len(value) == len(("hidden", "residual")) and part == SUM


def part_of(value: Any, part: Any) -> Any:
    """Finds the part that `output_index` names; None if there is none."""
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


def change_part(
    value: Any, part: Any, changed: Callable[[Tensor], Tensor], *, adds: bool = False
) -> Any:
    """Applies a change to the part of a value that `output_index` names.

    Args:
        value: a module's input or output.
        part: an `output_index`.
        changed: returns the tensor that replaces a tensor.
        adds: whether it adds what does not depend on the tensor: to a sum it is added through the
            hidden state only, without rounding the sum.
    """
    if part is None:
        return changed(value)
    if isinstance(part, tuple):
        first, *rest = part
        if rest:
            inner = change_part(part_of(value, first), tuple(rest), changed, adds=adds)
            return _with_part(value, first, inner)
        part = first
    if _is_sum(value, part):
        hidden, residual = value
        hidden = changed(hidden) if adds else changed(hidden + residual) - residual
        return _with_part(value, 0, hidden)
    found = part_of(value, part)
    if not isinstance(found, torch.Tensor):
        msg = (
            f"output_index {part!r} of a {type(value).__name__} must be a tensor, got "
            f"{type(found).__name__}"
        )
        raise HookTypeError(msg)
    return _with_part(value, part, changed(found))


def with_part(value: Any, part: Any, tensor: Tensor) -> Any:
    """Returns a value with the part replaced that `output_index` names."""
    return change_part(value, part, lambda _: tensor)


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
        msg = f"a {type(value).__name__} cannot be changed inside a graph, only outside"
        raise HookTypeError(msg)
    if isinstance(value, dict | UserDict):
        # The index of a transformers `ModelOutput`.
        copied[part if part in value else list(value)[part]] = item
    elif isinstance(value, list):
        copied[part] = item
    else:
        object.__setattr__(copied, part, item)  # for a frozen dataclass too
    return copied
