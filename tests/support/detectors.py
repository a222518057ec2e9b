"""Helpers of the tests of native detectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ferrohook as fh
from support.modules import Returning

if TYPE_CHECKING:
    from torch import Tensor

    from ferrohook.detectors import NativeDetector


def snapshot_after(detector: NativeDetector, *outputs: Any) -> dict[str, Any]:
    """Snapshot of a detector after a module has returned `outputs`."""
    module = fh.HookedModule(Returning())
    with module.register_forward_hook(detector) as handle:
        for output in outputs:
            module(output)
        assert handle.calls == len(outputs)
    return detector.snapshot()


def torch_moments(x: Tensor) -> dict[str, float]:
    finite = x.double().flatten()
    finite = finite[finite.isfinite()]
    return {
        "count": finite.numel(),
        "mean": finite.mean().item(),
        "variance": finite.var().item(),
        "rms": finite.square().mean().sqrt().item(),
        "min": finite.min().item(),
        "max": finite.max().item(),
        "not_finite": x.numel() - finite.numel(),
    }
