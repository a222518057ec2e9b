"""Hooks for PyTorch modules on a Rust core.

Names that need torch are imported on first use, so `ferrohook._core` imports without torch
installed.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING

from ferrohook._core import HookHandle as HookHandle
from ferrohook._core import __version__ as __version__
from ferrohook.errors import CaptureBudgetError as CaptureBudgetError
from ferrohook.errors import HookError as HookError
from ferrohook.errors import HookTypeError as HookTypeError
from ferrohook.errors import NeverFiredWarning as NeverFiredWarning
from ferrohook.errors import NonFiniteError as NonFiniteError
from ferrohook.errors import NotInstrumentedWarning as NotInstrumentedWarning
from ferrohook.errors import RowsError as RowsError
from ferrohook.errors import SelectionError as SelectionError
from ferrohook.errors import StaleActivationError as StaleActivationError
from ferrohook.scopes import Scope as Scope
from ferrohook.scopes import scope as scope
from ferrohook.torch_version import refuse_old_torch as _refuse_old_torch
from ferrohook.typed import BackwardHook as BackwardHook
from ferrohook.typed import ForwardHook as ForwardHook
from ferrohook.typed import ForwardPreHook as ForwardPreHook

if TYPE_CHECKING:
    from ferrohook import analysis as analysis
    from ferrohook import data as data
    from ferrohook import detectors as detectors
    from ferrohook import engines as engines
    from ferrohook import plot as plot
    from ferrohook import rows as rows
    from ferrohook.activations import ActivationCache as ActivationCache
    from ferrohook.capture_session import STOPPED as STOPPED
    from ferrohook.capture_session import capture as capture
    from ferrohook.collecting import Collected as Collected
    from ferrohook.collecting import collect as collect
    from ferrohook.groups import HandleGroup as HandleGroup
    from ferrohook.groups import register as register
    from ferrohook.groups import run as run
    from ferrohook.instrumentation import instrument as instrument
    from ferrohook.instrumentation import restore as restore
    from ferrohook.module import HookedModule as HookedModule
    from ferrohook.plans import Plan as Plan
    from ferrohook.plans import Prepared as Prepared
    from ferrohook.plans import Request as Request
    from ferrohook.plans import keep as keep
    from ferrohook.plans import on as on
    from ferrohook.profiling import profile as profile
    from ferrohook.quantity import Quantities as Quantities
    from ferrohook.quantity import Quantity as Quantity
    from ferrohook.quantity import quantities as quantities
    from ferrohook.registered import clear as clear
    from ferrohook.registered import hooks as hooks
    from ferrohook.rows import batch as batch
    from ferrohook.selection import select as select
    from ferrohook.steering import Ablate as Ablate
    from ferrohook.steering import Add as Add
    from ferrohook.steering import Clamp as Clamp
    from ferrohook.steering import Intervention as Intervention
    from ferrohook.steering import Replace as Replace
    from ferrohook.steering import Scale as Scale
    from ferrohook.steering import Zero as Zero
    from ferrohook.summaries import summary as summary
    from ferrohook.watching import nan_watch as nan_watch

_refuse_old_torch()

__all__ = [
    "STOPPED",
    "Ablate",
    "ActivationCache",
    "Add",
    "BackwardHook",
    "CaptureBudgetError",
    "Clamp",
    "Collected",
    "ForwardHook",
    "ForwardPreHook",
    "HandleGroup",
    "HookError",
    "HookHandle",
    "HookTypeError",
    "HookedModule",
    "Intervention",
    "NeverFiredWarning",
    "NonFiniteError",
    "NotInstrumentedWarning",
    "Plan",
    "Prepared",
    "Quantities",
    "Quantity",
    "Replace",
    "Request",
    "RowsError",
    "Scale",
    "Scope",
    "SelectionError",
    "StaleActivationError",
    "Zero",
    "__version__",
    "analysis",
    "batch",
    "capture",
    "clear",
    "collect",
    "data",
    "detectors",
    "engines",
    "hooks",
    "instrument",
    "keep",
    "nan_watch",
    "on",
    "plot",
    "profile",
    "quantities",
    "register",
    "restore",
    "rows",
    "run",
    "scope",
    "select",
    "summary",
]

_NEEDS_TORCH = {
    "activations": ("ActivationCache",),
    "capture_session": ("STOPPED", "capture"),
    "collecting": ("Collected", "collect"),
    "groups": ("HandleGroup", "register", "run"),
    "instrumentation": ("instrument", "restore"),
    "module": ("HookedModule",),
    "plans": ("Plan", "Prepared", "Request", "keep", "on"),
    "profiling": ("profile",),
    "quantity": ("Quantities", "Quantity", "quantities"),
    "registered": ("clear", "hooks"),
    "rows": ("batch",),
    "selection": ("select",),
    "steering": ("Ablate", "Add", "Clamp", "Intervention", "Replace", "Scale", "Zero"),
    "summaries": ("summary",),
    "watching": ("nan_watch",),
}
_MODULES = ("analysis", "data", "detectors", "engines", "plot", "rows", "service")


# A fork waits for imports on other threads: the child would wait for their locks for ever.
_IMPORTING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_IMPORTING.acquire,
        after_in_parent=_IMPORTING.release,
        after_in_child=_IMPORTING.release,
    )


def __getattr__(name: str) -> object:
    for module, names in _NEEDS_TORCH.items():
        if name in names:
            with _IMPORTING:
                value = getattr(importlib.import_module(f"ferrohook.{module}"), name)
            # Later look-ups skip this function, which takes microseconds and import locks.
            globals()[name] = value
            return value
    if name in _MODULES:
        with _IMPORTING:
            return importlib.import_module(f"ferrohook.{name}")
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
