"""Fixtures of the tests of captures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3)
