"""Readings: each class says in one formula which number a gate reads from a token's vector."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.dictionaries.features import UNITS, FeatureValues, checked_index, maxima_of
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import check_length, expect, finite
from ferrohook.util.streams import lasting
from ferrohook.util.tensors import ByContent, content_of

if TYPE_CHECKING:
    from collections.abc import Sequence

READINGS: Final[dict[str, type[Reading]]] = {}
"""The kinds by name, for JSON."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Reading(ByContent, ABC):
    """Base of the readings: immutable, compared by content, picklable.

    A reading gets the vectors of some tokens in float32, (tokens, width), and returns a number for
    each. Other dimensions of a token, such as heads, are laid side by side.
    """

    tensors: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are tensors as wide as the vectors, in their last dimension."""

    def __init_subclass__(cls) -> None:
        READINGS[cls.__name__] = cls

    @abstractmethod
    def _read(self, vectors: Tensor) -> Tensor:
        """Returns the numbers of some tokens: float32, (tokens,)."""

    def __call__(self, vectors: Tensor) -> Tensor:
        """Reads some tokens.

        Raises:
            HookTypeError: they are no vectors of this reading's width.
        """
        if vectors.dim() < 2 or not vectors.is_floating_point():  # noqa: PLR2004 (tokens, width)
            msg = (
                f"{type(self).__name__} reads vectors of floating point, got a tensor of "
                f"{vectors.dtype} with the shape {tuple(vectors.shape)} for {len(vectors)} tokens"
            )
            raise HookTypeError(msg)
        flat = vectors.flatten(1).to(torch.float32)
        if (reason := refusal_of(self, flat.shape[1])) is not None:
            raise HookTypeError(reason)
        return self._read(flat)

    @property
    def width(self) -> int | None:
        """Width of the vectors; None for any."""
        found = [getattr(self, name) for name in self.tensors]
        return next((each.shape[-1] for each in found if each is not None), None)

    def __repr__(self) -> str:
        own = ((it.name, getattr(self, it.name), it.default) for it in dataclasses.fields(self))
        shown = [f"{name}={_shown(it)}" for name, it, default in own if it is not default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _vector(self, name: str) -> None:
        """Validates a field that is a vector, and keeps a copy of it."""
        value = getattr(self, name)
        expect(value, Tensor, f"{name} of {type(self).__name__} must be a tensor")
        if not value.is_floating_point() or value.dim() != 1:
            msg = (
                f"{name} of {type(self).__name__} must be a vector of floating point, got "
                f"{value.dtype} of the shape {tuple(value.shape)}"
            )
            raise HookTypeError(msg)
        if not bool(value.isfinite().all()):
            msg = f"{name} of {type(self).__name__} must not have NaN or infinities"
            raise ValueError(msg)
        self._keep(name, value)

    def _keep(self, name: str, value: Tensor) -> None:
        # A copy, as a later write in place would change some calls and not others.
        with lasting():
            kept = value if value.requires_grad else value.detach().clone()
        object.__setattr__(self, name, kept)

    def _number(self, name: str) -> None:
        """Validates a field that is a finite number."""
        number = finite(getattr(self, name), f"{name} of {type(self).__name__}")
        object.__setattr__(self, name, number)


def refusal_of(reading: Reading, width: int) -> str | None:
    """Returns why a reading cannot read vectors of a width; None if it can."""
    if isinstance(reading, TokenProbability) and max(reading.ids) >= width:
        return f"token id {max(reading.ids)} of {reading!r} is out of range of {width} logits"
    if reading.width in {None, width}:
        return None
    return f"{reading!r} reads vectors of width {reading.width}, got {width}"


def reading_key(reading: Reading) -> tuple[Any, ...]:
    """Returns a key that is the same for readings that `JoinedReading` joins."""
    fields = [(it.name, getattr(reading, it.name)) for it in dataclasses.fields(reading)]
    tensors = [value for _, value in fields if isinstance(value, Tensor)]
    if any(each.requires_grad for each in tensors):
        return ("trained", id(reading))  # a copy of the values would miss later steps
    if any(each.dim() > 1 for each in tensors):
        return reading.content()
    shapes = (
        it.shape if isinstance(it, Tensor) else None if isinstance(it, float) else content_of(it)
        for _, it in fields
    )
    return (type(reading), *shapes)


class JoinedReading:
    """Readings of one [key](reading_key), each for its tokens.

    Args:
        readings: at least one.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._first = first = readings[0]
        self._tables: dict[str, Tensor] = {}
        """Values of each field, one for each reading; none if the readings are equal."""
        self._on_device: dict[torch.device, Reading] = {}
        """Reading that has the tables in place of its fields, by device."""
        names = [field.name for field in dataclasses.fields(first)]
        tensors = [it for it in (getattr(first, name) for name in names) if isinstance(it, Tensor)]
        if all(each is first for each in readings) or any(it.dim() > 1 for it in tensors):
            return
        with lasting():
            for name in names:
                values = [getattr(each, name) for each in readings]
                if isinstance(values[0], Tensor):
                    cast = [each.detach().to("cpu", torch.float32) for each in values]
                    self._tables[name] = torch.stack(cast)
                elif isinstance(values[0], float):
                    self._tables[name] = torch.tensor(values, dtype=torch.float32, device="cpu")

    def __call__(self, vectors: Tensor, counts: list[int]) -> Tensor:
        """Reads tokens; `counts`: how many are of each reading, one after the other.

        Raises:
            HookTypeError: see `Reading`.
        """
        if not self._tables:
            return self._first(vectors)
        device = vectors.device
        if (reading := self._on_device.get(device)) is None:
            with lasting():
                tables = {name: table.to(device) for name, table in self._tables.items()}
            reading = self._on_device[device] = self._with(tables)
        if counts.count(1) < len(counts):
            rows = [number for number, count in enumerate(counts) for _ in range(count)]
            index = torch.tensor(rows, device=device)
            reading = self._with({name: getattr(reading, name)[index] for name in self._tables})
        return reading(vectors)

    def _with(self, tables: dict[str, Tensor]) -> Reading:
        """Returns a reading with tables in place of its fields."""
        reading = copy.copy(self._first)
        vars(reading).update(tables)
        return reading


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    sizes = "x".join(map(str, value.shape)) or "scalar"
    return f"<{sizes} {str(value.dtype).removeprefix('torch.')}>"


