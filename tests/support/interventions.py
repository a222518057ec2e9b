"""Models of the tests of detectors and controllers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ferrohook.compat import mi_crow as fi


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, str]:
        return x + self.mlp(self.norm(x)) * scale, "cache"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class Returns(nn.Module):
    """Returns a fixed value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value


class Seen(fi.Detector):
    """Detector that appends each input and output to a list."""

    def __init__(self, hook_type: fi.HookType | str = "forward", **options: Any) -> None:
        super().__init__(hook_type, **options)
        self.seen: list[tuple[Any, Any]] = []

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:
        self.seen.append((input, output))


class Shift(fi.Controller):
    """Controller that adds 1 to the output."""

    def modify_activations(
        self, module: nn.Module, inputs: Tensor | None, output: Tensor | None
    ) -> Tensor | None:
        assert output is not None
        return output + 1


@dataclass
class Output:
    last_hidden_state: Any = None
    logits: Any = None


def double(x: Tensor) -> Tensor:
    return x * 2


def on(module: nn.Module, *hooks: fi.Hook) -> fi.Layers:
    """Registers the hooks on the module itself."""
    layers = fi.Layers(module)
    for hook in hooks:
        layers.register_hook("", hook)
    return layers


X = torch.arange(8.0).reshape(2, 4)
IDS = torch.tensor([[101, 7, 8, 102, 0], [101, 9, 102, 0, 0]])
MASK = (IDS != 0).long()


class Lm(nn.Module):
    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None
    ) -> Any:
        return Output(logits=torch.ones(2, 3, requires_grad=True), last_hidden_state=X)
