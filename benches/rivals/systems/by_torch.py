"""PyTorch's own hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from benches.rivals.systems.base import System

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn


class TorchHooks(System):
    """PyTorch's own hooks."""

    package = "torch"
    way = "`register_forward_hook`, and its handle in a `with`"
    caveats: ClassVar[Mapping[str, str]] = {
        "threads": "a hook belongs to the module, so it fires in every thread: a lock avoids this",
        "threads-capture": "a hook belongs to the module, so it fires in every thread",
        "compiled": "documented: `torch._dynamo.config.skip_nnmodule_hook_guards = False` before "
        "compiling avoids it, at the cost of a guard per module",
        "in-place": "the hook gets the tensor itself: clone it",
        "generated-position": "the hook gets the tensor of a step, and no positions",
        "never-runs": "a hook that does not fire raises no error or warning",
    }

    def _layer(self, layer: int) -> Any:
        return self.model.model.layers[layer]

    def logits(self, ids: Tensor) -> Tensor:
        """See `System`."""
        result: Tensor = self.model(ids).logits
        return result

    def steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        with self._layer(layer).register_forward_hook(lambda _m, _x, y: y + vector):
            return self.logits(ids)

    def captured(self, ids: Tensor, layer: int) -> Tensor:
        """See `System`."""
        kept: list[Tensor] = []
        with self._layer(layer).register_forward_hook(lambda _m, _x, y: kept.append(y.detach())):
            self.logits(ids)
        return kept[0]

    def kept_then_steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        kept: list[Tensor] = []
        register = self._layer(layer).register_forward_hook
        with (
            register(lambda _m, _x, y: kept.append(y.detach())),
            register(lambda _m, _x, y: y + vector),
        ):
            self.logits(ids)
        return kept[0]

    def generated(self, ids: Tensor, layer: int, vector: Tensor, tokens: int) -> Tensor:
        """See `System`."""

        def hook(_module: object, _x: object, y: Tensor) -> Tensor:
            y = y.clone()
            y[:, 0] += vector
            return y

        with self._layer(layer).register_forward_hook(hook):
            result: Tensor = self.model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return result

    def failing(self, ids: Tensor, layer: int) -> None:
        """See `System`."""

        def hook(*_args: object) -> None:
            raise ValueError

        with self._layer(layer).register_forward_hook(hook):
            self.logits(ids)

    def steered_compiled(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """See `System`."""
        compiled: Any = torch.compile(self.model, backend="eager")
        compiled(ids)
        with self._layer(layer).register_forward_hook(lambda _m, _x, y: y + vector):
            result: Tensor = compiled(ids).logits
        return result

    def standing(self, layer: int, hook: Callable[[], None]) -> Callable[[], None]:
        """See `System`."""
        return self._layer(layer).register_forward_hook(lambda *_args: hook()).remove  # type: ignore[no-any-return]

    def captured_of(self, module: nn.Module, name: str, x: Tensor) -> Tensor:
        """See `System`."""
        kept: list[Tensor] = []
        inside = module.get_submodule(name)
        with inside.register_forward_hook(lambda _m, _x, y: kept.append(y.detach())):
            module(x)
        return kept[0]

    def steered_of(self, module: nn.Module, name: str, x: Tensor, vector: Tensor) -> Tensor:
        """See `System`."""
        inside = module.get_submodule(name)
        with inside.register_forward_hook(lambda _m, _x, y: cast("Tensor", y) + vector):
            result: Tensor = module(x)
        return result


SYSTEM = TorchHooks
