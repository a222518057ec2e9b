"""Interventions on features of a dictionary."""

from __future__ import annotations

import math
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from torch import Tensor

from ferrohook._core import InterventionBase
from ferrohook.dictionaries.dictionary import Dictionary, flattened
from ferrohook.dictionaries.formulas import encode, exact, needs_all, output_scale
from ferrohook.dictionaries.weights import StoredWeights, columns_of
from ferrohook.effects.interventions import Intervention
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import at_least, check_output_index, expect, finite
from ferrohook.util.never_trace import never_trace, never_trace_frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ferrohook.util.arguments import OutputIndex

NUMBERS: Final[dict[str, float]] = {
    "set": math.nan,
    "add": 0.0,
    "scale": 1.0,
    "low": -math.inf,
    "high": math.inf,
}
"""The numbers of each feature by name, and what stands for None."""
_OF_VALUES: Final = ("set", "add", "low", "high")
"""Numbers in the unit of a feature's values."""
_MARKS: Final = ("only_active", "changed")
"""Marks of each feature by name, see `_Edit`."""
UNITS: Final = ("raw", "max")
"""Units of a feature's values: its own, and its largest known one."""
_STAND_IN: Final = torch.zeros(1, 1, device="cpu")
"""The vector that native code asks for and the formula does not need. It has no width."""
ONLY_IN_PLANS: Final = (
    "features of a transcoder are read at one place and changed at another, which only a plan "
    "does: fh.Plan(fh.on(dictionary.writes, fh.Feature(...)))"
)


class FeatureValues:
    """Values of some features of a dictionary, computed from their columns where the kind allows.

    Computed in float32, in float64 for tensors of float64, whatever the dtype of the weights.

    Args:
        dictionary: it is not copied.
        index: numbers of features.
        more: further tensors, with a number for each of the features.
    """

    def __init__(
        self, dictionary: Dictionary, index: Sequence[int], more: dict[str, Tensor] | None = None
    ) -> None:
        self.dictionary = dictionary
        columns = columns_of(dictionary.weights.tensors, list(index))
        device = columns["b_dec"].device
        columns["index"] = torch.tensor(list(index), device=device)
        columns |= {name: each.to(device) for name, each in (more or {}).items()}
        self._columns = StoredWeights(columns)

    def columns(self, x: Tensor) -> Mapping[str, Tensor]:
        """Returns the weights of the features and the further tensors, as a tensor takes them."""
        return self._columns.on(x.device, computed_in(x))

    def of(self, x: Tensor) -> Tensor:
        """Reads the features.

        Args:
            x: (..., d_in), of the dtype that `computed_in` returns.

        Returns:
            Values, (..., features).
        """
        columns = self.columns(x)
        if needs_all(self.dictionary.formula):
            return all_values(self.dictionary, x).index_select(-1, columns["index"])
        return encode(self.dictionary.formula, columns, x)


