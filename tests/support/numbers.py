"""Closeness of results computed by other kernels, or by sums in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def close(found: Tensor, expected: Tensor) -> bool:
    """Compares with a tolerance of 100 roundings of the largest value, as sums may cancel."""
    roundings = 100 * torch.finfo(expected.dtype).eps
    largest = expected.detach().abs().max().item()
    return torch.allclose(found, expected, rtol=roundings, atol=roundings * largest)
