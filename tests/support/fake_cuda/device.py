"""The emulated GPU, opened for a while: a dispatch mode, and names of torch replaced."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.fake_cuda.graphs import Graph, capture
from support.fake_cuda.memory import allocated, memory_of, placed
from support.fake_cuda.operators import Operators
from support.fake_cuda.schedules import Schedule
from support.fake_cuda.streams import TIMELINE, Event, Sleep, Stream
from support.fake_cuda.waits import Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._ops import OpOverload

    from support.fake_cuda.waits import Wait

_OURS = "ferrohook"
"""Namespace of operators in Python, whose parts run on the GPU."""


class FakeCuda(TorchDispatchMode):
    """A GPU that is not there: tensors say `cuda`, and their kernels run late, on the CPU.

        with FakeCuda("lazy") as gpu:
            model.cuda()(x.cuda())
        gpu.waits  # the host's waits, with their lines

    Args:
        schedule: see `Schedule`.
    """

    def __init__(self, schedule: str = "lazy") -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._schedule = Schedule(schedule)
        self._operators = Operators()
        self._opened = contextlib.ExitStack()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets Dynamo trace for the device: it asks this of modes."""
        return True

    @property
    def waits(self) -> list[Wait]:
        """Waits of the host since it was opened, or since the list was cleared."""
        return TIMELINE.waits.seen

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Of a trace.
        if any(isinstance(each, FakeTensor | FunctionalTensor) for each in args):
            return func(*args, **(kwargs or {}))
        if func.namespace == _OURS:
            with self._in_this_thread():
                return func._op_dk(
                    torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {})
                )
        return self._operators.run(func, args, dict(kwargs or {}))

    @contextlib.contextmanager
    def _in_this_thread(self) -> Iterator[None]:
        """Dispatches to the device, in a thread where nothing does."""
        lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()  # type: ignore[no-untyped-call] # torch's
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch's
            torch._C._set_only_lift_cpu_tensors(lifted)

    def __enter__(self) -> Self:
        assert not TIMELINE.open, "an emulated GPU is open"
        torch._C._ensureCUDADeviceGuardSet()
        with contextlib.ExitStack() as stack:
            TIMELINE.schedule, TIMELINE.waits = self._schedule, Waits()
            TIMELINE.open = True
            stack.callback(self._close)
            for owner, names in self._names():
                for name, value in names.items():
                    if name in vars(owner):
                        stack.callback(setattr, owner, name, vars(owner)[name])
                    else:
                        stack.callback(delattr, owner, name)
                    setattr(owner, name, value)
            overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
            stack.enter_context(self._in_this_thread())
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    @staticmethod
    def _close() -> None:
        for stream in TIMELINE.streams:
            stream.drain()
        TIMELINE.open = False
        TIMELINE.current = TIMELINE.default

    def _names(self) -> list[tuple[Any, dict[str, Any]]]:
        """Returns names of torch with their replacements, by their owner."""
        parameter, run = nn.Parameter.__new__, threading.Thread.run
        plain = {name: getattr(Tensor, name) for name in ("tolist", "data_ptr", "untyped_storage")}
        shown = Tensor.__repr__

        def make_parameter(
            cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True
        ) -> Any:
            if placed(data) is None:
                return parameter(cls, data, requires_grad)
            made = data.detach().requires_grad_(requires_grad)
            made.__class__ = cls
            return made

        def run_thread(thread: threading.Thread) -> None:
            with self._in_this_thread():
                run(thread)

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            found = placed(tensor)
            assert found is not None, "record_stream is for tensors on a GPU"
            if stream not in found.allocation.users:
                found.allocation.users.append(stream)

        def show(tensor: Tensor, **options: Any) -> str:
            if placed(tensor) is None:
                return shown(tensor, **options)  # type: ignore[no-untyped-call] # torch's
            return f"<{tuple(tensor.shape)} {tensor.dtype} on the emulated GPU>"

        pinned = self._operators.pinned
        return [
            (torch.cuda, {**_names_of_cuda(), **_memory_of_cuda()}),
            (torch, {"Event": Event, "get_device_module": functools.cache(lambda *_: torch.cuda)}),
            (torch._C, {"_cuda_getCurrentRawStream": lambda _: TIMELINE.current.cuda_stream}),
            (torch.accelerator, {"is_available": lambda: True}),
            # Traces run what native code does for them on the device.
            (convert_frame, {"_disable_current_modes": contextlib.nullcontext}),
            (threading.Thread, {"run": run_thread}),
            (nn.Parameter, {"__new__": staticmethod(make_parameter)}),
            (
                Tensor,
                {
                    "cuda": lambda t, *_, non_blocking=False, **__: t.to(
                        "cuda", non_blocking=non_blocking
                    ),
                    "record_stream": record_stream,
                    "tolist": lambda t: plain["tolist"](t.cpu()),
                    "data_ptr": lambda t: plain["data_ptr"](memory_of(t)),
                    "untyped_storage": lambda t: plain["untyped_storage"](memory_of(t)),
                    "__repr__": show,
                    "pin_memory": lambda t, *_: pinned.add(t.clone()),
                    "is_pinned": lambda t, *_: placed(t) is None and pinned.has(t),
                },
            ),
        ]


def _names_of_cuda() -> dict[str, Any]:
    """Returns names of `torch.cuda`: device, streams, events and graphs."""
    waits = TIMELINE.waits

    def set_stream(stream: Stream) -> None:
        TIMELINE.current = stream

    def set_mode(mode: int | str) -> None:
        waits.mode = mode if isinstance(mode, str) else ("default", "warn", "error")[mode]

    def synchronize(*_: Any) -> None:
        TIMELINE.wait("torch.cuda.synchronize", *TIMELINE.streams, hidden=False)

    def device(*_: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_name": lambda *_: "an emulated GPU",
        # Too old for Triton.
        "get_device_properties": lambda *_: types.SimpleNamespace(major=6, minor=0),
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "device": device,
        "manual_seed_all": lambda *_: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: TIMELINE.current,
        "default_stream": lambda *_: TIMELINE.default,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "set_sync_debug_mode": set_mode,
        "get_sync_debug_mode": lambda: ("default", "warn", "error").index(waits.mode),
        "_sleep": lambda _cycles: TIMELINE.current.push(Sleep()),
        "is_current_stream_capturing": lambda: (
            TIMELINE.recording is not None and TIMELINE.current in TIMELINE.recording.streams
        ),
        "CUDAGraph": Graph,
        "graph": capture,
    }


def _memory_of_cuda() -> dict[str, Callable[..., Any]]:
    """Returns names of `torch.cuda` about memory, of which there is enough."""
    return {
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (2**31, 2**32),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": allocated,
    }
