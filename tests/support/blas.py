"""Simulates the BLAS of another machine, for `pytest --other-blas`.

Matrix products round differently for each shape, like kernels selected by shape. Runs of the same
shapes stay bit-equal; a test that relies on more than that fails.
"""

from __future__ import annotations

import warnings
import zlib

import numpy as np
import torch

_library = torch.library.Library("aten", "IMPL")
_COARSE = 2.0**12
"""Products that are multiples of 1 / _COARSE count as exact in any order of summation."""


def _rounded(product: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    if not product.is_floating_point():
        return product
    shapes = repr([each.shape for each in factors]).encode()
    error = (zlib.crc32(shapes) % 7 - 3) * torch.finfo(product.dtype).eps
    inexact = (product * _COARSE).frac() != 0
    return torch.where(inexact, product * (1 + error), product)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[-1] != b.shape[-2]:
        msg = f"mat1 and mat2 shapes cannot be multiplied ({a.shape} and {b.shape})"
        raise RuntimeError(msg)
    if a.is_complex() or not a.is_floating_point():
        product = (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2, dtype=a.dtype)
    else:
        wide = torch.promote_types(a.dtype, torch.float32)
        with np.errstate(all="ignore"):  # numpy warns about infinities
            found = a.detach().to(wide).numpy() @ b.detach().to(wide).numpy()
        product = torch.from_numpy(found).to(a.dtype)
    return _rounded(product, a, b)


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return beta * bias + alpha * _product(a, b)


with warnings.catch_warnings(action="ignore"):  # torch warns about replaced kernels
    for _name, _kernel in {
        "mm": _product,
        "bmm": _product,
        "addmm": _addmm,
        "baddbmm": _addmm,
    }.items():
        # Dynamo would replace them by its translation of numpy.
        _library.impl(_name, torch.compiler.disable(_kernel), "CPU")
