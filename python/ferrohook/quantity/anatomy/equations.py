"""Equations between tensors: their multipliers, solved for, and the proof that they hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDINGS: Final = 4
"""Roundings of the terms: the two sides of an equation may differ by them."""
STORED: Final = 8
"""Roundings to the dtype in which tensors are kept: two computations may differ by them."""
SUMMED: Final = 128
"""Roundings of the sums inside kernels: two computations may differ by them."""
SIGNIFICANT: Final = 8
"""Least size of a term in such differences: a smaller one could be left out, or be another one."""
LEAST_ELEMENTS: Final = 24
"""Elements in which a term has to be significant; of a smaller tensor, half of them."""


class Fit(NamedTuple):
    """Multipliers of the terms of a sum, and how well it equals another tensor."""

    multipliers: tuple[float, ...]
    residual: float
    """Largest difference of the two sides, relative to the largest element."""
    equal: bool
    """True if each element is right up to the rounding of the terms."""
    holds: bool
    """True if, moreover, no term is as small as the rounding."""


def rounding(*tensors: Tensor) -> float:
    """Returns the relative rounding error of the coarsest dtype among the tensors."""
    return max(torch.finfo(each.dtype).eps for each in tensors) / 2


def tolerance(*tensors: Tensor) -> float:
    """Returns the difference of two computations of a tensor that rounding explains.

    Relative to the largest element. Both round a few times to the coarsest dtype among the tensors;
    kernels add up products in float32, in any order, where that is no finer than the dtype.
    """
    eps = rounding(*tensors)
    summed = min(eps, torch.finfo(torch.float32).eps / 2)
    return STORED * eps + SUMMED * summed


def differ(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference, relative to the largest element of `one`.

    Infinite for tensors of other sizes, or with NaN.
    """
    if one.numel() != other.numel():
        return torch.inf
    left, right = (each.detach().double().reshape(-1) for each in (one, other))
    difference = float((left - right).abs().max()) / (float(left.abs().max()) or 1.0)
    return difference if difference >= 0 else torch.inf


def fit(total: Tensor, terms: Sequence[Tensor], fixed: Sequence[float | None] = ()) -> Fit:
    """Fits `total = sum(multiplier * term)` and checks it element by element.

    Args:
        total: a tensor.
        terms: tensors of as many elements, or that broadcast to it.
        fixed: multipliers; None, and any that is left out, is solved for. One that may be 1
            as well, or -1, is.
    """
    eps = rounding(total, *terms)
    left = total.double().reshape(-1)
    columns = [_like(total, each) for each in terms]
    known = [*fixed, *[None] * (len(terms) - len(fixed))]
    solved = _solved(left, columns, known)
    found = _checked(left, columns, solved, eps)
    for place, factor in enumerate(known):
        if factor is None and found.equal:
            solved[place] = math.copysign(1.0, solved[place])
            rounded = _checked(left, columns, solved, eps)
            found = rounded if rounded.equal and rounded.holds >= found.holds else found
            solved = [*found.multipliers]
    return found


