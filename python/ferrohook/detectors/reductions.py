"""Reductions by torch, for tensors whose memory the native detectors cannot read.

Such tensors are on another device, have another layout or format, are of a subclass, or are not
contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.masked import MaskedTensor
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Numbers: TypeAlias = "tuple[float, ...]"

_TORCH: Any = torch
"""torch, untyped, for names that it does not export."""

_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
"""dtype with two numbers in an element; torch has no arithmetic for it."""


class PendingNumbers:
    """Results of a reduction on a GPU, in transfer to pinned memory."""

    def __init__(self, reduced: Tensor) -> None:
        with torch.cuda.device(reduced.device):
            self._host = torch.empty_like(reduced, device="cpu", pin_memory=True)
            self._host.copy_(reduced, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def numbers(self, wait: bool) -> Numbers | None:  # noqa: FBT001 (called from Rust)
        """Returns the numbers; None if they have not arrived and `wait` is false."""
        if wait:
            self._there.synchronize()
        elif not self._there.query():
            return None
        return _numbers(self._host)


def reduce(function: str, tensor: Tensor) -> Numbers | PendingNumbers | None:
    """Reduces a tensor by a function; None if it has no floating-point numbers.

    Args:
        function: `non_finite` or `moments`.
        tensor: any tensor; a complex number counts as two.
    """
    if is_lazy(tensor):
        return None
    try:
        return _reduced(function, tensor)
    except NotImplementedError:  # a subclass without these operators
        return None


def _reduced(function: str, tensor: Tensor) -> Numbers | PendingNumbers | None:
    with torch.no_grad():
        values = _unwrapped(torch.detach(tensor))
        # No memory: shape propagation (meta, fake), or parameters that FSDP freed between uses.
        if values.is_meta or isinstance(values, FakeTensor) or not _storage_holds(values):
            return None
        if values.layout == torch.jagged:
            nested: Any = values
            # With lengths, there is memory between its sequences.
            cut = nested.lengths() is not None
            values = torch.cat([*map(torch.ravel, nested.unbind())]) if cut else nested.values()
        elif values.layout != torch.strided:
            values = values.to_dense()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        if not values.is_floating_point() or not values.numel():
            return None
        if values.dtype.itemsize == 1:
            if values.dtype is _PACKED:
                return None
            values = values.float()  # torch has few operators for 8-bit floats
        # Under a mode that wraps every tensor, results are wrapped again.
        parts = [_unwrapped(part.double()) for part in _FUNCTIONS[function](values)]
        if _has_own_dispatch(parts[0]):
            return _as_numbers(part.item() for part in parts)
        reduced = torch.stack(parts)
        return PendingNumbers(reduced) if reduced.is_cuda else _numbers(reduced)


def _has_own_dispatch(tensor: Tensor) -> bool:
    dispatch = "__torch_dispatch__"
    return getattr(type(tensor), dispatch) is not getattr(Tensor, dispatch)


def _unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor with the memory behind a wrapper (functional, functorch, DTensor)."""
    while True:
        if isinstance(tensor, FunctionalTensor):
            tensor = tensor.elem
        elif _TORCH._is_functional_tensor(tensor):
            _TORCH._sync(tensor)
            tensor = _TORCH._from_functional_tensor(tensor)
        elif is_functorch_wrapped_tensor(tensor):
            # In `torch.func`, the whole batch; the hook sees one element.
            tensor = get_unwrapped(tensor)
        elif isinstance(tensor, MaskedTensor):
            tensor = _unmasked(tensor)
        elif to_local := getattr(tensor, "to_local", None):
            # This rank's shard of a DTensor: a collective would hang if another rank has no
            # detector.
            tensor = to_local()
        else:
            return tensor


def _unmasked(tensor: MaskedTensor) -> Tensor:
    """Returns the numbers inside the mask; those outside are undefined."""
    numbers: Tensor = tensor.get_data()
    mask: Tensor = tensor.get_mask()
    if numbers.layout != torch.strided:
        numbers, mask = numbers.to_dense(), mask.to_dense()
    return numbers[mask]


def _numbers(reduced: Tensor) -> Numbers:
    return _as_numbers(reduced.tolist())


def _as_numbers(reduced: Iterable[float]) -> Numbers:
    # Counts arrive as floats.
    return tuple(int(n) if n.is_integer() else n for n in reduced)


def _storage_holds(tensor: Tensor) -> bool:
    """Returns True if the storage covers the tensor; torch reads beyond a freed one unchecked."""
    if tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
        return True
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        size = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return True  # a subclass without a storage
    return bool((tensor.storage_offset() + last + 1) * tensor.itemsize <= size)


def _non_finite(values: Tensor) -> list[Tensor]:
    """Counts NaNs and infinities."""
    return [values.isnan().sum(), values.isinf().sum()]


def _moments(values: Tensor) -> list[Tensor]:
    """Count, mean, sum of squared deviations, minimum and maximum of the finite numbers.

    The last number is the count of non-finite numbers.
    """
    finite = values.isfinite()
    count = finite.sum()
    wide = values if values.dtype == torch.float64 else values.float()
    mean = wide.where(finite, 0).sum(dtype=torch.float64) / count.clamp(min=1)
    distances = (wide - mean.to(wide.dtype)).where(finite, 0)
    return [
        count,
        mean,
        # Squares may be too large or too small for float32.
        torch.linalg.vector_norm(distances, dtype=torch.float64).square(),
        wide.where(finite, torch.inf).amin(),
        wide.where(finite, -torch.inf).amax(),
        values.numel() - count,
    ]


_FUNCTIONS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "non_finite": _non_finite,
    "moments": _moments,
}
