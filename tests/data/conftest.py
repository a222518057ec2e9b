"""Fixtures of the tests of stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ferrohook.data import LocalStore, MemoryStore, Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store")
    with made:
        yield made
