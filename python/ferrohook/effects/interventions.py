"""Interventions: native hooks that change one tensor of a module's input or output.

They run without a Python frame, in the phases `forward` (the output) and `forward_pre` (the input),
and are registered wherever a hook is taken. A vector is cast once for each dtype and device of the
tensors that it meets. Under `torch.compile` it is an input of the graph: another vector of that
shape needs no new trace.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

import torch
from torch import Tensor

from ferrohook._core import GpuVector, InterventionBase, to_device
from ferrohook.effects.formulas import EXACT, check_dtypes, prepared_vector
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import OutputIndex, check_output_index, expect
from ferrohook.util.never_trace import never_trace, never_trace_frame
from ferrohook.util.streams import Made, made
from ferrohook.util.tensors import content_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Intervention(InterventionBase):
    """Base of the interventions: immutable, compared by content, picklable.

    `output_index` names the changed tensor in an output that is a tuple, list, dict or object: its
    index, key or attribute, or a tuple of them: `(1, 0)` is the `h` of an LSTM, `(0, "data")` the
    data of the sequence that it returns for a packed one. `"sum"`, for layers that return hidden
    state and residual, changes the sum of the two: the hidden state takes the difference.
    """

    __slots__ = ("_made", "output_index", "values")

    kind: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments, `output_index` aside."""

    output_index: Any
    values: tuple[Any, ...]
    _made: Made | None
    """Order of the uses of a vector on a GPU."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:  # noqa: D102 (see the class)
        msg = f"{cls.__name__} is abstract: take one of {', '.join(INTERVENTIONS)}"
        raise HookTypeError(msg)

    @classmethod
    def _of(cls, values: tuple[Any, ...], output_index: Any) -> Self:
        """Makes an intervention of validated values of `fields`."""
        output_index = check_output_index(output_index, f"output_index of {cls.__name__}")
        vector = next((value for value in values if isinstance(value, Tensor)), None)
        numbers = tuple(value for value in values if not isinstance(value, Tensor))
        width = vector.shape[-1] if vector is not None and vector.dim() else None
        if width == 1:
            width = None  # broadcasts
        self = InterventionBase.__new__(cls, cls.kind, numbers, output_index, width, vector)
        self._made = made((vector,)) if vector is not None and vector.is_cuda else None
        self.output_index = output_index
        self.values = values
        return self

    @property
    def width(self) -> int | None:
        """Last dimension of the vector; None if it fits any."""
        vector = self.vector
        return None if vector is None or not vector.dim() else vector.shape[-1]

    @property
    def vector(self) -> Tensor | None:
        """The vector, direction or value; None without one."""
        return next((value for value in self.values if isinstance(value, Tensor)), None)

    def vector_as(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the vector, ready for use, as values of tensors of this type on this device."""
        self.check_dtype(dtype)
        return _on_device(*self._operands, device, dtype)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises unless it can change tensors of this type."""
        vector = self.vector
        check_dtypes(self.kind, dtype, None if vector is None else vector.dtype)

    @property
    def _operands(self) -> tuple[str, Tensor, float | None, Made | None]:
        """Parts that a prepared vector is made of; for those with one."""
        scale = self.values[1] if self.kind == "add" else None
        return self.kind, cast("Tensor", self.vector), scale, self._made

    def _traced(self) -> tuple[Any, ...]:
        """Returns its form in a trace: kind, part, vector, the vector on each GPU, numbers.

        The vectors on GPUs are prepared. None of a vector that is trained, whose copies are in the
        graph.
        """
        vector = self.vector
        on_gpus = None
        if vector is not None and not vector.requires_grad:
            on_gpus = tuple(
                GpuVector(partial(_on_device, *self._operands, torch.device("cuda", number)))
                for number in range(torch.cuda.device_count())
            )
        numbers = (value for value in self.values if not isinstance(value, Tensor))
        tensors = (
            None if each is None else torch.tensor(each, dtype=torch.float64) for each in numbers
        )
        return self.kind, self.output_index, vector, on_gpus, *tensors

    def _tables(
        self,
        others: list[Intervention],
        vectors: list[Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, ...]:
        """Returns tensors with a row for each of some interventions of this class."""
        if self.kind == "clamp":
            low, high = -math.inf, math.inf
            bounds = [[low if each.values[1] is None else each.values[1] for each in others]]
            bounds += [[high if each.values[2] is None else each.values[2] for each in others]]
        else:
            bounds = [[each.values[0] for each in others]] if self.kind == "scale" else []
            # As exact as a number that multiplies a tensor.
            dtype = torch.float64 if dtype in EXACT else torch.float32
        with torch.inference_mode(mode=False):  # a later call may record a graph
            columns = [
                to_device(torch.tensor(each, dtype=dtype)[:, None], device) for each in bounds
            ]
            return (torch.stack(vectors), *columns) if vectors else tuple(columns)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "values"):
            msg = f"{type(self).__name__} is immutable: make another"
            raise AttributeError(msg)
        super().__setattr__(name, value)

    def needs(self) -> Iterator[str]:
        """Returns the features that a back end must support to apply it, see `BackEnd`."""
        yield self.kind
        if self.output_index is not None:
            yield "output_index"
        values = [torch.as_tensor(value) for value in self.values if value is not None]
        if any(value.dim() > 1 for value in values):
            yield "table"
        if any(value.requires_grad for value in values):
            yield "trained"
        if not all(bool(value.isfinite().all()) for value in values):
            yield "not finite"

    def content(self) -> tuple[Any, ...]:
        """Returns what identifies it, hashable: class, `output_index`, and values by content."""
        return (type(self).__name__, *map(content_of, (self.output_index, *self.values)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervention) and self.content() == other.content()

    def __hash__(self) -> int:
        return hash(self.content())

    def __reduce__(self) -> Any:
        return _make, (type(self), self.values, self.output_index)

    def __repr__(self) -> str:
        shown = [
            f"{name}={_shown(value)}" for name, value in zip(self.fields, self.values, strict=True)
        ]
        if self.output_index is not None:
            shown.append(f"output_index={self.output_index!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _on_device(  # noqa: PLR0913, PLR0917 (a vector and where it goes)
    kind: str,
    vector: Tensor,
    scale: float | None,
    order: Made | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the prepared vector of an intervention on a device."""
    if order is not None:
        order.use()
    with torch.inference_mode(mode=False):  # a later call may record a graph
        prepared = prepared_vector(kind, vector, scale)
        on_device: Tensor = to_device(prepared if dtype is None else prepared.to(dtype), device)
        return on_device


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(Intervention, "vector_as", "native code calls it")
never_trace(Intervention, "check_dtype", "native code calls it")
never_trace(Intervention, "_traced", "native code calls it")
never_trace(sys.modules[__name__], "_on_device", "native code calls it")
never_trace_frame(Made.use, "native code calls it")
never_trace(Intervention, "_tables", "native code calls it")