def _in(vectors: Tensor, tensor: Tensor) -> Tensor:
    """Returns a field of a reading where the vectors are, in their dtype."""
    return tensor.to(vectors)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dot(Reading):
    """Dot product with a direction, plus a bias.

    Args:
        direction: as wide as the vectors, of any length.
        bias: is added.

    Raises:
        HookTypeError: an argument has the wrong type or shape.
        ValueError: `bias` is not finite.
    """

    tensors = ("direction",)

    direction: Tensor
    bias: float = 0.0

    def __post_init__(self) -> None:
        self._vector("direction")
        self._number("bias")

    def _read(self, vectors: Tensor) -> Tensor:
        # Not a product of matrices: autocast runs those in lower precision.
        read: Tensor = (vectors * _in(vectors, self.direction)).sum(-1) + self.bias
        return read


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Cosine(Reading):
    """Cosine between the vector and a direction, from -1 to 1; 0 for a vector of zeros.

    Args:
        direction: as wide as the vectors, of a length from 1e-18 to 1e18.
        projected: read `cos(h, tanh(P h))` instead, where `P` projects onto the direction: the form
            of conditional activation steering (CAST, arXiv 2409.05907), for its thresholds. It
            reads the same for a direction and its opposite.

    Raises:
        HookTypeError: an argument has the wrong type or shape.
        ValueError: the direction has another length, NaN or infinities.
    """

    tensors = ("direction",)

    direction: Tensor
    projected: bool = False

    def __post_init__(self) -> None:
        self._vector("direction")
        expect(self.projected, bool, "projected of Cosine must be a bool")
        check_length(self.direction, "direction of Cosine")

    def _read(self, vectors: Tensor) -> Tensor:
        direction = _in(vectors, self.direction)
        if self.projected:
            squared = (direction * direction).sum(-1, keepdim=True)
            along = (vectors * direction).sum(-1, keepdim=True) / squared
            direction = (along * direction).tanh()
        lengths = vector_norm(vectors, dim=-1) * vector_norm(direction, dim=-1)
        cosines: Tensor = (vectors * direction).sum(-1) / lengths.masked_fill(lengths == 0, 1.0)
        return cosines


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Norm(Reading):
    """Euclidean length of the vector."""

    def _read(self, vectors: Tensor) -> Tensor:
        lengths: Tensor = vector_norm(vectors, dim=-1)
        return lengths


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Probe(Reading):
    """Probability that a linear classifier gives to a class.

    With `z = (x - mean) / scale`, as a `StandardScaler` does: `sigmoid(weights . z + bias)` for
    weights of (width,), or the softmax of several classes at `index` for (classes, width).

    Args:
        weights: of one class, or of several.
        bias: a number, or one for each class.
        mean: is subtracted from the vectors; None for 0.
        scale: divides them then; None for 1.
        index: class whose probability is read, for weights of several.

    Raises:
        HookTypeError: an argument has the wrong type or shape.
        ValueError: `index` is out of range, missing, or passed for weights of one class.
    """

    tensors = ("weights", "mean", "scale")

    weights: Tensor
    bias: Tensor | float = 0.0
    mean: Tensor | None = None
    scale: Tensor | None = None
    index: int | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "scale"):
            if getattr(self, name) is not None:
                self._vector(name)
        expect(self.weights, Tensor, "weights of Probe must be a tensor")
        if not self.weights.is_floating_point() or self.weights.dim() not in {1, 2}:
            msg = (
                "weights of Probe must be of floating point and have the shape (width,) or "
                f"(classes, width), got {self.weights.dtype} of {tuple(self.weights.shape)}"
            )
            raise HookTypeError(msg)
        self._keep("weights", self.weights)
        self._check_bias()
        widths = {
            getattr(self, it).shape[-1] for it in self.tensors if getattr(self, it) is not None
        }
        if len(widths) > 1:
            msg = f"weights, mean and scale of Probe must have one width, got {sorted(widths)}"
            raise HookTypeError(msg)
        expect(self.index, int | None, "index of Probe must be an int")
        classes = None if self.weights.dim() == 1 else len(self.weights)
        if (classes is None) != (self.index is None) or not 0 <= (self.index or 0) < (classes or 1):
            known = "none for weights of one class" if classes is None else f"0 to {classes - 1}"
            msg = f"index of Probe must be {known}, got {self.index}"
            raise ValueError(msg)

    def _check_bias(self) -> None:
        if not isinstance(self.bias, Tensor):
            self._number("bias")
            return
        shape = self.weights.shape[:-1]
        if self.bias.shape not in {shape, shape or (1,)} or not self.bias.is_floating_point():
            msg = (
                f"bias of Probe must be of floating point and have the shape {tuple(shape)}, got "
                f"{self.bias.dtype} of {tuple(self.bias.shape)}"
            )
            raise HookTypeError(msg)
        self._keep("bias", self.bias.reshape(shape))

    def _read(self, vectors: Tensor) -> Tensor:
        z = vectors if self.mean is None else vectors - _in(vectors, self.mean)
        z = z if self.scale is None else z / _in(vectors, self.scale)
        bias = _in(vectors, self.bias) if isinstance(self.bias, Tensor) else self.bias
        weights = _in(vectors, self.weights)
        if self.index is None:
            return ((z * weights).sum(-1) + bias).sigmoid()
        with torch.autocast(z.device.type, enabled=False):
            logits = z @ weights.T + bias
        return logits.softmax(-1)[:, self.index]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TokenProbability(Reading):
    """Summed probability of some next tokens. For raw logits, as at `@logits`.

    Args:
        ids: token ids, at least one.

    Raises:
        HookTypeError: `ids` are not ints.
        ValueError: `ids` is empty, or an id is negative or repeated.
    """

    ids: Sequence[int]

    def __post_init__(self) -> None:
        given = (self.ids,) if isinstance(self.ids, int) else self.ids
        expect(given, list | tuple, "ids of TokenProbability must be a list of ints")
        for each in given:
            expect(each, int, "ids of TokenProbability must be a list of ints")
        if not given or min(given) < 0 or len({*given}) < len(given):
            msg = f"ids of TokenProbability must be token ids, each once, got {list(given)}"
            raise ValueError(msg)
        object.__setattr__(self, "ids", tuple(given))

    def _read(self, vectors: Tensor) -> Tensor:
        return vectors.softmax(-1)[:, list(self.ids)].sum(-1)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaxProbability(Reading):
    """Probability of the most probable next token. For raw logits, as at `@logits`."""

    def _read(self, vectors: Tensor) -> Tensor:
        return vectors.softmax(-1).amax(-1)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Entropy(Reading):
    """Entropy of the distribution of the next token, in nats. For raw logits, as at `@logits`."""

    def _read(self, vectors: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(vectors.softmax(-1)).sum(-1)
        return entropy


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FeatureActivation(Reading):
    """Value of a feature of a dictionary, as its encoder computes it, in float32.

    Works for a transcoder too, in a gate at its `reads`.

    Args:
        dictionary: the dictionary of the feature.
        index: number of the feature.
        unit: `"raw"`, or `"max"` for multiples of the dictionary's `max_activations`.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: the feature is out of range, or `unit` is unknown, or needs a maximum that is
            unknown or not above 0.
    """

    dictionary: Dictionary
    index: int
    unit: str = "raw"

    def __post_init__(self) -> None:
        expect(self.dictionary, Dictionary, "dictionary of FeatureActivation must be a Dictionary")
        expect(self.index, int, "index of FeatureActivation must be an int")
        places = checked_index(self.dictionary, self.index, "FeatureActivation")
        if self.unit not in UNITS:
            msg = f"unit of FeatureActivation must be one of {', '.join(UNITS)}, got {self.unit!r}"
            raise ValueError(msg)
        size = float(maxima_of(self.dictionary, places)) if self.unit == "max" else 1.0
        object.__setattr__(self, "_size", size)
        object.__setattr__(self, "_values", FeatureValues(self.dictionary, places))

    @property
    def width(self) -> int:
        """Width of the vectors."""
        return self.dictionary.d_in

    def _read(self, vectors: Tensor) -> Tensor:
        values: Tensor = vars(self)["_values"].of(vectors)[:, 0]
        size: float = vars(self)["_size"]
        return values if size == 1 else values / size
