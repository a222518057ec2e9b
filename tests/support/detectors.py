"""Modules of the tests of native detectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.detectors import NativeDetector


class Returning(nn.Module):
    """Returns what a function makes of what it takes."""

    def __init__(self, function: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def seen(detector: NativeDetector, *outputs: Any) -> dict[str, Any]:
    """What a detector says after a module has returned these."""
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
