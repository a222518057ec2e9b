"""Models of the tests of analyses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.analysis import Case, Net, cases


@pytest.fixture(scope="module", params=["net", "llama", "gpt2"])
def case(request: pytest.FixtureRequest) -> Case:
    return cases(request.param)


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()
