"""Modules and fixtures of the tests of errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable


PHASES = {
    "forward_pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "backward_pre": "register_full_backward_pre_hook",
    "backward": "register_full_backward_hook",
}
TYPED: dict[str, Any] = {
    "forward_pre": fh.ForwardPreHook,
    "forward": fh.ForwardHook,
    "backward": fh.BackwardHook,
}


class Failing(nn.Module):
    """Returns its input; raises what it is told to."""

    error: BaseException | None = None

    def forward(self, x: Any) -> Any:
        if self.error is not None:
            raise self.error
        return x


def register(module: fh.HookedModule[Any], phase: str, hook: Any, **options: Any) -> fh.HookHandle:
    handle = getattr(module, PHASES[phase])(hook, **options)
    assert isinstance(handle, fh.HookHandle)
    return handle


def call(module: nn.Module) -> Any:
    """Runs all phases."""
    out = module(torch.ones(2, requires_grad=True))
    out.sum().backward()
    return out


def raising(error: BaseException) -> Callable[..., Any]:
    def raising_hook(*_: Any) -> None:
        raise error

    return raising_hook


def ignore(*_: Any) -> None:
    """A hook that does nothing."""
