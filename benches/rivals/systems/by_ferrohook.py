"""ferrohook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
from benches.rivals.systems.base import System

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


class Ferrohook(System):
    """ferrohook."""

    package = "ferrohook"
    way = "`fh.run` with hooks, a plan or quantities; `fh.register` for hooks that outlive a call"

    def logits(self, ids: Tensor) -> Tensor:
        """See `System`."""
        result: Tensor = self.model(ids).logits
        return result

    def steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        hooks: Any = {f"model.layers.{layer}": fh.Add(vector)}
        result: Tensor = fh.run(self.model, ids, hooks=hooks).output.logits
        return result

    def captured(self, ids: Tensor, layer: int) -> Tensor:
        """See `System`."""
        name = f"model.layers.{layer}"
        _, acts = fh.run(self.model, ids, capture=name)
        result: Tensor = acts[name]
        return result

    def kept_then_steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        name = f"model.layers.{layer}"
        plan = fh.Plan(fh.keep(name), fh.on(name, fh.Add(vector)))
        _, acts = fh.run(self.model, ids, plan=plan)
        result: Tensor = acts[name]
        return result

    def generated(self, ids: Tensor, layer: int, vector: Tensor, tokens: int) -> Tensor:
        """See `System`."""
        plan = fh.Plan(fh.on(f"model.layers.{layer}", fh.Add(vector), at=0))
        with plan.prepare(self.model) as prepared, fh.rows.generating([prepared.open()]):
            options = {"max_new_tokens": tokens, "do_sample": False}
            result: Tensor = self.model.generate(ids, attention_mask=ids > -1, **options)
        return result

    def failing(self, ids: Tensor, layer: int) -> None:
        """See `System`."""

        def hook(*_args: object) -> None:
            raise ValueError

        fh.run(self.model, ids, hooks={f"model.layers.{layer}": hook})

    def contributions(self, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """See `System`."""
        names = ("resid_pre", "attn_out", "mlp_out", "resid_post")
        _, acts = fh.run(self.model, ids, capture=[f"@{name}.*" for name in names])
        layers = range(self.model.config.num_hidden_layers)
        pre, attn, mlp, post = ([acts[f"@{name}.{layer}"] for layer in layers] for name in names)
        return [*zip(pre, attn, mlp, post, strict=True)]

    def steered_compiled(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        compiled: Any = torch.compile(self.model, backend="eager")
        compiled(ids)
        with fh.register(self.model, f"model.layers.{layer}", fh.Add(vector)):
            result: Tensor = compiled(ids).logits
        return result

    def standing(self, layer: int, hook: Callable[[], None]) -> Callable[[], None]:
        """See `System`."""
        return fh.register(self.model, f"model.layers.{layer}", lambda *_args: hook()).remove

    def captured_of(self, module: nn.Module, name: str, x: Tensor) -> Tensor:
        """See `System`."""
        _, acts = fh.run(module, x, capture=name)
        result: Tensor = acts[name]
        return result

    def steered_of(self, module: nn.Module, name: str, x: Tensor, vector: Tensor) -> Tensor:
        """See `System`."""
        hooks: Any = {name: fh.Add(vector)}
        result: Tensor = fh.run(module, x, hooks=hooks).output
        return result


SYSTEM = Ferrohook
