"""Helpers of the tests of threads."""

from __future__ import annotations

import faulthandler
import gc
from typing import TYPE_CHECKING

import pytest

from support.threads import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    # A deadlock in native code may hold the GIL, and then nothing written in Python ends it.
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def _collect_cheaply() -> Iterator[None]:
    """Leaves what lives already (all of torch) out of the collections of a test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
