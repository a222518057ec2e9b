"""Base of interventions: native hooks that change one tensor of a module's input or output."""

from __future__ import annotations

import contextlib
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

import torch
from torch import Tensor

from ferrohook._core import GpuVector, InterventionBase, to_device
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import OutputIndex, check_output_index, expect
from ferrohook.util.never_trace import never_trace, never_trace_frame, untraced_copy
from ferrohook.util.streams import Made, lasting, made
from ferrohook.util.tensors import ByContent, as_tensor, content_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

EXACT: Final = {torch.float64, torch.complex128}
"""Dtypes with which numbers are computed in float64; in float32 with others."""
KINDS: Final[dict[str, type[Intervention]]] = {}
"""The kinds of interventions by name, with the kinds that users define."""


def _as_it_is(vector: Tensor) -> Tensor:
    """Returns the vector as the formula takes it; by default unchanged."""
    return vector


class Intervention(ByContent, InterventionBase):
    """Base of the interventions: immutable, compared by content, picklable.

    Only their formula runs in Python. They work wherever a hook does. In the phase `forward` they
    change the output, in `forward_pre` the input, in `backward_pre` the gradient of the output and
    in `backward` the gradient of the input. A vector is cast once for each dtype and device of the
    tensors that it meets. Under `torch.compile` it is an input of the graph: another vector of that
    shape needs no new trace.

    `output_index` names the changed tensor in an output that is a tuple, list, dict or object: its
    index, key or attribute, or a tuple of them: `(1, 0)` is the `h` of an LSTM, `(0, "data")` the
    data of the sequence that it returns for a packed one. `"sum"`, for layers that return hidden
    state and residual, changes the sum of the two: the hidden state takes the difference. For
    gradients it is an index into PyTorch's tuple.

    To write your own, subclass this class with a `formula` and the names of its arguments. It works
    wherever the others do: in plans and their JSON, in batches, under `torch.compile`, at sites.

        class Soften(fh.Intervention):
            '''Scales the component along a direction.'''

            vector_field = "direction"
            number_fields = ("factor",)

            @staticmethod
            def prepare(direction):
                return direction / direction.norm()

            @staticmethod
            def formula(x, direction, factor):
                return x + (factor - 1) * (x * direction).sum(-1, keepdim=True) * direction

    Args:
        values: the arguments by position, in the order of `fields`.
        output_index: the changed tensor.
        named: the arguments by name.

    Raises:
        HookTypeError: an argument has the wrong type, is unknown or missing.
        ValueError: a number is NaN.
    """

    __slots__ = ("_made", "output_index", "values")

    vector_field: ClassVar[str | None] = None
    """Name of the argument that is a tensor."""
    scale_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers with which the vector is prepared."""
    number_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers that the formula takes."""
    absent: ClassVar[tuple[float, ...]] = ()
    """Numbers for the formula that stand for None, if None is allowed."""
    fields: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments in order, `output_index` aside: the vector, then the numbers."""
    broadcasts: ClassVar[bool] = True
    """True if the vector broadcasts to the tensor; else the formula takes it in its own shape."""
    adds: ClassVar[bool] = False
    """True if it adds the vector: a sum of hidden state and residual changes as the former does."""
    real: ClassVar[bool] = False
    """True if it has no meaning for complex numbers."""
    homogeneous: ClassVar[bool] = False
    """True if it does the same to any multiple of the tensor."""

    formula: ClassVar[Callable[..., Tensor]]
    """Returns a tensor, changed: called with it, the vector and the numbers, as far as there are.

    The only definition of the kind's change: calls, batches and graphs call it. A tensor of a kind
    with operands is of floating point, and the vector has been prepared, and has its dtype. In a
    batch operands have a row for each row of the tensor, and broadcast; in a graph numbers are
    tensors without a dimension.
    """
    prepare: ClassVar[Callable[..., Tensor]] = staticmethod(_as_it_is)
    """Returns the vector as the formula takes it: scaled or of unit length, for example.

    Called with the vector and the numbers of `scale_fields`, before the vector is cast.
    """

    output_index: Any
    values: tuple[Any, ...]
    _made: Made | None
    """Order of the uses of a vector on a GPU."""
    _untraced: ClassVar[Callable[..., Tensor]]
    """The formula for native code."""

    def __new__(  # noqa: D102 (see the class)
        cls, *values: Any, output_index: OutputIndex = None, **named: Any
    ) -> Self:
        if not hasattr(cls, "formula"):
            msg = f"{cls.__name__} is abstract: use a kind such as Add, or define its formula"
            raise HookTypeError(msg)
        given = dict(zip(cls.fields, values, strict=False)) | named
        if len(values) > len(cls.fields) or given.keys() != {*cls.fields}:
            expected = ", ".join(cls.fields) or "no arguments"
            msg = f"{cls.__name__} needs {expected}, got {', '.join(given) or 'none'}"
            raise HookTypeError(msg)
        given = {name: _checked(cls, name, given[name]) for name in cls.fields}
        part: Any = check_output_index(output_index, f"output_index of {cls.__name__}")
        vector = given.get(str(cls.vector_field))
        values = tuple(given.values())
        self = InterventionBase.__new__(
            cls,
            cls._untraced,
            cls._numbers_in(values),
            part,
            vector,
            cls.broadcasts,
            cls.adds,
        )
        self._made = made((vector,)) if vector is not None and vector.is_cuda else None
        self.output_index = part
        self.values = values
        return self

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        vector = () if cls.vector_field is None else (cls.vector_field,)
        cls.fields = vector + cls.scale_fields + cls.number_fields
        if not hasattr(cls, "formula"):
            return  # a base of others
        cls._untraced = untraced_copy(cls.formula, "native code calls it")
        known = KINDS.get(cls.__name__)
        # The cell of a notebook may define its class again.
        if known is not None and known.__module__ != cls.__module__:
            msg = f"an intervention called {cls.__name__} is already defined in {known.__module__}"
            raise HookTypeError(msg)
        KINDS[cls.__name__] = cls

    def at_part(self, output_index: OutputIndex) -> Self:
        """Returns the intervention for another part of a module's value."""
        return type(self)(*self.values, output_index=output_index)

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns True if the vector is as wide as a tensor of a shape, or broadcasts."""
        return self.width in {None, 1, shape[-1]}

    def on_multiple(self, _multiplier: float) -> Self | None:
        """Returns the intervention on a tensor that has this one's effect on a multiple of it.

        None if there is none of this kind.
        """
        return self if self.homogeneous else None

    @classmethod
    def _numbers_in(cls, values: tuple[Any, ...]) -> tuple[float, ...]:
        own = values[len(values) - len(cls.number_fields) :]
        return tuple(cls.absent[n] if each is None else each for n, each in enumerate(own))

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that the formula takes."""
        return self._numbers_in(self.values)

    @property
    def vector(self) -> Tensor | None:
        """The vector, direction or value; None without one."""
        return None if self.vector_field is None else cast("Tensor", self.values[0])

    @property
    def width(self) -> int | None:
        """Last dimension of the vector; None if it fits any."""
        vector = self.vector
        return None if vector is None or not vector.dim() else vector.shape[-1]

    def vector_as(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the vector, ready for use, as values of tensors of this type on this device."""
        self._check_dtype(dtype)
        return _on_device(*self._operands, device, dtype)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Raises unless it can change tensors of this type."""
        check_dtypes(type(self), dtype, self.vector)

    @property
    def _scales(self) -> tuple[float, ...]:
        return self.values[1 : 1 + len(self.scale_fields)]

    @property
    def _operands(self) -> tuple[type[Self], Tensor, tuple[float, ...], Made | None]:
        """Parts that a prepared vector is made of; for those with one."""
        return type(self), cast("Tensor", self.vector), self._scales, self._made

    def _traced(self, numbers: tuple[float, ...]) -> tuple[Any, ...]:
        """Returns its form in a trace: class, part, vector, the vector on each GPU, numbers.

        The vectors on GPUs are prepared. None of a vector that is trained, whose copies are in the
        graph. The numbers are the scales of the vector, then the numbers of the formula.
        """
        vector = self.vector
        on_gpus = None
        if vector is not None and not vector.requires_grad:
            on_gpus = tuple(
                GpuVector(partial(_on_device, *self._operands, torch.device("cuda", number)))
                for number in range(torch.cuda.device_count())
            )
        scales, numbers_as = (
            tuple(torch.tensor(each, dtype=torch.float64, device="cpu") for each in group)
            for group in (self._scales, numbers)
        )
        return type(self), self.output_index, vector, on_gpus, scales, numbers_as

    def _tables(
        self,
        vectors: list[Tensor],
        columns: list[list[float]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, ...]:
        """Returns tensors with a row for each of some interventions, operand by operand."""
        if not vectors:
            dtype = number_dtype(dtype)
        with lasting():
            made = [
                to_device(torch.tensor(each, dtype=dtype, device="cpu")[:, None], device)
                for each in columns
            ]
            return (torch.stack(vectors), *made) if vectors else tuple(made)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "values"):
            msg = f"{type(self).__name__} is immutable: create a new one"
            raise AttributeError(msg)
        super().__setattr__(name, value)

    def needs(self) -> Iterator[str]:
        """Returns the features that a back end must support to apply it, see `BackEnd`."""
        yield "add" if self.adds else "change"
        if self.output_index is not None:
            yield "output_index"
        values = [as_tensor(value) for value in self.values if value is not None]
        if self.broadcasts and any(value.dim() > 1 for value in values):
            yield "table"
        if any(value.requires_grad for value in values):
            yield "trained"
        if not all(bool(value.isfinite().all()) for value in values):
            yield "not finite"

    def content(self) -> tuple[Any, ...]:
        """Returns what identifies it, hashable: class, `output_index`, and values by content."""
        return (type(self), *map(content_of, (self.output_index, *self.values)))

    def __reduce__(self) -> Any:
        return _make, (type(self), self.values, self.output_index)

    def __repr__(self) -> str:
        shown = [
            f"{name}={_shown(value)}" for name, value in zip(self.fields, self.values, strict=True)
        ]
        if self.output_index is not None:
            shown.append(f"output_index={self.output_index!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def number_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that is as exact as a number that multiplies a tensor of a dtype."""
    return torch.float64 if dtype in EXACT else torch.float32


def check_dtypes(cls: type[Intervention], dtype: torch.dtype, vector: Tensor | None = None) -> None:
    """Raises unless a kind of intervention can change tensors of a dtype by a vector.

    Raises:
        HookTypeError: a part of its result would be lost, or has no meaning.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        msg = f"{cls.__name__} only works on floating-point tensors, got {dtype}"
        raise HookTypeError(msg)
    if cls.real and dtype.is_complex:
        msg = (
            f"{cls.__name__} only works on real numbers, got {dtype}: complex numbers have no order"
        )
        raise HookTypeError(msg)
    if vector is not None and vector.dtype.is_complex and not dtype.is_complex:
        msg = (
            f"{cls.__name__} with a vector of {vector.dtype} only works on complex tensors, got "
            f"{dtype}, which has no imaginary part"
        )
        raise HookTypeError(msg)


def _on_device(  # noqa: PLR0913, PLR0917 (a vector and where it goes)
    cls: type[Intervention],
    vector: Tensor,
    scales: tuple[float, ...],
    order: Made | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the prepared vector of an intervention on a device."""
    if order is not None:
        order.use()
    with lasting():
        prepared = cls.prepare(vector, *scales)
        on_device: Tensor = to_device(prepared if dtype is None else prepared.to(dtype), device)
        return on_device


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(Intervention, "vector_as", "native code calls it")
never_trace(Intervention, "_check_dtype", "native code calls it")
never_trace(Intervention, "_traced", "native code calls it")
never_trace(Intervention, "_tables", "native code calls it")
never_trace(sys.modules[__name__], "_on_device", "native code calls it")
never_trace_frame(Made.use, "native code calls it")


def _make(cls: type[Intervention], values: tuple[Any, ...], output_index: Any) -> Intervention:
    return cls(*values, output_index=output_index)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r}"
    return (
        f"<{'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}>"
    )


def _checked(cls: type[Intervention], name: str, value: Any) -> Any:
    """Validates an argument."""
    if name == cls.vector_field:
        return _vector(cls, name, value)
    if cls.absent and value is None:
        return value
    expect(value, int | float, f"{name} of {cls.__name__} must be a number")
    number = math.nan
    with contextlib.suppress(OverflowError):
        number = float(value)
    if math.isnan(number):
        msg = f"{name} of {cls.__name__} must be a number that a float can hold, and not NaN"
        raise ValueError(msg)
    return number


def _vector(cls: type[Intervention], name: str, value: Tensor) -> Tensor:
    expect(value, Tensor, f"{name} of {cls.__name__} must be a tensor")
    if not value.is_floating_point() and not value.is_complex():
        msg = f"{name} of {cls.__name__} must be a floating-point tensor, got {value.dtype}"
        raise HookTypeError(msg)
    if cls.real:
        check_dtypes(cls, value.dtype)
    # A copy, as a later write in place would change some calls and not others.
    with lasting():
        return value if value.requires_grad else value.detach().clone()
