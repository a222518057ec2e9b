"""Memory of the process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident() -> int:
    """Resident memory of the process in bytes, Rust's included."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
