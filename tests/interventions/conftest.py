"""Models and fixtures of the tests of detectors and controllers."""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING

import pytest

from support.interventions import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
