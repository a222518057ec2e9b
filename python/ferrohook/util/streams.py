"""Tensors that outlive a call, and the order of the streams of a GPU around them.

A tensor belongs to the stream that allocated it. Another stream that uses it waits for the kernels
that wrote it, and the memory is neither written nor reused before that stream is done.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_infra_mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

_KEYS: Any = torch._C._TorchDispatchModeKey
_without: Any = contextlib.contextmanager(_disable_infra_mode)


class Made:
    """Tensors on one GPU, and the event after the kernels that made them."""

    __slots__ = ("_device", "_event", "_streams", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream(tensors[0].device)
        self._tensors = tensors
        self._device = stream.device_index
        self._event = stream.record_event()
        self._streams = {stream.cuda_stream}

    def use(self) -> None:
        """Makes later work of the current stream wait for the kernels that made the tensors."""
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


class Tables:
    """Tensors on one GPU that are written again and again, and used by calls on any stream.

    A context manager around the writes: the current stream waits for all earlier uses, and later
    uses wait for it. A replayed CUDA graph bypasses this bookkeeping.
    """

    __slots__ = ("_device", "_tensors", "_users", "_writer", "_written")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._writer = torch.cuda.current_stream(tensors[0].device)
        self._device = self._writer.device_index
        self._written = self._writer.record_event()
        self._users: dict[int, torch.cuda.Stream] = {}
        """Streams with calls since the tables were written, by number."""

    def use(self) -> None:
        """Makes later work of the current stream wait for the last writes."""
        number = torch._C._cuda_getCurrentRawStream(self._device)
        if number in self._users or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device)
        self._join(stream)
        self._users[number] = stream

    def __enter__(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        self._join(stream)
        for user in [*self._users.values()]:
            if user != stream:
                stream.wait_stream(user)

    def __exit__(self, *_exception: object) -> None:
        self._writer = torch.cuda.current_stream(self._device)
        self._written = self._writer.record_event()
        self._users = {}

    def _join(self, stream: torch.cuda.Stream) -> None:
        if stream != self._writer:
            stream.wait_event(self._written)
            for tensor in self._tensors:
                tensor.record_stream(stream)


def lasting() -> AbstractContextManager[object]:
    """Makes tensors in a block that later calls can use.

    They have memory while this call is traced by `torch.export`, and no tensor of inference mode:
    a later call may record a graph.
    """
    mode_of: Any = torch._C._get_dispatch_mode
    if mode_of(_KEYS.PROXY) or mode_of(_KEYS.FUNCTIONAL) or mode_of(_KEYS.FAKE):
        return _untraced()
    return torch.inference_mode(mode=False)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    with (
        _without(_KEYS.PROXY),
        _without(_KEYS.FUNCTIONAL),
        unset_fake_temporarily(),
        torch.inference_mode(mode=False),
    ):
        yield


def made(tensors: Sequence[Tensor]) -> Made | None:
    """Returns the order of uses of tensors that were made just now.

    None if no other call may use them: of shape propagation, which has no memory, or written by the
    replays of a CUDA graph that is being captured.
    """
    if not _has_memory(tensors[0]) or torch.cuda.is_current_stream_capturing():
        return None
    return Made(tensors)


def read(tensor: Tensor) -> None:
    """Keeps the memory of a tensor on a GPU until the current stream is done with it."""
    if _has_memory(tensor):
        tensor.record_stream(current_stream(tensor.get_device()))


def current_stream(device: int) -> torch.cuda.Stream:
    """Returns the current stream of a GPU, without the checks of `torch.cuda.current_stream`."""
    return _stream(device, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _stream(device: int, _number: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


def _has_memory(tensor: Tensor) -> bool:
    return torch.cuda.is_initialized() and not isinstance(tensor, FakeTensor)
