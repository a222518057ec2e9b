"""Triton without a GPU: kernels run in Python, one after another, on the tensors' own memory.

vLLM's model runner V2 has kernels in Triton, whose wheels have no backend for a CPU. Its
interpreter stands in: for each process that has this folder in PYTHONPATH, before it imports vLLM.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read as a kernel is decorated

import triton.backends
import triton.runtime
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Driver(DriverBase):  # type: ignore[misc]  # Triton has no types
    """The only backend that is there."""

    def __init__(self) -> None: ...

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> str:
        return "cpu"

    def get_active_torch_device(self) -> Any:
        import torch  # noqa: PLC0415 (most processes need none)

        return torch.device("cpu")

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> None: ...

    def get_device_interface(self) -> Any:
        import torch  # noqa: PLC0415 (as above)

        return torch.cpu

    def get_empty_cache_for_benchmark(self) -> None: ...

    def clear_cache(self, cache: Any) -> None: ...


backends = triton.backends.backends
some = next(iter(backends.values()))
backends["cpu"] = type(some)(compiler=some.compiler, driver=Driver)
triton.runtime.driver._default = triton.runtime.driver._active = Driver()
