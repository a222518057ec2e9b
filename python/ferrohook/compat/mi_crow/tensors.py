"""The main tensor of a module's input or output: finding and replacing it."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from ferrohook.util.tensors import parts, rebuilt


def extract_tensor_from_input(input: Any) -> Tensor | None:  # noqa: A002 (mi_crow's name)
    """Finds the main tensor of a module's input.

    Args:
        input: positional arguments of the call.

    Returns:
        The first argument if it is a tensor, the first tensor in it if it is a tuple or a list,
        else None.
    """
    return first_tensor(input[0]) if input else None


def first_tensor(value: Any, *, in_dicts: bool = False) -> Tensor | None:
    """Returns the value if it is a tensor, the first tensor in it if it is a tuple or a list.

    Args:
        value: any object.
        in_dicts: search a dict too, such as the keyword arguments.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list) or (in_dicts and isinstance(value, dict)):
        return next((item for _, item in parts(value) or () if isinstance(item, Tensor)), None)
    return None


def extract_tensor_from_output(output: Any) -> Tensor | None:
    """Finds the main tensor of a module's output.

    Args:
        output: the module's output.

    Returns:
        The output if it is a tensor; the first tensor in it if it is a tuple or a list; its
        `last_hidden_state` if that is a tensor; else None.
    """
    found = first_tensor(output)
    if found is None and not isinstance(output, tuple | list):
        state = getattr(output, "last_hidden_state", None)
        return state if isinstance(state, Tensor) else None
    return found


def apply_modification_to_output(
    output: Any,
    modified_tensor: Tensor,
    target_device: torch.device | str | None = None,
) -> Any:
    """Replaces the main tensor of a module's output.

    Nothing is written in place: autograd tracks the new tensor.

    Args:
        output: the module's output.
        modified_tensor: replacement of `extract_tensor_from_output(output)`.
        target_device: device of the replacement; None: the replaced tensor's.

    Returns:
        A new output, or `output` itself if it has no tensor to replace.

    Raises:
        ValueError: the tensors differ in shape.
    """
    original = extract_tensor_from_output(output)
    if original is None:
        return output
    fitted = fit(modified_tensor, original, target_device)
    if isinstance(output, Tensor | tuple | list):
        return put_first(output, original, fitted)
    copied = copy(output)
    copied.last_hidden_state = fitted
    return copied


def fit(modified: Tensor, original: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Casts a replacement to the original's dtype, and moves it to `device` or the original's.

    Raises:
        ValueError: the tensors differ in shape.
    """
    if modified.shape != original.shape:
        msg = (
            "a replacement must have the shape of the tensor it replaces, "
            f"{tuple(original.shape)}, got {tuple(modified.shape)}"
        )
        raise ValueError(msg)
    if device is None:
        device = original.device
    if modified.dtype == original.dtype and modified.device == device:
        return modified
    return modified.to(device, original.dtype)


def put_first(value: Any, original: Tensor, replacement: Tensor) -> Any:
    """Replaces `original`, which `first_tensor` found in `value`."""
    if isinstance(value, Tensor):
        return replacement
    items = [item for _, item in parts(value) or ()]
    place = next(place for place, item in enumerate(items) if item is original)
    items[place] = replacement
    return rebuilt(value, items)
