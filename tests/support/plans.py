"""Formulas of interventions in torch, written by hand, and models that plans are tested on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable


def unit(direction: Tensor, x: Tensor) -> Tensor:
    """Direction of unit length, in the dtype of `x`."""
    exact = direction
    if direction.dtype not in {torch.float64, torch.complex128}:
        exact = direction.to(torch.complex64 if direction.is_complex() else torch.float32)
    return (exact / exact.norm()).to(x.dtype)


def by_hand(intervention: Any, x: Tensor) -> Tensor:
    """Formula of an intervention."""
    if isinstance(intervention, fh.Add):
        vector, scale = intervention.values
        return x + (vector * scale).to(x.dtype)
    if isinstance(intervention, fh.Scale):
        return x * intervention.values[0]
    if isinstance(intervention, fh.Replace):
        return intervention.values[0].to(x.dtype).expand(x.shape).clone()
    if isinstance(intervention, fh.Zero):
        return torch.zeros_like(x)
    d = unit(intervention.values[0], x)
    along = (x * d.conj()).sum(-1, keepdim=True)
    if isinstance(intervention, fh.Ablate):
        return x - along * d
    _, low, high = intervention.values
    return x + (along.clamp(low, high) - along) * d


def part_by_hand(intervention: Any, value: Any) -> Any:
    """Changes the part of a tensor or tuple that `output_index` names."""
    part = intervention.output_index
    if part is None:
        return by_hand(intervention, value)
    if part == "sum":
        hidden, residual = value
        if isinstance(intervention, fh.Add):
            return by_hand(intervention, hidden), residual
        return by_hand(intervention, hidden + residual) - residual, residual
    items = list(value)
    items[part] = by_hand(intervention, items[part])
    return tuple(items)


def forward_hook(intervention: Any) -> Callable[..., Any]:
    """The intervention as a forward hook of PyTorch's contract."""
    return lambda _module, _args, output: part_by_hand(intervention, output)


def pre_hook(intervention: Any) -> Callable[..., Any]:
    """The intervention as a pre-forward hook of PyTorch's contract."""
    return lambda _module, args: (by_hand(intervention, args[0]), *args[1:])


class Block(nn.Module):
    """Returns a hidden state and the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


class Net(nn.Module):
    """Blocks that return pairs, and an activation function that runs twice."""

    def __init__(self, width: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.act = nn.Tanh()
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.embed(x))
        for block in self.blocks:
            hidden, residual = block(x)
            x = hidden + residual
        return self.head(self.act(x))


class Tokens(nn.Module):
    """A model that takes token ids."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.head = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask  # tells the positions alone
        return self.head(self.embed(input_ids))


class Unit(fh.Intervention):
    """Scales rows to a length: the derivative of a row of zeros is NaN."""

    vector_field = None
    number_fields = ("length",)

    @staticmethod
    def formula(x: Tensor, length: Any) -> Tensor:
        scaled: Tensor = x / x.norm(dim=-1, keepdim=True) * length
        return scaled
