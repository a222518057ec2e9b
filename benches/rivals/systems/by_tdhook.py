"""tdhook."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tdhook.latent import ActivationCaching, SteeringVectors  # pyright: ignore[reportMissingImports]
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
from torch import nn

from benches.rivals.models import load
from benches.rivals.systems.base import System

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor


class Logits(nn.Module):
    """A language model that returns a tensor, as TensorDict takes it."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        result: Tensor = self.inside(x).logits
        return result


class Tdhook(System):
    """tdhook."""

    package = "tdhook"
    way = "`SteeringVectors` and `ActivationCaching`, prepared for each request"
    caveats: ClassVar[Mapping[str, str]] = {
        "threads": "its hooks are PyTorch's, on the shared model",
        "threads-capture": "its hooks are PyTorch's, on the shared model",
        "compiled": "its hooks are PyTorch's, and so is the setting that avoids it",
        "in-place": "a cache keeps the tensor itself; `HookSession.capture` clones",
        "generated-position": "a hook gets the tensor of a step",
        "never-runs": "a hook that does not fire raises no error or warning",
    }

    def load(self, folder: Path) -> Any:
        """See `System`."""
        return Logits(load(folder))

    def logits(self, ids: Tensor) -> Tensor:
        """See `System`."""
        result: Tensor = self.model(ids)
        return result

    def _steered(self, model: nn.Module, name: str, x: Tensor, change: Any) -> Tensor:
        def steer(module_key: str, output: Tensor) -> Tensor:  # noqa: ARG001 (its contract)
            made: Tensor = change(output)
            return made

        with SteeringVectors([name], steer).prepare(model) as hooked:
            result: Tensor = hooked(TensorDict(input=x, batch_size=len(x)))["output"]
        return result

    def _captured(self, model: nn.Module, name: str, x: Tensor) -> Tensor:
        pattern = f"{re.escape(name)}$"  # else all modules inside as well
        with ActivationCaching(pattern).prepare(model) as hooked:
            found = hooked(TensorDict(input=x, batch_size=len(x)))
        result: Tensor = found["cache", name]
        return result

    def steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        return self._steered(self.model, _name(layer), ids, lambda y: y + vector)

    def captured(self, ids: Tensor, layer: int) -> Tensor:
        """See `System`."""
        return self._captured(self.model, _name(layer), ids)

    def kept_then_steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        kept: list[Tensor] = []

        def change(y: Tensor) -> Tensor:
            kept.append(y)
            return y + vector

        self._steered(self.model, _name(layer), ids, change)
        return kept[0]

    def generated(self, ids: Tensor, layer: int, vector: Tensor, tokens: int) -> Tensor:
        """See `System`."""

        def change(module_key: str, output: Tensor) -> Tensor:  # noqa: ARG001 (its contract)
            output = output.clone()
            output[:, 0] += vector
            return output

        with SteeringVectors([_name(layer)], change).prepare(self.model):
            model: Any = self.model.inside
            result: Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return result

    def failing(self, ids: Tensor, layer: int) -> None:
        """See `System`."""

        def change(_y: Tensor) -> Tensor:
            raise ValueError

        self._steered(self.model, _name(layer), ids, change)

    def steered_compiled(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        compiled: Any = torch.compile(self.model, backend="eager")
        compiled(ids)

        def change(module_key: str, output: Tensor) -> Tensor:  # noqa: ARG001 (its contract)
            return output + vector

        with SteeringVectors([_name(layer)], change).prepare(self.model):
            result: Tensor = compiled(ids)
        return result

    def standing(self, layer: int, hook: Callable[[], None]) -> Callable[[], None]:
        """See `System`."""

        def observe(module_key: str, output: Tensor) -> Tensor:  # noqa: ARG001 (its contract)
            hook()
            return output

        context = SteeringVectors([_name(layer)], observe).prepare(self.model)
        context.__enter__()
        return lambda: context.__exit__(None, None, None)

    def captured_of(self, module: nn.Module, name: str, x: Tensor) -> Tensor:
        """See `System`."""
        return self._captured(module, name, x)

    def steered_of(self, module: nn.Module, name: str, x: Tensor, vector: Tensor) -> Tensor:
        """See `System`."""
        return self._steered(module, name, x, lambda y: y + vector)


def _name(layer: int) -> str:
    return f"inside.model.layers.{layer}"


SYSTEM = Tdhook
