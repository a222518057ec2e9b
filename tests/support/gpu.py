"""Measures of tests on a GPU, real or emulated."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Fills a list with the waits of the host in the block."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [
                text
                for each in caught
                if (text := str(each.message)).startswith("called a synchronizing")
            ]


def captured(model: nn.Module, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The CUDA graph of a call after three others, and the tensor that a replay writes."""
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    return graph, out
