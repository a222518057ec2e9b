"""Asynchronous copies from a GPU into pinned memory, on a stream of their own."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class HostCopies:
    """Copies that one capture or detector has started."""

    def __init__(self) -> None:
        self._streams: set[torch.cuda.Stream] = set()

    def finish(self) -> None:
        """Waits until all copies are complete."""
        for stream in list(self._streams):
            stream.synchronize()

    def start(self, tensor: Tensor, *, clone: bool) -> Tensor:
        """Starts a copy into pinned memory and returns it; `finish` before reading."""
        # Clones on the computing stream, so later writes in place there do not reach the copy.
        source = tensor.clone() if clone else tensor
        stream = _side_stream(tensor.device)
        self._streams.add(stream)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host = torch.empty_like(source, device="cpu", pin_memory=True)
            host.copy_(source, non_blocking=True)
        source.record_stream(stream)
        return host


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