def _make(cls: type[Intervention], values: tuple[Any, ...], output_index: Any) -> Intervention:
    return cls(*values, output_index=output_index)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r}"
    return (
        f"<{'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}>"
    )


def _vector(cls: type[Intervention], name: str, value: Tensor) -> Tensor:
    expect(value, Tensor, f"{name} of {cls.__name__} is a tensor")
    if not value.is_floating_point() and not value.is_complex():
        msg = f"{name} of {cls.__name__} is a tensor of floating point, got {value.dtype}"
        raise HookTypeError(msg)
    # A copy, as a later write in place would change some calls and not others.
    with torch.inference_mode(mode=False):  # a later call may record a graph
        return value if value.requires_grad else value.detach().clone()


def _direction(cls: type[Intervention], value: Tensor) -> Tensor:
    direction = _vector(cls, "direction", value)
    if direction.dim() != 1:
        msg = f"direction of {cls.__name__} has one dimension, got {tuple(direction.shape)}"
        raise HookTypeError(msg)
    if not bool(direction.detach().norm() > 0):
        msg = f"direction of {cls.__name__} is not zero and has no NaN"
        raise ValueError(msg)
    return direction


def _number(cls: type[Intervention], name: str, value: float) -> float:
    expect(value, int | float, f"{name} of {cls.__name__} is a number")
    number = float(value)
    if math.isnan(number):
        msg = f"{name} of {cls.__name__} is a number, got NaN"
        raise ValueError(msg)
    return number


