"""Hooks that several tests register, and their phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def register(module: Any, phase: str, hook: Any, **options: Any) -> fh.typing.HookHandle:
    handle = getattr(module, PHASES[phase])(hook, **options)
    assert isinstance(handle, fh.typing.HookHandle)
    return handle


def ignore(*_: Any) -> None:
    """Does nothing."""


def add(amount: float) -> Callable[..., Any]:
    return lambda _module, _args, output: output + amount
