"""Places of the entries of a plan in a model, and the checks that need them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, cast

from torch import nn

from ferrohook._core import TokenChoice
from ferrohook.attach.attention import is_point
from ferrohook.attach.priorities import BEHIND_ALL
from ferrohook.dictionaries.transcoded import one_place
from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.gates.conditions import Ramp
from ferrohook.gates.readings import refusal_of
from ferrohook.plans.entries import Entry, GateEntry, HookEntry
from ferrohook.quantity import hooked_places_of, places_of
from ferrohook.tokens.tracking import with_tokens_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ferrohook._core import GateAggregation
    from ferrohook.attach.attention import AttentionPoint
    from ferrohook.effects.intervention import Intervention
    from ferrohook.names.places import Place


_VECTORS: Final = len(("batch", "length", "width"))
"""Dimensions of a tensor with a vector for each token."""


@contextlib.contextmanager
def naming(number: int) -> Iterator[None]:
    """Names the entry in errors of the block."""
    try:
        yield
    except (HookError, HookTypeError, SelectionError) as error:
        msg = f"entry {number} of the plan: {error}"
        raise type(error)(msg) from error


def find_places(model: nn.Module, number: int, entry: Entry) -> dict[str, Place]:
    """Returns the places of an entry in a model, by names of modules and quantities."""
    if not entry.has_places:
        return {}
    with naming(number):
        if isinstance(entry, HookEntry):
            places = hooked_places_of(model, entry.what, entry.phase)
        else:
            inputs = entry.options.get("inputs", False)
            part = entry.options.get("output_index")
            places = places_of(model, entry.what, inputs=inputs, output_index=part)
        if isinstance(entry, GateEntry):
            _check_gate(entry, places)
    if not entry.positioned:
        return places
    return {name: with_tokens_ahead(place) for name, place in places.items()}


def read_places(model: nn.Module, number: int, entry: Entry) -> dict[str, Place]:
    """Returns the place that a transcoder reads whose features an entry changes; {} for none.

    Raises:
        HookTypeError: it reads or writes several.
    """
    if not isinstance(entry, HookEntry) or entry.reads is None:
        return {}
    what, part = entry.reads
    with naming(number):
        one_place(hooked_places_of(model, entry.what, entry.phase))
        name, place = one_place(places_of(model, what, output_index=part))
    return {name: with_tokens_ahead(place)}


def _check_gate(entry: GateEntry, places: dict[str, Place]) -> None:
    """Validates the places of a gate.

    Raises:
        HookError: several are selected, and not listed one by one.
        HookTypeError: a tensor has a width that the reading cannot read.
    """
    if (problem := entry.sum_refusal(places)) is not None:
        raise HookError(problem)
    reading = entry.gate.reading
    for name, place in places.items():
        shape = place.shape
        if place.head is not None or shape is None or len(shape) != _VECTORS:
            continue  # a call shows the width
        if (reason := refusal_of(reading, shape[-1])) is not None:
            msg = f"{reason} at {name}"
            raise HookTypeError(msg)


def extent_of(entry: HookEntry, gates: dict[str, GateAggregation]) -> dict[str, Any]:
    """Returns which tokens a hook changes and how much: arguments of `masked`."""
    when, strength = entry.options.get("when"), entry.options.get("strength")
    follows = strength if isinstance(strength, Ramp) else None
    return {
        "condition": TokenChoice(gates, when, follows) if entry.gates else None,
        "strength": None if follows else strength,
    }


def priority_of_reader(
    entries: tuple[Entry, ...],
    found: list[dict[str, Place]],
    number: int,
    kept: Place,
) -> int:
    """Returns a priority with which a capture or a gate sees only the entries before it.

    Raises:
        HookError: entries after it run before one ahead of it, by their priorities.
    """
    ahead: list[tuple[int, int]] = []
    behind: list[tuple[int, int]] = []
    for other, (entry, places) in enumerate(zip(entries, found, strict=True)):
        if not isinstance(entry, HookEntry) or entry.phase.startswith("backward"):
            continue
        if any(it.module is kept.module and it.inputs == kept.inputs for it in places.values()):
            rank = -other - 1 if entry.options.get("prepend") else other
            (ahead if other < number else behind).append((-entry.options.get("priority", 0), rank))
    if not behind:
        return BEHIND_ALL
    first = min(behind)
    if ahead and max(ahead) > first:
        msg = (
            f"entry {number} of the plan reads {kept.quantity or kept.path!r} between entries that "
            "run in reverse order because of priority= or prepend=: let them run in the order of "
            "the plan"
        )
        raise HookError(msg)
    priority, rank = -first[0], first[1]
    # Entries are registered in their order, so the capture goes ahead of later entries, but for
    # a prepended one.
    return priority + 1 if rank < 0 else priority


def check_order(entries: Sequence[Entry], found: Sequence[Mapping[str, Place]]) -> None:
    """Validates that entries on a pattern run in their order: all at positions, or none.

    Raises:
        HookError: they do not.
    """
    numbers: dict[tuple[Any, str], list[int]] = {}
    for number, places in enumerate(found):
        for place in places.values():
            if is_point(place.module):
                point = cast("AttentionPoint", place.module)
                numbers.setdefault((point.points, point.name), []).append(number)
    for (points, name), whole in numbers.items():
        some = numbers.get((points, "queries"), []) if name == "pattern" else []
        one, other = min(whole), min(some, default=0)
        if some and any(isinstance(entries[each], HookEntry) for each in whole + some):
            msg = (
                f"entries {min(one, other)} and {max(one, other)} of the plan use one attention "
                "pattern, but only one of them has at=, so they would not run in the order of the "
                "plan: give at= to both or to neither"
            )
            raise HookError(msg)


def check_width(number: int, entry: HookEntry, places: dict[str, Place]) -> None:
    """Validates the width of a vector where a module says its own.

    Raises:
        HookTypeError: they differ.
    """
    intervention: Intervention = entry.hook
    if intervention.output_index is not None or entry.phase != "forward":
        return
    for name, place in places.items():
        own = None if place.inputs else width_of(place.module)
        shape = (own,) if place.shape is None and own is not None else place.shape
        if shape is not None and not intervention.fits(shape):
            msg = (
                f"entry {number} of the plan: {intervention!r} has a width of {intervention.width},"
                f" but the output of {name!r} ({type(place.module).__name__}) has {shape[-1]}"
            )
            raise HookTypeError(msg)


def width_of(module: nn.Module) -> int | None:
    """Returns the last dimension of a module's output, if its class shows it."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return module.normalized_shape[-1] if isinstance(module, nn.LayerNorm) else None
