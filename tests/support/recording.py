"""Models and helpers of the tests of recording."""
# ruff: noqa: RUF012 (declarations are dicts of the class, as transformers has them)

from __future__ import annotations

import contextvars
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ferrohook.compat.transformers import capture_outputs
from support.limits import LIMIT
from support.threads import in_threads

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(x @ x.transpose(-1, -2), -1)
        return self.mix(weights @ x), weights


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.attention(x)[0])


class Model(nn.Module):
    _can_record_outputs: Any = {"hidden_states": Layer, "attentions": Attention}

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(4)

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        return {"last_hidden_state": self.norm(x)}


X = torch.linspace(-1, 1, 24).view(2, 3, 4)


def expected(model: Any, x: torch.Tensor = X) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Expected states and attentions, computed layer by layer."""
    states, attentions = [x], []
    for layer in model.layers:
        attentions.append(layer.attention(states[-1])[1])
        states.append(layer(states[-1]))
    states[-1] = model.norm(states[-1])
    return states, attentions


def same(ours: Any, theirs: Any) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@dataclasses.dataclass
class Output:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class Checkpointed(Model):
    reentrant = False

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return {"last_hidden_state": self.norm(x)}


class Looped(Model):
    """Runs its layers twice."""

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return {"last_hidden_state": self.norm(x)}


class Outer(nn.Module):
    _can_record_outputs: Any = {"hidden_states": nn.Linear}

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(2)
        self.last = nn.Linear(4, 4)

    @capture_outputs
    def forward(self, x: torch.Tensor, **flags: Any) -> dict[str, Any]:
        inner = self.inner(x, **flags)
        return {"x": self.last(inner["last_hidden_state"]), "inner": inner}


FLAGS = [
    {},
    {"output_hidden_states": True},
    {"output_attentions": True},
    {"output_hidden_states": True, "output_attentions": True},
]


def wrong_calls(model: Any, called: Any, rounds: int = 100) -> list[str]:
    """Calls of 4 threads with different flags whose outputs differ from the single calls'."""
    inputs = [X + number for number in range(4)]
    with torch.no_grad():
        right = [expected(model, x) for x in inputs]
    wrong: list[str] = []

    def run(number: int) -> None:
        for place in range(rounds):
            flags = FLAGS[(place + number) % 4]
            with torch.no_grad():
                output = called(inputs[number], **flags)
            states, attentions = right[number]
            given = output.get("hidden_states", ()), output.get("attentions", ())
            wanted = (
                states if "output_hidden_states" in flags else (),
                attentions if "output_attentions" in flags else (),
            )
            if not all(same(a, b) for a, b in zip(given, wanted, strict=True)):
                wrong.append(f"thread {number}, call {place}: {list(output)}")

    # Settings of Dynamo, as its limit of recompilations, are the context's since torch 2.15.
    contexts = [contextvars.copy_context() for _ in inputs]
    in_threads(4, lambda number: contexts[number].run(run, number))
    return wrong


def run_into(box: list[torch.Tensor], layer: nn.Module, x: torch.Tensor) -> None:
    box.append(layer(x))


class Helped(Model):
    """Runs its second layer, or all layers, on worker threads."""

    pool: ThreadPoolExecutor | None = None
    helped: tuple[int, ...] = (1,)

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for place, layer in enumerate(self.layers):
            if place not in self.helped:
                x = layer(x)
            elif self.pool is None:
                box: list[torch.Tensor] = []
                thread = threading.Thread(target=run_into, args=(box, layer, x))
                thread.start()
                thread.join(LIMIT)
                x = box[0]
            else:
                x = self.pool.submit(layer, x).result(LIMIT)
        return {"last_hidden_state": self.norm(x)}
