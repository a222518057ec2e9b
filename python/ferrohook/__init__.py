"""Hooks for PyTorch modules on a Rust core.

The names are imported when they are first used, so that `ferrohook._core` can be imported where
torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ferrohook._core import HookHandle as HookHandle
from ferrohook._core import __version__ as __version__
from ferrohook.errors import HookError as HookError
from ferrohook.errors import HookTypeError as HookTypeError
from ferrohook.typed import BackwardHook as BackwardHook
from ferrohook.typed import ForwardHook as ForwardHook
from ferrohook.typed import ForwardPreHook as ForwardPreHook

if TYPE_CHECKING:
    from ferrohook.module import HookedModule as HookedModule

__all__ = [
    "BackwardHook",
    "ForwardHook",
    "ForwardPreHook",
    "HookError",
    "HookHandle",
    "HookTypeError",
    "HookedModule",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "HookedModule":
        found = importlib.import_module("ferrohook.module").HookedModule
        # Found without this function from now on: it takes microseconds and import locks.
        globals()[name] = found
        return found
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
