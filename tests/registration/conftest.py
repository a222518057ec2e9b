"""A model for the tests of functions that take whole models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


@pytest.fixture
def x() -> Tensor:
    return torch.ones(2, 3)
