"""Asynchronous copies from a GPU to the host, on a separate stream."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Final

import torch
from torch import Tensor

from ferrohook.util.streams import current_stream

MOST_PINNED: Final = 2**30
"""Bytes of pinned memory that the copies of the process have at a time."""


class _Pinned:
    """Counts the pinned memory of all copies that are alive.

    Only pinned memory is copied to without a wait, and a process has little of it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run while its thread has it
        self._nbytes = 0

    def empty(self, source: Tensor) -> Tensor | None:
        """Allocates memory for a copy of a tensor; None without room for it."""
        nbytes = source.nbytes
        with self._lock:
            if self._nbytes + nbytes > MOST_PINNED:
                return None
            self._nbytes += nbytes
        # An inference tensor has no version: a capture of it would be copied before it is complete.
        try:
            with torch.inference_mode(mode=False):
                host = torch.empty_like(source, device="cpu", pin_memory=True)
        except BaseException:
            self._free(nbytes)
            raise
        weakref.finalize(host.untyped_storage(), self._free, nbytes)
        return host

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes


_PINNED: Final = _Pinned()


class HostCopies:
    """Copies that one capture or detector has started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: dict[int, torch.cuda.Event] = {}
        """Events after the newest copy from each GPU; copies complete in their order."""

    def finish(self) -> None:
        """Waits until all copies are complete."""
        for complete in [*self._complete.values()]:
            complete.synchronize()

    def start(self, tensor: Tensor, *, clone: bool) -> Tensor:
        """Starts a copy and returns it; `finish` before reading.

        Without room in pinned memory the host waits for the copy.
        """
        if (host := _PINNED.empty(tensor)) is None:
            with torch.inference_mode(mode=False):
                return tensor.to("cpu")
        # Clones on the computing stream, so later writes in place there do not reach the copy.
        source = tensor.clone() if clone else tensor
        device = source.get_device()
        stream = _side_stream(device)
        stream.wait_stream(current_stream(device))
        with self._lock, torch.cuda.stream(stream):
            host.copy_(source, non_blocking=True)
            if (complete := self._complete.get(device)) is None:
                complete = self._complete[device] = torch.cuda.Event()
            complete.record(stream)
        source.record_stream(stream)
        return host


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
