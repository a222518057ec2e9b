"""How backward hooks get onto autograd's tape.

`torch.utils.hooks.BackwardHook` does the work at the tape: it puts the tensors that enter and
leave a module through an autograd node each and calls back with the gradients. It knows tensors
and tuples; here lists, dicts and keyword inputs are brought into that form and back.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.modules.module import _WrappedHook
from torch.utils.hooks import BackwardHook

if TYPE_CHECKING:
    from torch import nn

Hook: TypeAlias = Callable[..., Any]


class BackwardPass:
    """The backward phases of one call.

    The phases begin when autograd reaches them: hooks removed after the forward do not fire, and
    hooks registered after it do, if the call was made with a hook of that phase.
    """

    def __init__(self, module: nn.Module, pre: list[Hook], full: list[Hook]) -> None:
        """Ties the call of `module` to its hooks of `backward_pre` and `backward`.

        Those of the registry are one hook each, which walks the phase.
        """
        self._tap = BackwardHook(module, full, pre)

    def tap_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments, with their gradients observed.

        As in PyTorch `grad_input` lists the positional arguments. A call with keyword arguments
        alone lists those, in the call's order (PyTorch observes none of them then).
        """
        if args or not kwargs:
            return self._tap.setup_input_hook(args), kwargs
        tapped = self._tap.setup_input_hook(tuple(kwargs.values()))
        return (), dict(zip(kwargs, tapped, strict=True))

    def tap_outputs(self, output: Any) -> Any:
        """The call's output, with its gradient observed: a tensor, tuple, list or dict."""
        if isinstance(output, torch.Tensor | tuple):
            return self._tap.setup_output_hook(output)
        if isinstance(output, list):
            keys: Any = range(len(output))
            values = tuple(output)
        elif isinstance(output, dict):
            keys = output.keys()
            values = tuple(output.values())
        else:
            warnings.warn(
                "backward hooks do not see this module's output: expected a tensor or a tuple, "
                f"list or dict of tensors, got {type(output).__name__}",
                stacklevel=2,
            )
            return output
        tapped = self._tap.setup_output_hook(values)
        if tapped is values:  # no gradient wanted
            return output
        # A copy keeps the class (a transformers ModelOutput is a dict) and spares the module's own.
        output = copy.copy(output)
        for key, value in zip(list(keys), tapped, strict=True):
            output[key] = value
        return output


def hook_non_full(module: nn.Module, hooks: list[Hook], args: tuple[Any, ...], output: Any) -> None:
    """Hangs backward hooks of torch's deprecated kind where `nn.Module` would.

    That is on the autograd node which made the first tensor of the output.
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