class Add(Intervention):
    """Adds `scale * vector` to the tensor.

    Args:
        vector: broadcasts to the tensor; usually of the width of its last dimension.
        scale: a factor.
        output_index: the changed tensor, see `Intervention`.

    Raises:
        HookTypeError: an argument has the wrong type.
    """

    __slots__ = ()
    kind = "add"
    fields = ("vector", "scale")

    def __new__(  # noqa: D102 (see the class)
        cls, vector: Tensor, scale: float = 1.0, *, output_index: OutputIndex = None
    ) -> Self:
        values = _vector(cls, "vector", vector), _number(cls, "scale", scale)
        return cls._of(values, output_index)


class Scale(Intervention):
    """Multiplies the tensor by a factor."""

    __slots__ = ()
    kind = "scale"
    fields = ("factor",)

    def __new__(  # noqa: D102 (see the class)
        cls, factor: float, *, output_index: OutputIndex = None
    ) -> Self:
        return cls._of((_number(cls, "factor", factor),), output_index)


class Ablate(Intervention):
    """Projects a direction out of the tensor: `x - (x . d) d`, with `d` of unit length.

    Of complex numbers `x . d` is the inner product, with the conjugate of `d`.

    Args:
        direction: one dimension, as wide as the tensor's last; of any length but zero.
        output_index: the changed tensor, see `Intervention`.
    """

    __slots__ = ()
    kind = "ablate"
    fields = ("direction",)

    def __new__(  # noqa: D102 (see the class)
        cls, direction: Tensor, *, output_index: OutputIndex = None
    ) -> Self:
        return cls._of((_direction(cls, direction),), output_index)


class Clamp(Intervention):
    """Limits the component of a real tensor along a direction of unit length.

    At a bound the gradient of a component is the one that `torch.clamp` gives: for a single request
    with numbers as bounds; in a batch of several with tensors, where equal bounds halve it.

    Args:
        direction: one dimension, as wide as the tensor's last; of any length but zero.
        low: least component, or None.
        high: greatest component, or None.
        output_index: the changed tensor, see `Intervention`.

    Raises:
        ValueError: `low` is above `high`, or both are None.
    """

    __slots__ = ()
    kind = "clamp"
    fields = ("direction", "low", "high")

    def __new__(  # noqa: D102 (see the class)
        cls,
        direction: Tensor,
        low: float | None = None,
        high: float | None = None,
        *,
        output_index: OutputIndex = None,
    ) -> Self:
        least = None if low is None else _number(cls, "low", low)
        most = None if high is None else _number(cls, "high", high)
        if (least is None and most is None) or (
            least is not None and most is not None and least > most
        ):
            msg = f"Clamp takes low, high or both, low not above high, got {low} and {high}"
            raise ValueError(msg)
        direction = _direction(cls, direction)
        check_dtypes(cls.kind, direction.dtype)
        return cls._of((direction, least, most), output_index)


class Replace(Intervention):
    """Replaces the tensor by a value, which broadcasts to its shape."""

    __slots__ = ()
    kind = "replace"
    fields = ("value",)

    def __new__(  # noqa: D102 (see the class)
        cls, value: Tensor, *, output_index: OutputIndex = None
    ) -> Self:
        return cls._of((_vector(cls, "value", value),), output_index)


class Zero(Intervention):
    """Replaces the tensor by zeros."""

    __slots__ = ()
    kind = "zero"

    def __new__(cls, *, output_index: OutputIndex = None) -> Self:  # noqa: D102 (see the class)
        return cls._of((), output_index)


INTERVENTIONS: Final = {cls.__name__: cls for cls in (Add, Scale, Ablate, Clamp, Replace, Zero)}
"""The classes by name."""
