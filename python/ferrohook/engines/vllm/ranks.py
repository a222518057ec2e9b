"""Ranks of tensor parallelism: each runs all rows, in some modules a part of their widths."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from ferrohook.engines.wire import digest_of
from ferrohook.quantity.anatomy.observe import observing
from ferrohook.util.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Ranks:
    """Tensor-parallel group of a worker.

    Args:
        group: vLLM's `GroupCoordinator`.
    """

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank_in_group
        self._group = group

    @classmethod
    def of(cls, config: Any) -> Ranks | None:
        """Returns the group of this process; None without tensor parallelism."""
        if config.parallel_config.tensor_parallel_size == 1:
            return None
        return cls(importlib.import_module("vllm.distributed").get_tp_group())

    def gathered(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank."""
        values: list[Any] = [None] * self._group.world_size
        torch.distributed.all_gather_object(values, value, self._group.cpu_group)
        return values

    def merged(
        self, failures: dict[str, str], retried: set[str]
    ) -> tuple[dict[str, str], set[str]]:
        """Returns the failures of all ranks, and the other requests that have to run again.

        Of a request that failed on several ranks, the reason of the first one.
        """
        # By vLLM's shared memory: microseconds, where torch's group takes hundreds.
        count = torch.tensor([float(len(failures) + len(retried))], device=self._group.device)
        if not self._group.all_reduce(count).item():
            return {}, set()
        merged: dict[str, str] = {}
        again: set[str] = set()
        for failed, other in reversed(self.gathered((failures, retried))):
            merged |= failed
            again |= other
        return merged, again - merged.keys()

    def partial(self, model: nn.Module, forward: Callable[[], object]) -> set[str]:
        """Returns the modules with an input or output that differs between the ranks.

        Compares the tensors of one forward. Shards may be equal by chance (of zero weights, say):
        noise of the rank replaces the outputs that vLLM declares to be sharded.
        """
        noise = torch.Generator().manual_seed(self.rank)
        digests: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}

        def add(name: str, value: Any) -> None:
            digests[name] += [digest_of(each.contiguous()) for each in tensors_in(value)]

        def taking(name: str, _module: nn.Module, *call: Any) -> None:
            add(name, call)

        def returning(name: str, module: nn.Module, *call: Any) -> None:
            if _is_sharded(module):
                fill(call[-1], noise)
            add(name, call[-1])

        with observing(model, taking, returning):
            forward()
        first, *others = self.gathered(digests)
        return {name for name in first if any(other[name] != first[name] for other in others)}


def fill(output: Any, noise: torch.Generator) -> None:
    """Replaces the values of the tensors in an output by noise."""
    for each in tensors_in(output):
        each.copy_(torch.randn(each.shape, generator=noise, device="cpu"))


def _is_sharded(module: Any) -> bool:
    """Returns True for a linear layer of vLLM whose ranks neither gather nor reduce the output."""
    whole = getattr(module, "gather_output", True) and getattr(module, "reduce_results", True)
    return getattr(module, "tp_size", 1) > 1 and not whole
