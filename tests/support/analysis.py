"""Models, inputs and loops by hand for the tests of analyses.

The loops use PyTorch's own hooks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from support.language_models import LAYERS, language_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH, HEADS, WORDS, TEXTS, POSITIONS = 16, 2, 32, 2, 5


class Block(nn.Module):
    """Residual block that mixes positions, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(POSITIONS, POSITIONS)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        return hidden + self.mlp(hidden), "second"


class Net(nn.Module):
    """Model of three blocks, written by hand."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = norm or nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden, _ = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Case(NamedTuple):
    """A model with two inputs and a metric."""

    model: nn.Module
    layers: str
    """Glob of its layers."""
    clean: Tensor
    corrupted: Tensor
    metric: Callable[[Any], Tensor]


def cases(kind: str) -> Case:
    """Makes the model of a kind, with weights that are not small."""
    torch.manual_seed(0)
    if kind == "net":
        model: nn.Module = Net().eval()
        layers = "blocks.*"
    else:
        model = language_model(kind, WIDTH)
        layers = f"{LAYERS[kind]}.*"
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    clean, corrupted = torch.randint(WORDS, (2, TEXTS, POSITIONS))
    return Case(model, layers, clean, corrupted, difference)


def logits_of(output: Any) -> Tensor:
    """Returns the logits of any of the models."""
    return output if isinstance(output, Tensor) else output.logits


def difference(output: Any) -> Tensor:
    """Metric: a difference of two logits of each text."""
    logits = logits_of(output)
    return logits[:, -1, 3] - logits[:, -1, 5]


def modules(model: nn.Module, glob: str) -> dict[str, nn.Module]:
    """Returns the layers by name: all whose name is the prefix and a number."""
    prefix = glob.removesuffix("*")
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    }


@contextmanager
def changed(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Changes the first tensor of a module's output, by PyTorch's hook."""

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        return (change(output[0]), *output[1:])

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def output_of(module: nn.Module, model: nn.Module, ids: Tensor) -> Tensor:
    """Returns the first tensor of a module's output in a call of the model."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor.clone())
        return tensor

    with torch.no_grad(), changed(module, keep):
        model(ids)
    return found[0]
