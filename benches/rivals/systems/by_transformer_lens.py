"""TransformerLens: its bridge over models of transformers, and hook points in modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformer_lens import HookedRootModule  # pyright: ignore[reportMissingImports]
from transformer_lens.hook_points import HookPoint  # pyright: ignore[reportMissingImports]
from transformer_lens.model_bridge import TransformerBridge  # pyright: ignore[reportMissingImports]

from benches.rivals.systems.base import System

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor


class Pointed(HookedRootModule):  # type: ignore[misc]  # untyped here
    """A module with a hook point after each of its modules, as users write them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module
        for name, child in [*module.named_children()]:
            setattr(module, name, nn.Sequential(child, HookPoint()))
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        result: Tensor = self.inside(x)
        return result


class TransformerLens(System):
    """TransformerLens."""

    package = "transformer-lens"
    way = (
        "`TransformerBridge.boot_transformers`, `hooks`, `run_with_cache`, `add_hook`; "
        "`HookedRootModule` for other modules"
    )
    caveats: ClassVar[Mapping[str, str]] = {
        "threads": "its hooks are PyTorch's, on the shared model",
        "threads-capture": "its hooks are PyTorch's, on the shared model",
        "in-place": "a cache detaches and does not copy",
        "generated-position": "a hook gets the tensor of a step; `use_past_kv_cache=False` runs "
        "all positions in each step",
        "never-runs": "a hook point that is never called raises no error or warning",
    }

    def load(self, folder: Path) -> Any:
        """See `System`."""
        return TransformerBridge.boot_transformers(str(folder), device="cpu")

    def logits(self, ids: Tensor) -> Tensor:
        """See `System`."""
        with torch.no_grad():
            result: Tensor = self.model(ids)
        return result

    def steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""

        def hook(x: Tensor, hook: object) -> Tensor:  # noqa: ARG001 (its contract)
            return x + vector

        with torch.no_grad():
            result: Tensor = self.model.run_with_hooks(
                ids, fwd_hooks=[(f"blocks.{layer}.hook_resid_post", hook)]
            )
        return result

    def captured(self, ids: Tensor, layer: int) -> Tensor:
        """See `System`."""
        with torch.no_grad():
            _, cache = self.model.run_with_cache(ids)
        result: Tensor = cache[f"blocks.{layer}.hook_resid_post"]
        return result

    def kept_then_steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        name = f"blocks.{layer}.hook_resid_post"
        kept: list[Tensor] = []

        def keep(x: Tensor, hook: object) -> None:  # noqa: ARG001 (its contract)
            kept.append(x)

        def steer(x: Tensor, hook: object) -> Tensor:  # noqa: ARG001 (its contract)
            return x + vector

        with torch.no_grad():
            self.model.run_with_hooks(ids, fwd_hooks=[(name, keep), (name, steer)])
        return kept[0]

    def generated(self, ids: Tensor, layer: int, vector: Tensor, tokens: int) -> Tensor:
        """See `System`."""

        def hook(x: Tensor, hook: object) -> Tensor:  # noqa: ARG001 (its contract)
            x = x.clone()
            x[:, 0] += vector
            return x

        with self.model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_resid_post", hook)]):
            result: Tensor = self.model.generate(
                ids, max_new_tokens=tokens, do_sample=False, verbose=False, return_type="tokens"
            )
        return result

    def failing(self, ids: Tensor, layer: int) -> None:
        """See `System`."""

        def hook(x: Tensor, hook: object) -> None:  # noqa: ARG001 (its contract)
            raise ValueError

        self.model.run_with_hooks(ids, fwd_hooks=[(f"blocks.{layer}.hook_resid_post", hook)])

    def contributions(self, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """See `System`."""
        with torch.no_grad():
            _, cache = self.model.run_with_cache(ids)
        names = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")
        layers = range(self.model.cfg.n_layers)
        return [tuple(cache[f"blocks.{layer}.{name}"] for name in names) for layer in layers]

    def standing(self, layer: int, hook: Callable[[], None]) -> Callable[[], None]:
        """See `System`."""

        def observe(x: Tensor, hook: Any) -> None:  # noqa: ARG001 (its contract)
            called()

        called = hook
        point = self.model.hook_dict[f"blocks.{layer}.hook_out"]
        before = [*point.fwd_hooks]
        point.add_hook(observe)
        (made,) = [each for each in point.fwd_hooks if each not in before]
        return made.hook.remove  # type: ignore[no-any-return]

    def captured_of(self, module: nn.Module, name: str, x: Tensor) -> Tensor:
        """See `System`."""
        with torch.no_grad():
            _, cache = Pointed(module).run_with_cache(x)
        result: Tensor = cache[f"inside.{name}.1"]
        return result

    def steered_of(self, module: nn.Module, name: str, x: Tensor, vector: Tensor) -> Tensor:
        """See `System`."""

        def hook(x: Tensor, hook: object) -> Tensor:  # noqa: ARG001 (its contract)
            return x + vector

        with torch.no_grad():
            result: Tensor = Pointed(module).run_with_hooks(
                x, fwd_hooks=[(f"inside.{name}.1", hook)]
            )
        return result


SYSTEM = TransformerLens
