"""Waits of the host for the emulated GPU."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

_SILENT = (str(Path(__file__).parent), "/torch/", "/contextlib.py", "/_pytest/", "/pluggy/")
"""Parts of file names whose frames say nothing about who waits."""


class Wait(NamedTuple):
    """One wait of the host."""

    what: str
    """Operator or function that waits."""
    lines: tuple[str, ...]
    """`file:line` of its callers, the innermost first."""

    def __str__(self) -> str:
        return f"{self.what} at {' < '.join(self.lines[:3])}"


class Waits:
    """Waits since the device was opened.

    `mode` is the one of `torch.cuda.set_sync_debug_mode`: with `error` the next wait raises, with
    `warn` it warns. As there, waits for a stream, an event or the device are allowed.
    """

    def __init__(self) -> None:
        self.seen: list[Wait] = []
        self.mode = "default"

    def note(self, what: str, *, hidden: bool) -> None:
        """Adds a wait; a `hidden` one comes from an operator, not from an explicit call."""
        frames = [
            f"{frame.filename}:{frame.lineno}"
            for frame in reversed(traceback.extract_stack())
            if not any(part in frame.filename for part in _SILENT)
        ]
        wait = Wait(what, tuple(frames))
        self.seen.append(wait)
        if hidden and self.mode != "default":
            msg = f"called a synchronizing CUDA operation: {wait}"
            if self.mode == "error":
                raise RuntimeError(msg)
            warnings.warn(msg, stacklevel=2)
