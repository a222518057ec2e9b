"""`FrozenNorm`: a norm as the linear function that it is for the scales of one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ferrohook.analysis.calls import relative_distance, tolerance
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from torch import nn


class FrozenNorm(NamedTuple):
    """A norm as the linear function that it is for the scale of one stream."""

    gain: Tensor
    """(width,)."""
    centred: bool
    """True for a layer norm, which subtracts the mean first."""
    scale: Tensor
    """(..., 1), of each vector."""
    bias: Tensor
    """(width,)."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Applies the norm to a term of its input, without the bias, in float64."""
        return _gained(tensor, self.gain, centred=self.centred) * self.scale

    @classmethod
    def of(cls, name: str, norm: nn.Module, stream: Tensor, normed: Tensor) -> FrozenNorm:
        """Finds the function by calling the norm, and validates it on the stream.

        Raises:
            HookError: the norm is none of the known kinds.
        """
        width = stream.shape[-1]
        signs = torch.ones(width, device="cpu").double()
        signs[1::2] = -1
        if width % 2:
            signs[-3:] = torch.tensor([1.0, 1.0, -2.0], device="cpu")  # the mean is 0
        probes = torch.stack(
            [torch.zeros(width, device="cpu"), signs, torch.linspace(0.5, 1.5, width, device="cpu")]
        )
        probes = probes[:, None].to(stream)
        with torch.no_grad():
            # One at a time, in the dimensions of the stream.
            bias, answer, slope = (norm(probe[None])[0].double() for probe in probes)
        gain = (answer - bias) / probes[1].double()
        kinds = [
            (_distance(probes[2], slope - bias, gain, centred=centred), centred)
            for centred in (False, True)
        ]
        _, centred = min(kinds)
        scale = _scale(stream, normed.double() - bias, gain, centred=centred)
        found = cls(gain, centred, scale, bias)
        # RMS norms compute in float32, in models of float64 too.
        limit = max(tolerance(normed), tolerance(normed.float()))
        if not relative_distance(found(stream) + bias, normed.double()) <= limit:
            msg = (
                f"{name!r} ({norm._get_name()}) is neither a layer norm nor an RMS norm: its "
                "output is not its input times a gain and a scale"
            )
            raise HookError(msg)
        return found


def _gained(tensor: Tensor, gain: Tensor, *, centred: bool) -> Tensor:
    exact = tensor.double()
    return gain * (exact - exact.mean(-1, keepdim=True) if centred else exact)


def _scale(x: Tensor, y: Tensor, gain: Tensor, *, centred: bool) -> Tensor:
    """Fits the factor from the gained input to the output, at each position."""
    taken = _gained(x, gain, centred=centred)
    size = taken.square().sum(-1, keepdim=True)
    # Padding may be zeros, which any factor fits.
    return ((taken * y).sum(-1, keepdim=True) / size).where(size > 0, 0)


def _distance(x: Tensor, y: Tensor, gain: Tensor, *, centred: bool) -> float:
    taken = _gained(x, gain, centred=centred)
    return relative_distance(taken * _scale(x, y, gain, centred=centred), y)
