"""Modules that vLLM calls where it chooses experts, and where it computes them."""

from __future__ import annotations

import importlib
from typing import Any, Final

from torch import nn

from ferrohook.engines.model.observing import CallingForward

_FUSED: Final = "vllm.model_executor.layers.fused_moe"
_NAME: Final = "ferrohook_router"


class RouterModule(nn.Module):
    """Module in place of the method with which a router of vLLM chooses experts.

    It also returns the logits, from which a `Route` computes weights. vLLM passes on what the
    module returns: to its own capture of ids, its load balancer and its kernel.

    Args:
        router: a `BaseRouter` of vLLM; its method calls the module from now on.
        factor: of the experts' output, which vLLM multiplies in place of the weights.
    """

    def __init__(self, router: Any, factor: float) -> None:
        super().__init__()
        self.router, self.factor = router, factor
        self._choose = router._compute_routing
        router._compute_routing = self._chosen

    def forward(self, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns logits, weights of the experts, and their ids."""
        weights, ids = self._choose(hidden_states, router_logits, *args, **kwargs)
        return router_logits, weights, ids

    def _chosen(self, *args: Any, **kwargs: Any) -> Any:
        _, weights, ids = self(*args, **kwargs)
        return weights, ids


def factor_of(router: nn.Module) -> float:
    """Returns the factor of the output of the experts that a module chooses."""
    return router.factor if isinstance(router, RouterModule) else 1.0


def call_experts(model: nn.Module) -> None:
    """Makes vLLM call modules for routers, and for experts with their ids and weights.

    Not with a monolithic kernel, which chooses the experts itself.
    """
    runners = importlib.import_module(f"{_FUSED}.runner.moe_runner")
    routers = importlib.import_module(f"{_FUSED}.router.base_router")
    layer = importlib.import_module(f"{_FUSED}.routed_experts")
    every: list[Any] = [*model.modules()]
    for module in every:
        if isinstance(module, layer.RoutedExperts):
            module.forward = module.forward_modular = CallingForward(module, "forward_modular")
        elif isinstance(module, runners.MoERunner) and isinstance(
            router := getattr(module, "router", None), routers.BaseRouter
        ):
            module.add_module(_NAME, RouterModule(router, module.routed_scaling_factor))
