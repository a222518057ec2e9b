"""Memory of the emulated GPU: NaN until a kernel wrote it and after it was freed."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from support.fake_cuda.streams import GPU, TIMELINE, Kernel, Point, Stream, WaitFor

if TYPE_CHECKING:
    from collections.abc import Iterator

_FREED_INT = 77
_NAME = "_fake_cuda"


_ALLOCATIONS: weakref.WeakSet[Allocation] = weakref.WeakSet()


def allocated(*_device: object) -> int:
    """Returns the bytes that tensors have, as `torch.cuda.memory_allocated` does."""
    return sum(each.nbytes for each in [*_ALLOCATIONS])


class Allocation:
    """Memory that is freed when no tensor has it, whether kernels still read it or not.

    The memory is free for the stream that allocated it at once, in stream order, and after an event
    of each other stream given to `record_stream`; by then it is NaN. Memory allocated while a
    graph is captured belongs to the graph, and is never freed.
    """

    def __init__(self, memory: Tensor) -> None:
        self.users = [TIMELINE.current]
        self.nbytes = memory.untyped_storage().nbytes()
        _ALLOCATIONS.add(self)
        if TIMELINE.recording is None:
            weakref.finalize(self, _free, memory, self.users).atexit = False


def _free(memory: Tensor, users: list[Stream]) -> None:
    if not TIMELINE.open:
        return
    owner, *others = users
    for other in others:
        point = Point(other, None)
        other.append(point)
        owner.append(WaitFor(point))
    owner.append(Kernel(lambda: poison(memory), "free"))


class Placed(NamedTuple):
    """Memory of a tensor on the GPU, and its allocation."""

    memory: Tensor
    """The numbers, on the CPU; kernels alone read and write them."""
    allocation: Allocation


class _Wrapper(Tensor):
    """Class that a tensor on the GPU is made of, before it becomes a plain `Tensor`."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)  # torch asks for it; calls go to the mode, or fail


def on_gpu(memory: Tensor, allocation: Allocation | None = None) -> Tensor:
    """Returns a tensor that says `cuda`, with its numbers in `memory`.

    Its class is `Tensor` itself, so that code for subclasses does not run.
    """
    made = cast(
        "Tensor",
        Tensor._make_wrapper_subclass(
            _Wrapper,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            layout=memory.layout,
            device=GPU,
            storage_size=memory.untyped_storage().nbytes(),
        ),
    )
    setattr(made, _NAME, Placed(memory, allocation or Allocation(memory)))
    made.__class__ = Tensor
    return made


def placed(value: object) -> Placed | None:
    """Returns the memory of a tensor on the GPU; None for anything else."""
    found: Placed | None = getattr(value, "__dict__", {}).get(_NAME)
    return found if isinstance(value, Tensor) else None


def memory_of(value: Any) -> Any:
    """Returns the memory of a tensor on the GPU; anything else as it is."""
    found = placed(value)
    return value if found is None else found.memory


@contextlib.contextmanager
def inside_kernel() -> Iterator[None]:
    """Computes on memory: no dispatch to the emulation, no autograd."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def write(target: Tensor, source: Tensor) -> None:
    """Copies into memory, an inference tensor's too."""
    with torch.inference_mode(mode=target.is_inference()):
        target.copy_(source)


def poison(memory: Tensor) -> Tensor:
    """Fills memory with NaN, or with a number that no result has."""
    with inside_kernel(), torch.inference_mode(mode=memory.is_inference()):
        if memory.is_floating_point() or memory.is_complex():
            return memory.fill_(torch.nan)
        return memory.fill_(True if memory.dtype == torch.bool else _FREED_INT)


class Pinned:
    """Memory of the host that copies may read or write behind its back."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> Tensor:
        """Makes the memory of a tensor pinned."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = StorageWeakRef(storage)
        return tensor

    def has(self, tensor: Tensor) -> bool:
        """Returns True for a tensor in pinned memory."""
        found = self._storages.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found.expired()
