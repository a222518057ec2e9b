"""Fixtures of the tests of errors."""

from __future__ import annotations

import pytest

import ferrohook as fh
from support.hooks import PHASES
from support.modules import Failing


@pytest.fixture
def hooked() -> fh.HookedModule[Failing]:
    return fh.HookedModule(Failing())


@pytest.fixture(params=PHASES)
def phase(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(params=[ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def error(request: pytest.FixtureRequest) -> BaseException:
    made = request.param("the original")
    assert isinstance(made, BaseException)
    return made
