"""Helpers of the tests of scopes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def call(module: nn.Module) -> None:
    """Calls a module and runs backward: all four phases."""
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()


class Counting:
    """A hook that counts its calls and supports weak references."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1
