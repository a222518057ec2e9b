"""Helpers of the tests of lifetimes."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import nn

import ferrohook as fh

Module: TypeAlias = fh.HookedModule[Any]


class Echo(nn.Module):
    def forward(self, value: Any = None) -> Any:
        return value