def _checked(left: Tensor, columns: Sequence[Tensor], solved: Sequence[float], eps: float) -> Fit:
    parts = [factor * column for factor, column in zip(solved, columns, strict=True)]
    right = torch.stack(parts).sum(0)
    error = (left - right).abs()
    sizes = torch.stack(parts).abs().sum(0) + left.abs()
    bound = ROUNDINGS * eps * sizes
    largest = float(left.abs().max()) or 1.0
    finite = bool(right.isfinite().all()) and bool(left.isfinite().all())
    needed = min(LEAST_ELEMENTS, max(1, left.numel() // 2))
    significant = all(int((part.abs() > SIGNIFICANT * bound).sum()) >= needed for part in parts)
    equal = finite and bool((error <= bound).all())
    return Fit(tuple(solved), float(error.max()) / largest, equal, equal and significant)


def _like(total: Tensor, term: Tensor) -> Tensor:
    if term.numel() == total.numel():
        return term.double().reshape(-1)
    return term.double().expand_as(total).reshape(-1)


def _solved(left: Tensor, columns: Sequence[Tensor], known: Sequence[float | None]) -> list[float]:
    """Solves for the unknown multipliers by least squares, in which each element counts alike."""
    free = [place for place, factor in enumerate(known) if factor is None]
    rest = left.clone()
    for factor, column in zip(known, columns, strict=True):
        if factor is not None:
            rest -= factor * column
    found: list[float] = []
    if free:
        weights = _inverse(torch.stack([left, *columns]).abs().sum(0))
        matrix = torch.stack([columns[place] for place in free]) * weights
        rest *= weights
        gram = matrix @ matrix.T
        try:
            factors = torch.linalg.solve(gram, matrix @ rest)
            factors += torch.linalg.solve(gram, matrix @ (rest - factors @ matrix))  # its roundings
            found = factors.tolist()
        except RuntimeError:  # linearly dependent
            found = [0.0] * len(free)
    unknown = iter(found)
    return [next(unknown) if factor is None else factor for factor in known]


def _inverse(sizes: Tensor) -> Tensor:
    """Returns the weights of elements of some sizes in least squares: errors are relative to each.

    A few elements of a stream, the *massive activations* of its first tokens, are thousands of
    times larger than the others, and their roundings larger than what a sublayer adds to those.
    """
    return torch.where(sizes > 0, 1 / sizes, 0)


class Terms:
    """Tensors of as many elements each, among which sums are searched for.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.eps = rounding(*tensors)
        rows = torch.stack([each.double().reshape(-1) for each in tensors])
        rows *= _inverse(rows.abs().amax(0))
        self._gram = rows @ rows.T

    def twos(self, total: int, start: int | None) -> list[tuple[float, int, int]]:
        """Finds v and w such that `total = start + c v + d w`; v stands before w.

        Args:
            total: place of the sum.
            start: place of the term with a multiplier of 1; None for none.

        Returns:
            Triples of residual, v and w, best first.
        """
        left, size = self._left(total, start)
        limit = self._limit(size, total)
        places = (left <= limit).nonzero().tolist()
        ranked = sorted((float(left[a, b] / size.clamp(min=1e-300)), a, b) for a, b in places)
        return [each for each in ranked if not {total, start} & {*each[1:]}]

    def _left(self, total: int, start: int | None) -> tuple[Tensor, Tensor]:
        """Returns squared residuals of the sums with each pair, and their size without any."""
        gram = self._gram
        along = gram[total] - (0 if start is None else gram[start])
        size = along[total] - (0 if start is None else along[start])
        norms = gram.diagonal()
        determinant = norms[:, None] * norms[None, :] - gram.square()
        fine = determinant > 1e-9 * norms[:, None] * norms[None, :]
        first = along[:, None] * norms[None, :] - along[None, :] * gram
        second = along[None, :] * norms[:, None] - along[:, None] * gram
        explained = (first * along[:, None] + second * along[None, :]) / determinant.where(
            fine, torch.ones_like(determinant)
        )
        left = (size - explained).where(fine, size)
        return left.where(torch.ones_like(left).triu(1) > 0, size), size

    def nearest(self, total: int, start: int) -> float:
        """Returns the least residual of `total = start + c v + d w` among all pairs v and w."""
        left, _ = self._left(total, start)
        left[[total, start], :] = left[:, [total, start]] = torch.inf
        one, other = divmod(int(left.argmin()), len(left))
        if not bool(left[one, other].isfinite()):
            return fit(self.tensors[total], [self.tensors[start]], (1.0,)).residual
        terms = [self.tensors[place] for place in (start, one, other)]
        return fit(self.tensors[total], terms, (1.0,)).residual

    def _limit(self, size: Tensor, total: int) -> Tensor:
        """Returns the squared residual that rounding explains; generous, as `fit` decides."""
        noise = self._gram[total, total] * (2 * self.eps) ** 2 + size * 1e-12
        return torch.minimum(noise * 4, size * 0.01)
