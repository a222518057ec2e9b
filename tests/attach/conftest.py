"""Fixtures of the tests of wrapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.wrapping import CASES

if TYPE_CHECKING:
    from torch import nn


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Any, ...]]:
    make, arguments = CASES[request.param]
    return make(), arguments()
