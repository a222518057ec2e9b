"""Hooks for PyTorch modules on a Rust core.

The public names stand in `__init__.pyi`, which type checkers read. Each is imported on first use,
so `ferrohook._core` imports without torch installed.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from pathlib import Path

from ferrohook.util.torch_version import refuse_old_torch as _refuse_old_torch

_refuse_old_torch()

_IMPORT = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in _IMPORT.findall(_STUB)}

# Type checkers read the stub instead.
__all__ = sorted(_MODULES)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


# A fork waits for imports on other threads: the child would wait for their locks for ever.
_IMPORTING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_IMPORTING.acquire,
        after_in_parent=_IMPORTING.release,
        after_in_child=_IMPORTING.release,
    )


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    with _IMPORTING:
        if _MODULES[name] == __name__:
            return importlib.import_module(f"ferrohook.{name}")
        value: object = getattr(importlib.import_module(_MODULES[name]), name)
    # Later look-ups skip this function, which takes microseconds and import locks.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