def computed_in(x: Tensor) -> torch.dtype:
    """Returns the dtype in which features of a tensor are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def all_values(dictionary: Dictionary, x: Tensor) -> Tensor:
    """Returns the values of all features in the dtype of `x`, (..., d_in), as (..., d_sae)."""
    return encode(dictionary.formula, dictionary.weights.on(x.device, x.dtype), x)


class _Edit:
    """Change of some features, by one request or by members of a batch: what native code calls.

    Args:
        dictionary: has the features.
        index: numbers of the features.
        tables: the numbers of each feature by the names in `NUMBERS`, and by those in `_MARKS`
            whether it is changed at all, and only where it is active; (features,), or (members,
            features).
    """

    def __init__(
        self, dictionary: Dictionary, index: Sequence[int], tables: dict[str, Tensor]
    ) -> None:
        self._read = FeatureValues(dictionary, index, tables)
        self._index, self._tables = index, tables
        absent = {name: tables[name] == it for name, it in NUMBERS.items()}
        absent["set"] = tables["set"].isnan()
        absent |= {"only_active": ~tables["only_active"], "changed": tables["changed"]}
        self._used = {name for name, each in absent.items() if not bool(each.all())}
        """Tables that make a difference, with the others of the change."""
        for beside in ({"scale", "add"}, {"low", "high"}):
            self._used |= beside if self._used & beside else set()
        self._sets_all = not bool(absent["set"].any())
        self.joined = lru_cache(maxsize=4)(self._joined)
        """`_joined`, which makes the changes of a batch that begins with this one once."""

    def __call__(self, x: Tensor, _stand_in: Tensor) -> Tensor:
        """Returns the changed tensor.

        Raises:
            HookTypeError: the dictionary is a transcoder, or does not read such tensors.
        """
        if self._read.dictionary.transcoder:
            raise HookTypeError(ONLY_IN_PLANS)
        flat = flattened(self._read.dictionary, x).to(computed_in(x))
        return self._changed(x, flat, self._read.columns(flat))

    @staticmethod
    def _joined(references: tuple[weakref.ref[_Edit], ...]) -> _Edit:
        """Returns the changes of several members, of features of one dictionary, as one.

        The cache of one must not keep the others, nor itself.
        """
        edits = [cast("_Edit", reference()) for reference in references]
        index = sorted({feature for edit in edits for feature in edit._index})
        places = {feature: place for place, feature in enumerate(index)}
        absent = NUMBERS | dict.fromkeys(_MARKS, False)
        tables = {
            name: torch.full((len(edits), len(index)), absent[name], dtype=each.dtype, device="cpu")
            for name, each in edits[0]._tables.items()
        }
        for member, edit in enumerate(edits):
            own = [places[feature] for feature in edit._index]
            for name, table in tables.items():
                table[member, own] = edit._tables[name]
        return _Edit(edits[0]._read.dictionary, index, tables)

    def of_members(self, x: Tensor, members: Tensor | None, dim: int) -> Tensor:
        """Returns the changed rows of several members.

        Args:
            x: rows of the members, one member after the other.
            members: number of each row's member; None if each has one row.
            dim: dimension of the rows.
        """
        flat = flattened(self._read.dictionary, x).to(computed_in(x))
        own = dict(self._read.columns(flat))
        between = [1] * (flat.dim() - dim - 2)
        for name in self._used:
            rows = own[name] if members is None else own[name].index_select(0, members)
            own[name] = rows.view(len(rows), *between, rows.shape[-1])
        return self._changed(x, flat, own)

    def _changed(self, x: Tensor, flat: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Returns the changed tensor.

        Args:
            x: the tensor.
            flat: it as (..., d_in), in the dtype of the computation.
            own: weights and tables of the features.
        """
        with exact(x):
            change = self.change_of(flat, own) @ own["W_dec"]
        scale = output_scale(self._read.dictionary.formula, flat)
        change = change if scale is None else change * scale
        return (flat + change).to(x.dtype).reshape(x.shape)

    def change_of(self, flat: Tensor, own: Mapping[str, Tensor] | None = None) -> Tensor:
        """Returns the addition to the values, in units of the decoder's rows, (..., features).

        Args:
            flat: the input, (..., d_in), in the dtype of the computation.
            own: weights and tables of the features, if they differ by row.
        """
        own = self._read.columns(flat) if own is None else own
        values = self._read.of(flat)
        change = self._new(values, own) - values
        if "only_active" in self._used:
            change = torch.where(own["only_active"] & (values == 0), 0.0, change)
        if "changed" in self._used:  # a feature of other members may be infinite here
            change = torch.where(own["changed"], change, 0.0)
        return change / own["norms"] if self._read.dictionary.formula.rescales else change

    def written(self, change: Tensor) -> Tensor:
        """Returns the change of a tensor, (..., d_out), by one of values, (..., features)."""
        with exact(change):
            return change @ self._read.columns(change)["W_dec"]

    def _new(self, values: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Returns the new values of the features."""
        if self._sets_all:
            return own["set"]
        new = values
        if "scale" in self._used:
            new = new * own["scale"] + own["add"]
        if "low" in self._used:
            new = new.clamp(own["low"], own["high"])
        return torch.where(own["set"].isnan(), new, own["set"]) if "set" in self._used else new


for _function in (_Edit.__call__, _Edit.of_members, FeatureValues.of):
    never_trace_frame(_function, "native code calls it")


class Feature(Intervention):
    """Changes features of a dictionary, and nothing else in the tensor.

    For a value `f` that becomes `new`, the tensor `x` becomes `x + (new - f) * row`, with the
    decoder's `row` scaled as in the reconstruction: times the norm that decoding restores. The
    error of the reconstruction stays in `x`. Several features are read once and changed together.
    In a top-k dictionary, setting a feature outside the top k displaces no other.

    Features of a transcoder are read at its `reads`, and change the tensor `x` at the entry's place
    to `x + (new - f) * row`. This needs a plan, one place that runs after `reads`, and tokens whose
    positions are known.

    `new` is `set`; or `scale * f + add`, at least `low` and at most `high`.

    Values are computed in float32, in float64 for tensors of float64, from the columns of these
    features only, or from all columns where features compete (`"topk"`, `"abstopk"`, `"groupmax"`).

    Args:
        dictionary: an autoencoder, or a transcoder with its `reads`.
        index: number of a feature, or several numbers.
        set: new value; like the others a number, or a list with a number or None for each feature.
        add: is added to the value.
        scale: multiplies the value.
        low: least value.
        high: greatest value.
        only_active: change a feature only where its value is not 0.
        unit: `"raw"`, or `"max"` for `set`, `add`, `low` and `high` in multiples of the
            dictionary's `max_activations`.
        output_index: the changed tensor, see `Intervention`.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: a feature is out of range or named twice, a number is not finite, no change is
            passed, `set` comes with another change of the same feature, or `unit` is unknown.

    Examples:
        >>> sae = fh.Dictionary.load("sae/blocks.8.hook_resid_post")
        >>> plan = fh.Plan(fh.on(sae.reads, fh.Feature(sae, 3, set=5.0)))
    """

    __slots__ = ("_edit",)
    broadcasts = False
    real = True

    _edit: _Edit

    def __new__(  # noqa: D102, PLR0913 (see the class)
        cls,
        dictionary: Dictionary,
        index: int | Sequence[int],
        *,
        set: float | Sequence[float | None] | None = None,  # noqa: A002 (the field's word)
        add: float | Sequence[float | None] | None = None,
        scale: float | Sequence[float | None] | None = None,
        low: float | Sequence[float | None] | None = None,
        high: float | Sequence[float | None] | None = None,
        only_active: bool = False,
        unit: str = "raw",
        output_index: OutputIndex = None,
    ) -> Self:
        expect(dictionary, Dictionary, "dictionary of Feature must be a Dictionary")
        places = checked_index(dictionary, index, "Feature")
        given = {"set": set, "add": add, "scale": scale, "low": low, "high": high}
        numbers = {name: _numbers(name, it, len(places)) for name, it in given.items()}
        _check_numbers(places, numbers)
        expect(only_active, bool, "only_active of Feature must be a bool")
        if unit not in UNITS:
            msg = f"unit of Feature must be one of {', '.join(UNITS)}, got {unit!r}"
            raise ValueError(msg)
        own = {
            name: torch.tensor(
                [absent if it is None else it for it in numbers[name]],
                dtype=torch.float64,
                device="cpu",
            )
            for name, absent in NUMBERS.items()
        }
        if unit == "max":
            maxima = maxima_of(dictionary, places)
            own |= {name: own[name] * maxima for name in _OF_VALUES}
        part: Any = check_output_index(output_index, "output_index of Feature")
        own["only_active"] = torch.full((len(places),), only_active, device="cpu")
        own["changed"] = torch.ones(len(places), dtype=torch.bool, device="cpu")
        edit = _Edit(dictionary, places, own)
        self = InterventionBase.__new__(
            cls,
            edit,
            (),
            part,
            _STAND_IN,
            False,  # noqa: FBT003 (native)
            False,  # noqa: FBT003
            dictionary,
            traces=False,
        )
        self._edit = edit
        self._made = None
        self.output_index = part
        self.values = (dictionary, places, *numbers.values(), only_active, unit)
        return self

    @staticmethod
    def formula(x: Tensor, edit: Any) -> Tensor:  # noqa: D102 (see the base)
        changed: Tensor = edit(x, x)
        return changed

    @property
    def dictionary(self) -> Dictionary:
        """The dictionary."""
        dictionary: Dictionary = self.values[0]
        return dictionary

    @property
    def index(self) -> tuple[int, ...]:
        """Numbers of the features."""
        index: tuple[int, ...] = self.values[1]
        return index

    @property
    def width(self) -> int:
        """Width of the tensors that it changes, heads counted together."""
        return self.dictionary.d_out

    def fits(self, shape: Sequence[int]) -> bool:  # noqa: D102 (see the base)
        return self.width in {shape[-1], math.prod(shape[-2:])}

    def vector_as(self, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG002, D102
        self._check_dtype(dtype)
        return _STAND_IN

    def _together(self, x: Tensor, hooks: list[Self], members: Tensor | None, dim: int) -> Tensor:
        """Changes the rows of several members of a batch, read at once.

        Args:
            x: rows of the members, one member after the other.
            hooks: one for each member, with this one's dictionary.
            members: number of each row's member; None if each has one row.
            dim: dimension of the rows.
        """
        joined = self._edit.joined(tuple(weakref.ref(hook._edit) for hook in hooks))
        return joined.of_members(x, members, dim)

    def at_part(self, output_index: OutputIndex) -> Self:  # noqa: D102 (see the base)
        made: Self = _feature(type(self), self.values, output_index)
        return made

    def needs(self) -> Iterator[str]:  # noqa: D102 (see the base)
        yield "transcoder" if self.dictionary.transcoder else "change"
        if self.output_index is not None:
            yield "output_index"

    def __reduce__(self) -> Any:
        return _feature, (type(self), self.values, self.output_index)

    def __repr__(self) -> str:
        shown = [f"{name}={it!r}" for name, it in options_of(self).items()]
        return f"Feature({', '.join([repr(self.dictionary), *shown])})"


never_trace(Feature, "_together", "native code calls it")


def _feature(cls: type[Feature], values: tuple[Any, ...], output_index: OutputIndex) -> Any:
    dictionary, index, *numbers, only_active, unit = values
    named: dict[str, Any] = {
        name: each for name, each in zip(NUMBERS, numbers, strict=True) if {*each} != {None}
    }
    return cls(
        dictionary,
        index,
        only_active=only_active,
        unit=unit,
        output_index=output_index,
        **named,
    )


def options_of(feature: Feature) -> dict[str, Any]:
    """Returns the arguments of a `Feature` after the dictionary that are not the default."""
    _, index, *numbers, only_active, unit = feature.values
    found: dict[str, Any] = {"index": index[0] if len(index) == 1 else list(index)}
    for name, each in zip(NUMBERS, numbers, strict=True):
        if any(it is not None for it in each):
            found[name] = each[0] if len({*each}) == 1 else list(each)
    if only_active:
        found["only_active"] = True
    if unit != UNITS[0]:
        found["unit"] = unit
    if feature.output_index is not None:
        found["output_index"] = feature.output_index
    return found


def checked_index(
    dictionary: Dictionary, index: int | Sequence[int], taker: str
) -> tuple[int, ...]:
    """Validates and returns numbers of features.

    Args:
        dictionary: that has the features.
        index: a number, or several.
        taker: start of an error's message, such as "Feature".

    Raises:
        HookTypeError: it is no int or list of ints.
        ValueError: a number is out of range or there twice, or there is none.
    """
    given = (index,) if isinstance(index, int) else index
    expected = f"index of {taker} must be an int or a list of ints"
    expect(given, list | tuple, expected)
    for each in given:
        expect(each, int, expected)
    most = dictionary.d_sae
    if not given or len({*given}) < len(given) or not all(0 <= it < most for it in given):
        msg = f"index of {taker} must be numbers from 0 to {most - 1}, each once, got {index!r}"
        raise ValueError(msg)
    return tuple(given)


def _numbers(name: str, given: Any, count: int) -> tuple[float | None, ...]:
    """Returns a number or None for each feature."""
    if not isinstance(given, list | tuple):
        given = (given,) * count
    if len(given) != count:
        msg = f"{name} of Feature must have a number for each of {count} features, got {len(given)}"
        raise ValueError(msg)
    name = f"{name} of Feature"
    return tuple(None if each is None else finite(each, name) for each in given)


def _check_numbers(index: tuple[int, ...], numbers: dict[str, tuple[float | None, ...]]) -> None:
    for place, feature in enumerate(index):
        own = {name: each[place] for name, each in numbers.items() if each[place] is not None}
        if not own or ("set" in own and len(own) > 1):
            msg = (
                f"feature {feature} needs set, or some of add, scale, low and high, got "
                f"{', '.join(own) or 'none'}"
            )
            raise ValueError(msg)
        low, high = own.get("low"), own.get("high")
        if low is not None and high is not None and low > high:
            msg = f"low must not exceed high, got {low} and {high} for feature {feature}"
            raise ValueError(msg)


def maxima_of(dictionary: Dictionary, index: tuple[int, ...]) -> Tensor:
    """Returns the largest known values of features.

    Raises:
        ValueError: they are unknown, or not above 0.
    """
    if dictionary.max_activations is None:
        msg = f"unit='max' needs max_activations, which {dictionary!r} does not have"
        raise ValueError(msg)
    maxima = dictionary.max_activations[list(index)].to(torch.float64)
    if not bool((maxima > 0).all()):
        wrong = index[int((maxima > 0).int().argmin())]
        msg = f"unit='max' needs a largest value above 0, and feature {wrong} has none"
        raise ValueError(msg)
    return maxima


class KeptFeatures:
    """Reads the features of a tensor that a capture stores.

    Args:
        dictionary: has the features.
        top: number of the largest values to store for each token; None with `index`.
        index: numbers of the features to store; None with `top`.

    Raises:
        HookTypeError: an argument has the wrong type, or both or none of `top` and `index` are
            passed.
        ValueError: `top` or a number of a feature is out of range.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        top: int | None = None,
        index: int | Sequence[int] | None = None,
    ) -> None:
        expect(dictionary, Dictionary, "features must be a Dictionary")
        if (top is None) == (index is None):
            msg = "features= needs top=, the number of largest values, or index=, the features"
            raise HookTypeError(msg)
        self._dictionary = dictionary
        self._top = top
        self._values = None
        if index is not None:
            self._values = FeatureValues(dictionary, checked_index(dictionary, index, "keep"))
        elif at_least(1, "top", cast("int", top)) > dictionary.d_sae:
            msg = f"top must be at most the number of features, {dictionary.d_sae}, got {top}"
            raise ValueError(msg)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the values, in float32 or in float64 for a tensor of float64.

        Args:
            x: (..., d_in), or (..., heads, head_dim).

        Returns:
            Values of the features at `index`, (..., features); or the `top` largest values and the
            numbers of their features, (..., top, 2), largest first.

        Raises:
            HookTypeError: the tensor does not fit the dictionary.
        """
        flat = flattened(self._dictionary, x).to(computed_in(x))
        if self._values is not None:
            return self._values.of(flat)
        values = all_values(self._dictionary, flat)
        ranks = values.abs() if self._dictionary.formula.activation == "abstopk" else values
        places = ranks.topk(cast("int", self._top), dim=-1).indices
        return torch.stack((values.gather(-1, places), places.to(values.dtype)), dim=-1)
