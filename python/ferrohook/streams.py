"""Order of the streams of a GPU around tensors that are made once and used by many calls.

A tensor belongs to the stream that allocated it. Another stream that uses it waits for the kernels
that made it, and the memory is not reused before that stream is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Made:
    """Tensors on one GPU, and the event behind the kernels that made them."""

    __slots__ = ("_device", "_event", "_streams", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream(tensors[0].device)
        self._tensors = tensors
        self._device = stream.device_index
        self._event = stream.record_event()
        self._streams = {stream.cuda_stream}

    def use(self) -> None:
        """Orders what the current stream does from now on behind the kernels that made them."""
        number = torch._C._cuda_getCurrentRawStream(self._device)
        if number in self._streams:
            return
        stream = torch.cuda.current_stream(self._device)
        # `torch.cuda.graph` waits for the device, and a graph may not wait for events of before.
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._event)
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._streams.add(number)


def made(tensors: Sequence[Tensor]) -> Made | None:
    """Returns the order of uses of tensors that were made just now.

    None if nobody else may use them: of shape propagation, which has no memory, or written by the
    replays of a CUDA graph that is being captured.
    """
    if not _has_memory(tensors[0]) or torch.cuda.is_current_stream_capturing():
        return None
    return Made(tensors)


def read(tensor: Tensor) -> None:
    """Keeps the memory of a tensor on a GPU until the current stream is done with it."""
    if _has_memory(tensor):
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _has_memory(tensor: Tensor) -> bool:
    return torch.cuda.is_initialized() and not isinstance(tensor, FakeTensor)
