"""Models of the tests of hook points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ferrohook.compat.transformer_lens import HookedRootModule, HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable


CALLS = 200
THREADS = 4
BATCH, POS, WIDTH = 2, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hook_mid = HookPoint()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hook_mid(self.linear(x)).relu()


class Model(HookedRootModule):
    """A few layers with hook points before, inside and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.hook_out = HookPoint()
        self.setup()

    def forward(self, x: torch.Tensor, *, fail: bool = False) -> torch.Tensor:
        x = self.hook_embed(x)
        for block in self.blocks:
            x = block(x)
        if fail:
            msg = "the model failed"
            raise ArithmeticError(msg)
        return self.hook_out(x).sum()


NAMES = ["hook_embed", "blocks.0.hook_mid", "blocks.1.hook_mid", "hook_out"]
MID = "blocks.0.hook_mid"


def zero(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return torch.zeros_like(tensor)


def observe(tensor: torch.Tensor, hook: Any) -> None:
    pass


def adding(value: float) -> Callable[..., torch.Tensor]:
    return lambda tensor, hook: tensor + value


def noting(log: list[Any], word: Any) -> Callable[..., None]:
    def note(tensor: Any, hook: Any) -> None:
        log.append(word)

    return note


class Transposed:
    """A conversion that swaps the last two dimensions."""

    def convert(self, value: torch.Tensor) -> torch.Tensor:
        return value.transpose(-1, -2)

    def revert(self, value: torch.Tensor) -> torch.Tensor:
        return value.transpose(-1, -2)


def compiled_for(model: Any, x: torch.Tensor) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model, fullgraph=True, backend="eager")
    try:
        compiled(x)
    except RuntimeError as error:  # Dynamo does not support this Python
        pytest.skip(str(error))
    return compiled
