"""Reductions by torch, for tensors whose memory the native detectors cannot read themselves.

Those of other devices, of other layouts and formats, of subclasses, and those that are not
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
"""With what it does not export."""

_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
"""Two numbers in an element, which torch computes nothing with."""


class Awaited:
    """Numbers that a GPU computes, on their way into pinned memory."""

    def __init__(self, reduced: Tensor) -> None:
        with torch.cuda.device(reduced.device):
            self._host = torch.empty_like(reduced, device="cpu", pin_memory=True)
            self._host.copy_(reduced, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def numbers(self, wait: bool) -> Numbers | None:  # noqa: FBT001 (called from Rust)
        """The numbers; None where they are not there yet and are not to be waited for."""
        if wait:
            self._there.synchronize()
        elif not self._there.query():
            return None
        return _numbers(self._host)


def reduce(function: str, tensor: Tensor) -> Numbers | Awaited | None:
    """What a function makes of a tensor's numbers; None where it has none of floating point.

    Args:
        function: `non_finite` or `moments`.
        tensor: any tensor; complex numbers count as pairs.
    """
    if is_lazy(tensor):
        return None
    try:
        return _reduced(function, tensor)
    except NotImplementedError:  # a subclass that computes little
        return None


def _reduced(function: str, tensor: Tensor) -> Numbers | Awaited | None:
    with torch.no_grad():
        values = _unwrapped(tensor.detach())
        # Nothing is there where shapes are tried out, in what FSDP frees between its uses.
        if values.is_meta or isinstance(values, FakeTensor) or not _storage_holds(values):
            return None
        if values.layout == torch.jagged:
            values = values.values()
        elif values.layout != torch.strided:
            values = values.to_dense()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        if not values.is_floating_point() or not values.numel():
            return None
        if values.dtype.itemsize == 1:
            if values.dtype is _PACKED:
                return None
            values = values.float()  # torch computes little with these
        # Wrapped again, where everything is.
        parts = [_unwrapped(part.double()) for part in _FUNCTIONS[function](values)]
        if _computes_its_own_way(parts[0]):
            return _as_numbers(part.item() for part in parts)
        reduced = torch.stack(parts)
        return Awaited(reduced) if reduced.is_cuda else _numbers(reduced)


def _computes_its_own_way(tensor: Tensor) -> bool:
    dispatch = "__torch_dispatch__"
    return getattr(type(tensor), dispatch) is not getattr(Tensor, dispatch)


def _unwrapped(tensor: Tensor) -> Tensor:
    """What has the numbers of a tensor that stands for others."""
    while True:
        if isinstance(tensor, FunctionalTensor):
            tensor = tensor.elem
        elif _TORCH._is_functional_tensor(tensor):
            _TORCH._sync(tensor)
            tensor = _TORCH._from_functional_tensor(tensor)
        elif is_functorch_wrapped_tensor(tensor):
            # In `torch.func`: all that is mapped over, of which a hook sees one.
            tensor = get_unwrapped(tensor)
        elif isinstance(tensor, MaskedTensor):
            tensor = _unmasked(tensor)
        elif to_local := getattr(tensor, "to_local", None):
            # What this process has of a DTensor: others may have no detector that takes part.
            tensor = to_local()
        else:
            return tensor


def _unmasked(tensor: MaskedTensor) -> Tensor:
    """The numbers that the mask lets through: the others are not defined."""
    numbers: Tensor = tensor.get_data()
    mask: Tensor = tensor.get_mask()
    if numbers.layout != torch.strided:
        numbers, mask = numbers.to_dense(), mask.to_dense()
    return numbers[mask]


def _numbers(reduced: Tensor) -> Numbers:
    return _as_numbers(reduced.tolist())


def _as_numbers(reduced: Iterable[float]) -> Numbers:
    # The counts too are floating point on the way.
    return tuple(int(n) if n.is_integer() else n for n in reduced)


def _storage_holds(tensor: Tensor) -> bool:
    """Whether the memory is there that a tensor is a view of: torch reads on without it."""
    if tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
        return True
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        there = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return True  # of a subclass without one
    return bool((tensor.storage_offset() + last + 1) * tensor.itemsize <= there)


def _non_finite(values: Tensor) -> list[Tensor]:
    """The numbers that are none, and the infinite ones."""
    return [values.isnan().sum(), values.isinf().sum()]


def _moments(values: Tensor) -> list[Tensor]:
    """Of the finite ones: count, mean, sum of squared distances from it, minimum, maximum.

    And how many are not finite.
    """
    finite = values.isfinite()
    count = finite.sum()
    wide = values if values.dtype == torch.float64 else values.float()
    mean = wide.where(finite, 0).sum(dtype=torch.float64) / count.clamp(min=1)
    distances = (wide - mean.to(wide.dtype)).where(finite, 0)
    return [
        count,
        mean,
        distances.square().sum(dtype=torch.float64),
        wide.where(finite, torch.inf).amin(),
        wide.where(finite, -torch.inf).amax(),
        values.numel() - count,
    ]


_FUNCTIONS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "non_finite": _non_finite,
    "moments": _moments,
}
