"""Helpers of the tests of errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def call(module: nn.Module) -> Any:
    """Calls a module and runs backward: all four phases."""
    out = module(torch.ones(2, requires_grad=True))
    out.sum().backward()
    return out


def raising(error: BaseException) -> Callable[..., Any]:
    def raising_hook(*_: Any) -> None:
        raise error

    return raising_hook
