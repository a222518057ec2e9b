"""Vectors of several dimensions broadcast to a value, never the value to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ferrohook as fh


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 1), (3, 4), (3, 1), (1, 1, 4), (2, 3, 4)])
@pytest.mark.parametrize("kind", [fh.Add, fh.Replace])
def test_a_vector_broadcasts_to_the_value(kind: type, shape: tuple[int, ...]) -> None:
    x, vector = torch.randn(2, 3, 4), torch.randn(shape)
    plan = fh.Plan(fh.on("", kind(vector)))
    with plan.prepare(model := nn.Identity()) as prepared:
        for _ in range(2):  # cast, then found
            with prepared.open():
                expected = (x if kind is fh.Add else torch.zeros(2, 3, 4)) + vector
                assert torch.equal(model(x), expected)


@pytest.mark.parametrize("shape", [(9, 1, 1, 1), (1, 2, 3, 4), (5, 1, 1), (2, 4), (5, 4)])
@pytest.mark.parametrize("kind", [fh.Add, fh.Replace])
def test_a_value_does_not_broadcast_to_the_vector(kind: type, shape: tuple[int, ...]) -> None:
    plan = fh.Plan(fh.on("", kind(torch.randn(shape))))
    with plan.prepare(model := nn.Identity()) as prepared:
        for _ in range(2):
            with (
                pytest.raises(
                    fh.HookTypeError, match=r"does not broadcast to .* of shape \[2, 3, 4\]"
                ),
                prepared.open(),
            ):
                model(torch.randn(2, 3, 4))
