"""Access to internals of ferrohook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrohook._core import frames
from ferrohook.attach.hook_info import find_registry as find_registry
from ferrohook.attach.instrument import registry_of as registry_of

if TYPE_CHECKING:
    from torch import nn


def is_instrumented(module: nn.Module) -> bool:
    return "_ferrohook_dispatcher" in vars(module)


def instrumented(model: nn.Module) -> list[str]:
    """Names of the instrumented modules."""
    return [name for name, each in model.named_modules() if is_instrumented(each)]


def in_no_scope() -> bool:
    """True if the context's stack of scopes is empty."""
    return frames.get() == ()
