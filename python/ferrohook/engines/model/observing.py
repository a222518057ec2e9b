"""The table of an engine's modules, by one forward of a few tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ferrohook.engines.model.modules import (
    NEVER_RAN,
    OBSERVED_ROWS,
    ModuleInfo,
    ModuleTable,
    Tokens,
)
from ferrohook.engines.model.step_values import observed
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable


def observe(model: nn.Module, forward: Callable[[], object]) -> ModuleTable:
    """Observes the outputs of all modules in one forward of `OBSERVED_ROWS` tokens.

    Raises:
        HookError: no module ran.
    """
    with observed(model) as calls:
        forward()
    if not calls:
        msg = "no module of the engine's model ran in the observed forward"
        raise HookError(msg)
    table = {}
    for name, module in model.named_modules():
        own = calls.get(module, [])
        info = _info(module, [_shapes(call.output) for call in own])
        inputs = _shapes(own[-1].args) if own else []
        table[name] = dataclasses.replace(info, inputs=tuple(map(_row, inputs)))
    return ModuleTable(table, getattr(model, "packed_modules_mapping", None) or {})


def _shapes(output: Any) -> Any:
    """Returns shape and dtype in place of tensors."""
    if isinstance(output, Tensor):
        return output.shape, output.element_size()
    if isinstance(output, tuple | list):
        return [_shapes(each) for each in output]
    return None


def _row(shapes: Any) -> Tokens | None:
    """Returns width and bytes per token of a tensor from its entry in `_shapes`, or None."""
    if not isinstance(shapes, tuple):
        return None
    shape, size = shapes
    has_rows = len(shape) > 1 and shape[0] == OBSERVED_ROWS
    return (shape[-1], shape[1:].numel() * size) if has_rows else None


def _info(module: nn.Module, calls: list[Any]) -> ModuleInfo:
    if not calls:
        return NEVER_RAN
    if len(calls) > 1:
        return ModuleInfo(
            "other", refused=f"it runs {len(calls)} times in a forward, for several layers"
        )
    (output,) = calls
    parts = output if isinstance(output, list) else [output]
    tensors = [part for part in parts if isinstance(part, tuple)]
    if not tensors or any(len(shape) < 1 or shape[0] != OBSERVED_ROWS for shape, _ in tensors):
        return ModuleInfo("other", refused="its output is no tensor of a row per token")
    shape, size = tensors[0]
    info = ModuleInfo("tensor", shape[-1], shape[1:].numel() * size)
    if output is not parts:
        return info
    info = dataclasses.replace(info, outputs=tuple(map(_row, parts)))
    norm = "Norm" in type(module).__name__
    if len(tensors) == 1 or norm:
        return dataclasses.replace(info, kind="first")
    layer = len(tensors) == 2 and tensors[0] == tensors[1] and any(True for _ in module.children())  # noqa: PLR2004 (hidden, residual)
    return dataclasses.replace(info, kind="stream" if layer else "other")
