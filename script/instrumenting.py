"""Pytest plugin: instruments each model that the tests make, with observing hooks on all modules.

A model is instrumented when its outermost constructor returns.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from typing import Any

from torch import jit, nn

import ferrohook as fh
from ferrohook import instrument  # before constructors are wrapped: its import calls a module

warnings.filterwarnings("ignore", category=fh.errors.NotInstrumentedWarning)

_constructors = threading.local()
_calls = itertools.count()
_hooked = 0


def _observe(*_: Any) -> None:
    next(_calls)


def _instrument(model: nn.Module) -> None:
    if isinstance(model, jit.ScriptModule):
        return
    instrument(model)
    for module in model.modules():
        module.register_forward_pre_hook(_observe)
        module.register_forward_hook(_observe)


def _instruments(init: Any) -> Any:
    @functools.wraps(init)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        depth = getattr(_constructors, "depth", 0)
        _constructors.depth = depth + 1
        try:
            init(self, *args, **kwargs)
        finally:
            _constructors.depth = depth
        if depth == 0:
            _instrument(self)

    return wrapper


def _wrap_constructor(cls: type) -> None:
    if "__init__" in vars(cls):
        cls.__init__ = _instruments(cls.__init__)  # type: ignore[misc]


def _wrap_all(cls: type) -> None:
    _wrap_constructor(cls)
    for subclass in cls.__subclasses__():
        _wrap_all(subclass)


def _init_subclass(cls: type, **kwargs: Any) -> None:
    super(nn.Module, cls).__init_subclass__(**kwargs)
    _wrap_constructor(cls)


_wrap_all(nn.Module)
nn.Module.__init_subclass__ = classmethod(_init_subclass)


def pytest_sessionfinish(session: Any) -> None:
    """Sends the number of hooked calls from a worker of pytest-xdist."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["hooked"] = next(_calls)


def pytest_testnodedown(node: Any) -> None:
    """Adds up the hooked calls of the workers."""
    global _hooked  # noqa: PLW0603
    _hooked += getattr(node, "workeroutput", {}).get("hooked", 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the number of hooked calls."""
    terminalreporter.write_line(f"hooked calls: {_hooked + next(_calls)}")
