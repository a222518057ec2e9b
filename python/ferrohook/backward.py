"""Backward hooks on autograd's tape.

`torch.utils.hooks.BackwardHook` puts a module's inputs and outputs through one autograd node each
and calls back with the gradients. It handles tensors and tuples; this module converts lists, dicts
and keyword inputs to tuples and back.
"""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.modules.module import _WrappedHook
from torch.utils.hooks import BackwardHook

if TYPE_CHECKING:
    from torch import nn

Hook: TypeAlias = Callable[..., Any]


class BackwardPass(BackwardHook):
    """The backward phases of one call.

    The phases begin when autograd reaches them: hooks removed after the forward do not fire, and
    hooks registered after it do, if the call was made with a hook of that phase.
    """

    def __init__(self, module: nn.Module, pre: list[Hook], full: list[Hook]) -> None:
        """Prepares a call of `module` for its `backward_pre` and `backward` hooks.

        The registry adds one hook per phase, which walks that phase's snapshot.
        """
        super().__init__(module, full, pre)

    # `self` is any BackwardHook; its own methods have no types.
    def tap_inputs(
        self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the call's arguments, put through the autograd node of the inputs.

        As in PyTorch, `grad_input` has the positional arguments. If a call has keyword arguments
        alone, it has those, in the call's order (PyTorch observes none of them).
        """
        if args or not kwargs:
            return self.setup_input_hook(args), kwargs
        tapped = self.setup_input_hook(tuple(kwargs.values()))
        return (), dict(zip(kwargs, tapped, strict=True))

    def tap_outputs(self: Any, output: Any) -> Any:
        """Returns the output (tensor, tuple, list or dict), put through the outputs' node."""
        if isinstance(output, torch.Tensor | tuple):
            return self.setup_output_hook(output)
        if isinstance(output, list):
            keys: Any = range(len(output))
            values = tuple(output)
        elif isinstance(output, dict | UserDict):
            keys = output.keys()
            values = tuple(output.values())
        else:
            warnings.warn(
                "backward hooks cannot observe this module's output: expected a tensor or a tuple, "
                f"list or dict of tensors, got {type(output).__name__}",
                stacklevel=2,
            )
            return output
        tapped = self.setup_output_hook(values)
        if tapped is values:  # no tensor requires grad
            return output
        # A copy has the same class (a transformers ModelOutput is a dict); the original may be
        # referenced by the module.
        output = copy.copy(output)
        for key, value in zip(list(keys), tapped, strict=True):
            output[key] = value
        return output


def hook_non_full(module: nn.Module, hooks: list[Hook], args: tuple[Any, ...], output: Any) -> None:
    """Registers torch's deprecated backward hooks as `nn.Module` does.

    They go on the autograd node that computed the first tensor of the output.
    """
    tensor = output
    while not isinstance(tensor, torch.Tensor):
        if isinstance(tensor, dict):
            tensor = next(value for value in tensor.values() if isinstance(value, torch.Tensor))
        else:
            tensor = tensor[0]
    if tensor.grad_fn is None:
        return
    for hook in hooks:
        tensor.grad_fn.register_hook(_WrappedHook(hook, module))
    module._maybe_warn_non_full_backward_hook(args, output, tensor.grad_fn)
