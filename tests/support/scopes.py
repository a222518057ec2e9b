"""Modules and fixtures of the tests of scopes."""

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


def register(module: Any, phase: str, hook: Any, **options: Any) -> fh.HookHandle:
    handle = getattr(module, PHASES[phase])(hook, **options)
    assert isinstance(handle, fh.HookHandle)
    return handle


def call(module: nn.Module) -> None:
    """Runs all phases."""
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()


def add(amount: float) -> Callable[..., Any]:
    return lambda _module, _args, output: output + amount


class Counting:
    """A hook that counts its calls, and can be watched as it goes."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1
