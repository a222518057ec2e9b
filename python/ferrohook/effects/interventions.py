"""The interventions: each class says in one formula how it changes a tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch

from ferrohook.effects.intervention import EXACT, number_dtype
from ferrohook.effects.intervention import KINDS as KINDS  # from here they have the kinds below
from ferrohook.effects.intervention import Intervention as Intervention
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import check_length

if TYPE_CHECKING:
    from torch import Tensor

    from ferrohook.util.arguments import OutputIndex


class Add(Intervention):
    """Adds `scale * vector` to the tensor.

    Args:
        vector: broadcasts to the tensor; usually of the width of its last dimension. For the
            channels of images (batch, channels, height, width), `vector[:, None, None]`.
        scale: a factor.
        output_index: the changed tensor, see `Intervention`.

    Raises:
        HookTypeError: an argument has the wrong type.
    """

    __slots__ = ()
    vector_field = "vector"
    scale_fields = ("scale",)
    adds = True

    def __new__(  # noqa: D102 (see the class)
        cls, vector: Tensor, scale: float = 1.0, *, output_index: OutputIndex = None
    ) -> Self:
        return super().__new__(cls, vector, scale, output_index=output_index)

    @staticmethod
    def prepare(vector: Tensor, scale: Any) -> Tensor:  # noqa: D102 (see the base)
        return vector.mul(scale)

    @staticmethod
    def formula(x: Tensor, vector: Tensor) -> Tensor:  # noqa: D102 (see the base)
        return x + vector

    def on_multiple(self, multiplier: float) -> Self:  # noqa: D102 (see the base)
        vector, scale = self.values
        return type(self)(vector, scale / multiplier)


class Scale(Intervention):
    """Multiplies the tensor by a factor."""

    __slots__ = ()
    number_fields = ("factor",)
    homogeneous = True

    def __new__(  # noqa: D102 (see the class)
        cls, factor: float, *, output_index: OutputIndex = None
    ) -> Self:
        return super().__new__(cls, factor, output_index=output_index)

    @staticmethod
    def formula(x: Tensor, factor: Any) -> Tensor:  # noqa: D102 (see the base)
        return x.mul(factor)


class _Directed(Intervention):
    """Base of the interventions along a direction."""

    __slots__ = ()
    vector_field = "direction"

    def __new__(cls, *values: Any, output_index: OutputIndex = None) -> Self:
        self = super().__new__(cls, *values, output_index=output_index)
        direction: Tensor = self.values[0]
        if direction.dim() != 1:
            msg = (
                f"direction of {cls.__name__} must have one dimension, got shape "
                f"{tuple(direction.shape)}"
            )
            raise HookTypeError(msg)
        check_length(direction, f"direction of {cls.__name__}")
        return self

    @staticmethod
    def prepare(direction: Tensor) -> Tensor:
        exact = direction
        if direction.dtype not in EXACT:
            exact = direction.to(torch.complex64 if direction.is_complex() else torch.float32)
        unit: Tensor = exact / exact.norm()
        return unit


class Ablate(_Directed):
    """Projects a direction out of the tensor: `x - (x . d) d`, with `d` of unit length.

    Of complex numbers `x . d` is the inner product, with the conjugate of `d`.

    Args:
        direction: one dimension, as wide as the tensor's last; of a length from 1e-18 to 1e18.
        output_index: the changed tensor, see `Intervention`.
    """

    __slots__ = ()
    homogeneous = True

    def __new__(  # noqa: D102 (see the class)
        cls, direction: Tensor, *, output_index: OutputIndex = None
    ) -> Self:
        return super().__new__(cls, direction, output_index=output_index)

    @staticmethod
    def formula(x: Tensor, direction: Tensor) -> Tensor:  # noqa: D102 (see the base)
        # Not a product of matrices: autocast runs those in lower precision.
        return x - (x * direction.conj()).sum(-1, keepdim=True) * direction


class Clamp(_Directed):
    """Limits the component of a real tensor along a direction of unit length.

    At a bound a component gets the gradient of `torch.clamp`. In a single request the bounds are
    numbers. In a batch of several they are tensors, and equal bounds then halve the gradient.

    Args:
        direction: one dimension, as wide as the tensor's last; of a length from 1e-18 to 1e18.
        low: least component, or None.
        high: greatest component, or None.
        output_index: the changed tensor, see `Intervention`.

    Raises:
        ValueError: `low` is above `high`, or both are None.
    """

    __slots__ = ()
    number_fields = ("low", "high")
    absent = (-math.inf, math.inf)
    real = True

    def __new__(  # noqa: D102 (see the class)
        cls,
        direction: Tensor,
        low: float | None = None,
        high: float | None = None,
        *,
        output_index: OutputIndex = None,
    ) -> Self:
        self = super().__new__(cls, direction, low, high, output_index=output_index)
        _, least, most = self.values
        if (least is None and most is None) or (
            least is not None and most is not None and least > most
        ):
            msg = (
                f"Clamp needs low, high or both, and low must not exceed high, got {low} and {high}"
            )
            raise ValueError(msg)
        return self

    @staticmethod
    def formula(  # noqa: D102 (see the base)
        x: Tensor, direction: Tensor, low: Any, high: Any
    ) -> Tensor:
        along = (x * direction).sum(-1, keepdim=True)
        if (wide := number_dtype(along.dtype)) == along.dtype:
            clamped = along.clamp(low, high)
        else:  # a bound may be beyond half precision
            clamped = along.to(wide).clamp(low, high).to(along.dtype)
        return x + (clamped - along) * direction

    def on_multiple(self, multiplier: float) -> Self:  # noqa: D102 (see the base)
        direction, *bounds = self.values
        scaled = [None if each is None else each / multiplier for each in bounds]
        low, high = scaled if multiplier > 0 else reversed(scaled)
        return type(self)(direction, low, high)


class Replace(Intervention):
    """Replaces the tensor by a value, which broadcasts to its shape."""

    __slots__ = ()
    vector_field = "value"

    def __new__(  # noqa: D102 (see the class)
        cls, value: Tensor, *, output_index: OutputIndex = None
    ) -> Self:
        return super().__new__(cls, value, output_index=output_index)

    @staticmethod
    def formula(x: Tensor, value: Tensor) -> Tensor:  # noqa: D102 (see the base)
        return value.expand_as(x).clone()

    def on_multiple(self, multiplier: float) -> Self:  # noqa: D102 (see the base)
        return type(self)(self.values[0] / multiplier)


class Zero(Intervention):
    """Replaces the tensor by zeros."""

    __slots__ = ()
    homogeneous = True

    def __new__(cls, *, output_index: OutputIndex = None) -> Self:  # noqa: D102 (see the class)
        return super().__new__(cls, output_index=output_index)

    @staticmethod
    def formula(x: Tensor) -> Tensor:  # noqa: D102 (see the base)
        return torch.zeros_like(x)
