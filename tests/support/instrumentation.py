"""Models of the tests of instrumenting."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable


Log = list[Any]


def x() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(2, 3, 4)


def small() -> nn.Sequential:
    return nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.ReLU()))


def logging(log: Log, name: str) -> Callable[..., None]:
    return lambda *_: log.append(name)


def state_of(module: nn.Module) -> list[Any]:
    """State that `restore` restores: class, ordered attributes and hooks of each module."""
    return [
        (name, type(each), list(vars(each).items()), {k: list(v) for k, v in hook_dicts(each)})
        for name, each in module.named_modules(remove_duplicate=False)
    ]


def hook_dicts(module: nn.Module) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in vars(module).items() if "hooks" in key and value]


def call(module: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    if not arguments:
        return []
    torch.manual_seed(1)
    output = module(*arguments)
    flat, _ = torch.utils._pytree.tree_flatten(output)
    return flat


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Slotted(nn.Linear):
    __slots__ = ("gain",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.gain


def torch_script(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings(
        action="ignore"
    ):  # torch warns that these functions are deprecated
        return torch.jit.script(module)
