"""Fixtures of the tests of hook points."""

from __future__ import annotations

import pytest
import torch

from support.points import BATCH, POS, WIDTH, Model


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, POS, WIDTH)
