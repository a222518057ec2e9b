"""Models, modules and threads for the tests of hooks by name and of scopes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.hooks import PHASES
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


@pytest.fixture
def x() -> Tensor:
    return torch.ones(2, 3)


@pytest.fixture(params=["wrapped", "instrumented"])
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    plain = nn.Linear(2, 2)
    if request.param == "wrapped":
        yield fh.HookedModule(plain)
        return
    with fh.instrument(plain):
        yield plain


@pytest.fixture
def hooked() -> fh.HookedModule[nn.Identity]:
    return fh.HookedModule(nn.Identity())


@pytest.fixture(params=PHASES)
def phase(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """A worker thread that started before any scope was entered."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result(LIMIT)
        yield executor
