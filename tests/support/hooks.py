"""Hooks that several tests register, and their phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


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


def register(module: Any, phase: str, hook: Any, **options: Any) -> fh.typing.HookHandle:
    handle = getattr(module, PHASES[phase])(hook, **options)
    assert isinstance(handle, fh.typing.HookHandle)
    return handle


def call(module: nn.Module) -> Any:
    """Calls a module and runs backward: all four phases."""
    out = module(torch.ones(1, 2, requires_grad=True))
    out.sum().backward()
    return out


class Counting:
    """A hook that counts its calls and supports weak references."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


def ignore(*_: Any) -> None:
    """Does nothing."""


def add(amount: float) -> Callable[..., Any]:
    return lambda _module, _args, output: output + amount


def raising(error: BaseException) -> Callable[..., Any]:
    def raising_hook(*_: Any) -> None:
        raise error

    return raising_hook


def times(value: Any, factor: float) -> Any:
    """`value` with every number and tensor multiplied by `factor`."""
    if isinstance(value, tuple):
        return tuple(times(each, factor) for each in value)
    return value if value is None or isinstance(value, str) else value * factor
