"""Dictionaries as tensors and settings that JSON can hold, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.dictionaries.formulas import Rounding
from ferrohook.util.arguments import expect
from ferrohook.util.texts import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch import Tensor

_MAXIMA: Final = "max_activations"
_NEEDED: Final = ("W_enc", "W_dec", "b_dec")
_WEIGHTS: Final = (*_NEEDED, "b_enc", "threshold", "b_gate", "b_mag", "r_mag", "W_skip", _MAXIMA)
_SETTINGS: Final = (
    *("activation", "apply_b_dec_to_input", "k", "name", "normalize_activations", "reads"),
    *("rescale_acts_by_decoder_norm", "rounding", "transcoder", "writes"),
)


def by_name(dictionaries: Iterable[Dictionary]) -> dict[str, Dictionary]:
    """Returns dictionaries by their names.

    Raises:
        HookTypeError: one is no `Dictionary`.
        ValueError: one has no name, or two have the same.
    """
    found: dict[str, Dictionary] = {}
    for each in dictionaries:
        expect(each, Dictionary, "dictionaries must be a list of Dictionary")
        if each.name is None or each.name in found:
            trouble = "has no name" if each.name is None else "has the name of another one"
            msg = f"{each!r} {trouble}: pass name= to Dictionary or Dictionary.load"
            raise ValueError(msg)
        found[each.name] = each
    return found


def weights_of(dictionary: Dictionary) -> dict[str, Tensor]:
    """Returns the tensors of a dictionary, under the names of its constructor."""
    found = {name: it for name, it in dictionary.weights.tensors.items() if name in _WEIGHTS}
    if dictionary.max_activations is not None:
        found[_MAXIMA] = dictionary.max_activations
    return found


def settings_of(dictionary: Dictionary) -> dict[str, Any]:
    """Returns the arguments of a dictionary that are no tensors, as JSON has them."""
    formula = dictionary.formula
    return {
        "activation": formula.activation,
        "apply_b_dec_to_input": formula.subtracts_bias,
        "k": formula.k or None,
        "name": dictionary.name,
        "normalize_activations": formula.normalization,
        "reads": dictionary.reads,
        "rescale_acts_by_decoder_norm": formula.rescales,
        "rounding": [name for name, it in formula.rounding._asdict().items() if it],
        "transcoder": formula.transcodes,
        "writes": dictionary.writes if formula.transcodes else None,
    }


def dictionary_of(weights: Mapping[str, Tensor], settings: Any) -> Dictionary:
    """Makes a dictionary from tensors and settings of an author who need not be trusted.

    Args:
        weights: as `weights_of` returns them.
        settings: as `settings_of` returns them; left out ones have their defaults.

    Raises:
        ValueError: a name is unknown or missing, or a shape or a value does not fit.
    """
    try:
        return _made(weights, settings)
    except (TypeError, ValueError) as error:
        name = settings.get("name") if isinstance(settings, dict) else None
        msg = f"the dictionary {name!r} is malformed: {error}"
        raise ValueError(msg) from error


def _made(weights: Mapping[str, Tensor], settings: Any) -> Dictionary:
    expect(settings, dict, "its settings must be an object")
    _check_names("setting", settings, _SETTINGS, ("activation", "name"))
    _check_names("tensor", weights, _WEIGHTS, _NEEDED)
    own: dict[str, Any] = {**settings, **weights}
    for name in ("activation", "name"):
        expect(own[name], str, f"its {name} must be a string")
    rounding = own.pop("rounding", [])
    expect(rounding, list, "its rounding must be a list")
    if wrong := [it for it in rounding if it not in Rounding._fields]:
        msg = f"its rounding must have names of {', '.join(Rounding._fields)}, got {wrong[0]!r}"
        raise ValueError(msg)
    return Dictionary(**own, rounding=Rounding(**dict.fromkeys(rounding, True)))


def _check_names(
    kind: str, found: Collection[str], known: Collection[str], needed: Collection[str]
) -> None:
    if unknown := {*found} - {*known}:
        msg = f"unknown {kind} {min(unknown)!r}: the {kind}s are {listed(known)}"
        raise ValueError(msg)
    if missing := [name for name in needed if name not in found]:
        msg = f"the {kind} {missing[0]!r} is missing"
        raise ValueError(msg)
