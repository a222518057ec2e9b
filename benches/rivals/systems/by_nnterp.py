"""nnterp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from nnterp import StandardizedTransformer  # pyright: ignore[reportMissingImports]

from benches.rivals.systems.base import System

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


class Nnterp(System):
    """nnterp."""

    package = "nnterp"
    way = (
        "`StandardizedTransformer.trace`, `steer` and its accessors; with nnsight 0.7, as it does "
        "not import with 0.8"
    )
    caveats: ClassVar[Mapping[str, str]] = {
        "contributions": "its accessors are the modules' outputs, before Gemma 2's and "
        "OLMo 2's norms",
        "kept-then-steered": "`steer` changes in place; nnsight's documentation says to clone the "
        "value before",
    }

    def load(self, folder: Path) -> Any:
        """See `System`."""
        return StandardizedTransformer(str(folder), device_map="cpu")

    def logits(self, ids: Tensor) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            out = model.logits.save()
        return cast("Tensor", out)

    def steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            model.steer(layers=layer, steering_vector=vector)
            out = model.logits.save()
        return cast("Tensor", out)

    def captured(self, ids: Tensor, layer: int) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            out = model.layers_output[layer].save()
        return cast("Tensor", out)

    def kept_then_steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            out = model.layers_output[layer].save()
            model.steer(layers=layer, steering_vector=vector)
        return cast("Tensor", out)

    def generated(self, ids: Tensor, layer: int, vector: Tensor, tokens: int) -> Tensor:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.generate(ids, max_new_tokens=tokens, do_sample=False):
            model.steer(layers=layer, steering_vector=vector, token_positions=0)
            out = model.generator.output.save()
        return cast("Tensor", out)

    def failing(self, ids: Tensor, layer: int) -> None:
        """See `System`."""
        model = self.model
        with torch.no_grad(), model.trace(ids):
            _ = model.layers_output[layer]
            raise ValueError

    def contributions(self, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """See `System`."""
        model, found = self.model, []
        for layer in range(model.num_layers):
            with torch.no_grad(), model.trace(ids):
                before = model.layers_input[layer].clone().save()
                attention = model.attentions_output[layer].clone().save()
                mlp = model.mlps_output[layer].clone().save()
                behind = model.layers_output[layer].clone().save()
            found.append((before, attention, mlp, behind))
        return found


SYSTEM = Nnterp
