"""Small modules that several tests hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

Module: TypeAlias = fh.HookedModule[Any]


class Tokens(nn.Sequential):
    """Takes tensors in place of token ids, so that positions apply to them."""

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = super().forward(input_ids)  # type: ignore[no-untyped-call]
        return found


class Echo(nn.Module):
    """Returns its argument, which need not be a tensor."""

    def forward(self, value: Any = None) -> Any:
        return value


class Returning(nn.Module):
    """Returns the result of a function of its arguments."""

    def __init__(self, function: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Failing(nn.Module):
    """Returns its scaled input, or raises `error`."""

    error: BaseException | None = None

    def forward(self, x: Any, *, scale: Any = 1) -> Any:
        if self.error is not None:
            raise self.error
        return x * scale


class Zero(nn.Module):
    """Parametrization with zeros."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 0


class Experts(nn.Module):
    """Four experts of width 8, of which each token takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        each = torch.einsum("pd,pkde->pke", x, self.down[ids]).tanh()
        return (each * weights[..., None]).sum(1)


LAYERS = 4


class Increment(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Chain(nn.Module):
    """Counts its layers: exact in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Increment() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
