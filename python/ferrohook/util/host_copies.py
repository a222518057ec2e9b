"""Asynchronous copies from a GPU to the host, on a separate stream."""

# A copy that the host does not wait for needs pinned memory, which a process has little of: it is a
# stage, and the copies move on to plain memory when they are read, or when the stage is full.

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from typing import Final, NamedTuple

import torch
from torch import Tensor

MOST_PINNED: Final = 2**28
"""Bytes of pinned memory that copies of the process have at a time; a larger one is alone."""


class _Copy(NamedTuple):
    """A copy on its way from a GPU."""

    staged: Tensor
    """In pinned memory."""
    complete: torch.cuda.Event
    host: weakref.ref[Tensor]
    """Where it is read."""


class _Stage:
    """Copies of the process that are in pinned memory, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._copies: dict[int, _Copy] = {}
        self._nbytes = 0
        self._numbers = itertools.count()

    def add(self, source: Tensor, host: Tensor) -> int:
        """Starts a copy, and waits for the oldest ones where there is no room for it.

        Returns:
            Its number, for `finish`.
        """
        with self._lock:
            while self._copies:
                oldest = next(iter(self._copies))
                unwanted = self._copies[oldest].host() is None
                if not unwanted and self._nbytes + source.nbytes <= MOST_PINNED:
                    break
                self.finish(oldest)
            stream = _side_stream(source.device)
            stream.wait_stream(torch.cuda.current_stream(source.device))
            with torch.cuda.stream(stream):
                staged = torch.empty_like(source, device="cpu", pin_memory=True)
                staged.copy_(source, non_blocking=True)
            source.record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
            number = next(self._numbers)
            self._copies[number] = _Copy(staged, event, weakref.ref(host))
            self._nbytes += staged.nbytes
        return number

    def __contains__(self, number: object) -> bool:
        return number in self._copies

    def finish(self, number: int) -> None:
        """Waits for a copy, if anybody can read it, and moves it to where it is read."""
        with self._lock:
            if (copy := self._copies.get(number)) is None:
                return
            if (host := copy.host()) is not None:
                copy.complete.synchronize()
                with torch.no_grad():
                    host.data.copy_(copy.staged)  # `data`: no change, as versions count them
            del self._copies[number]
            self._nbytes -= copy.staged.nbytes


_STAGE: Final = _Stage()


class HostCopies:
    """Copies that one capture or detector has started."""

    def __init__(self) -> None:
        self._started: dict[int, None] = {}
        """Numbers of the copies, the oldest first."""

    def finish(self) -> None:
        """Waits until all copies are complete."""
        for number in [*self._started]:
            _STAGE.finish(number)
            self._started.pop(number, None)  # another reader may have been faster

    def start(self, tensor: Tensor, *, clone: bool) -> Tensor:
        """Starts a copy and returns it; `finish` before reading."""
        # Clones on the computing stream, so later writes in place there do not reach the copy.
        source = tensor.clone() if clone else tensor
        # An inference tensor has no version: a capture of it would be copied before it is complete.
        with torch.inference_mode(mode=False):
            host = torch.empty_like(source, device="cpu")
        self._started[_STAGE.add(source, host)] = None
        for number in [*itertools.islice(self._started, 2)]:
            if number not in _STAGE:
                self._started.pop(number, None)
        return host


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
