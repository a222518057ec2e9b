"""nnsight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from nnsight import LanguageModel, NNsight  # pyright: ignore[reportMissingImports]

from benches.rivals.systems.base import System

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn


class NNsightSystem(System):
    """nnsight."""

    package = "nnsight"
    way = "`LanguageModel.trace` and `generate`; `NNsight` for other modules"
    caveats: ClassVar[Mapping[str, str]] = {
        "in-place": "documented: clone a value before it is changed in place",
    }

    def load(self, folder: Path) -> Any:
        """See `System`."""
        return LanguageModel(str(folder), device_map="cpu", dispatch=True)

    def logits(self, ids: Tensor) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            out = model.output.logits.save()
        return cast("Tensor", out)

    def steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            model.model.layers[layer].output = model.model.layers[layer].output + vector
            out = model.output.logits.save()
        return cast("Tensor", out)

    def captured(self, ids: Tensor, layer: int) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            out = model.model.layers[layer].output.save()
        return cast("Tensor", out)

    def kept_then_steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            out = model.model.layers[layer].output.clone().save()
            model.model.layers[layer].output[:] += vector
        return cast("Tensor", out)

    def generated(self, ids: Tensor, layer: int, vector: Tensor, tokens: int) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.generate(ids, max_new_tokens=tokens, do_sample=False):
            model.model.layers[layer].output[:, 0] += vector
            out = model.generator.output.save()
        return cast("Tensor", out)

    def failing(self, ids: Tensor, layer: int) -> None:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            _ = model.model.layers[layer].output
            raise ValueError

    def captured_of(self, module: nn.Module, name: str, x: Tensor) -> Tensor:
        """See `System`."""
        model: Any = NNsight(module)
        with torch.no_grad(), model.trace(x):
            out = getattr(model, name).output.save()
        return cast("Tensor", out)

    def steered_of(self, module: nn.Module, name: str, x: Tensor, vector: Tensor) -> Tensor:
        """See `System`."""
        model: Any = NNsight(module)
        with torch.no_grad(), model.trace(x):
            getattr(model, name).output = getattr(model, name).output + vector
            out = model.output.save()
        return cast("Tensor", out)


SYSTEM = NNsightSystem
