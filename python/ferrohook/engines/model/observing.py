"""The table of an engine's modules, by one forward of a few tokens."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ferrohook.engines.model.modules import (
    NEVER_RAN,
    ModuleInfo,
    ModuleTable,
    SampledLogits,
    Tokens,
    dim_of_rows,
)
from ferrohook.engines.model.step_values import observed
from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.observe import observing

if TYPE_CHECKING:
    from collections.abc import Callable


def observe(
    model: nn.Module,
    forward: Callable[[], object],
    heads_of: Callable[[nn.Module], object | None] = lambda _module: None,
) -> ModuleTable:
    """Observes the outputs of all modules in one forward of `OBSERVED_ROWS` tokens.

    Args:
        model: the engine's, loaded.
        forward: runs it.
        heads_of: returns None for a module that is not called as attention(q, k, v, ...). Models of
            transformers call its `forward`, which fires no hooks: from now on, that calls the
            module.

    Raises:
        HookError: no module ran.
    """
    with observed(model) as calls:
        forward()
    past_hooks = [it for it in model.modules() if it not in calls and heads_of(it) is not None]
    if past_hooks:
        for module in past_hooks:
            module.forward = CallingForward(module)
        with observed(model) as calls:
            forward()
    if not calls:
        msg = "no module of the engine's model ran in the observed forward"
        raise HookError(msg)
    table = {}
    for name, module in model.named_modules():
        own = calls.get(module, [])
        info = _info(module, [_shapes(call.output) for call in own])
        if own:
            args, _, _, start, end = own[-1]
            inputs = tuple(_row(it, info.dim) for it in _shapes(args))
            info = dataclasses.replace(info, inputs=inputs, start=start, end=end)
        table[name] = info
    return ModuleTable(table, getattr(model, "packed_modules_mapping", None) or {})


def observe_logits(model: nn.Module, compute: Callable[[], Tensor]) -> SampledLogits | None:
    """Finds the module that returns the logits from which an engine samples.

    Args:
        model: the engine's, loaded.
        compute: has the model compute logits of some tokens.

    Returns:
        None if the model returns no module's output.
    """
    outputs: dict[str, Any] = {}

    def note(path: str, _module: nn.Module, *call: Any) -> None:
        outputs[path] = call[-1]

    with observing(model, after=note):
        logits = compute()
    found = [path for path, output in outputs.items() if output is logits]
    return SampledLogits(found[-1], logits.shape[-1]) if found else None


class CallingForward:
    """Method that calls its module, so that hooks fire; the one within that call computes.

    Arguments have the places that they have in the method: plans name them by these.

    Args:
        module: the module.
        name: of the method.
    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self._module = module
        self._computes: Callable[..., Any] = getattr(module, name)
        parameters = inspect.signature(self._computes).parameters.values()
        self._names = [it.name for it in parameters if it.kind is it.POSITIONAL_OR_KEYWORD]
        self._is_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        if self._is_called:
            return self._computes(*args, **kwargs)
        for name in self._names[len(args) :]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        self._is_called = True
        try:
            return self._module(*args, **kwargs)
        finally:
            self._is_called = False


def _shapes(output: Any) -> Any:
    """Returns shape and dtype in place of tensors."""
    if isinstance(output, Tensor):
        return output.shape, output.element_size()
    if isinstance(output, tuple | list):
        return [_shapes(each) for each in output]
    return None


def _row(shapes: Any, dim: int) -> Tokens | None:
    """Returns width and bytes per token of a tensor from its entry in `_shapes`, or None."""
    if not isinstance(shapes, tuple):
        return None
    shape, size = shapes
    has_rows = len(shape) > dim + 1 and dim_of_rows(shape) == dim
    return (shape[-1], shape[dim + 1 :].numel() * size) if has_rows else None


def _info(module: nn.Module, calls: list[Any]) -> ModuleInfo:
    if not calls:
        return NEVER_RAN
    if len(calls) > 1:
        return ModuleInfo(
            "other", refused=f"it runs {len(calls)} times per forward, for several layers"
        )
    (output,) = calls
    parts = output if isinstance(output, list) else [output]
    tensors = [part for part in parts if isinstance(part, tuple)]
    dims = {dim_of_rows(shape) for shape, _ in tensors}
    dim = dims.pop() if len(dims) == 1 else None
    if dim is None:
        return ModuleInfo("other", refused="its output is not a tensor with a row per token")
    shape, size = tensors[0]
    info = ModuleInfo("tensor", shape[-1], shape[dim + 1 :].numel() * size, dim=dim)
    if output is not parts:
        return info
    info = dataclasses.replace(info, outputs=tuple(_row(it, dim) for it in parts))
    norm = "Norm" in type(module).__name__
    if len(tensors) == 1 or norm:
        return dataclasses.replace(info, kind="first")
    layer = len(tensors) == 2 and tensors[0] == tensors[1] and any(True for _ in module.children())  # noqa: PLR2004 (hidden, residual)
    return dataclasses.replace(info, kind="stream" if layer else "other")
