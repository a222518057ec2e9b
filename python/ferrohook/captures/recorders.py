"""Native recorders of a capture on modules, for the calls of one scope, and their options."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeAlias, TypedDict, cast

import torch

from ferrohook._core import Collector, HookHandle, RootCalls, record_all
from ferrohook.attach.instrument import registry_of
from ferrohook.attach.priorities import AHEAD_OF_ALL, BEHIND_ALL
from ferrohook.captures.captured import CapturedPart, Recorded, RecordedGradients
from ferrohook.captures.convert import check_index, converter, keeps_rows
from ferrohook.dictionaries.features import KeptFeatures
from ferrohook.errors import HookTypeError
from ferrohook.tokens.positions import check_at
from ferrohook.util.arguments import at_least, check_copy, check_output_index, expect
from ferrohook.util.host_copies import HostCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from ferrohook._core import Frame
    from ferrohook.captures.convert import Index
    from ferrohook.dictionaries.dictionary import Dictionary
    from ferrohook.names.places import Head, Place
    from ferrohook.tokens.positions import At
    from ferrohook.tokens.tracking import Tracker


_BYTE: Final = 2**8
"""Experts at most whose ids are captured as uint8."""
Calls: TypeAlias = 'Literal["last", "all"] | int'
"""Calls of each module that a capture stores."""


class CaptureKeywords(TypedDict, total=False):
    """Options of a capture without `calls`, which decides the type of its values; see `capture`."""

    at: At
    inputs: bool
    output_index: object
    detach: bool
    device: torch.device | str | None
    dtype: torch.dtype | None
    slice: Index
    copy: Literal["checked", "clone", "ref"]
    grads: bool
    max_bytes: int | None
    stop: bool


class CaptureOptions(NamedTuple):
    """Validated options of a capture; see `capture`."""

    stop: bool
    cut: bool
    """True with a `slice`."""
    only_last: bool
    reads_features: bool
    """True with `features`, which are read from whole tensors."""
    copies: HostCopies
    collector: dict[str, Any]
    """Keyword arguments of the `Collector`."""


def options_of(  # noqa: PLR0913 (the options of `capture`)
    *,
    at: At = None,
    inputs: bool = False,
    output_index: object = None,
    detach: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    slice: Index = None,  # noqa: A002 (the field's term)
    copy: str = "checked",
    calls: Any = "last",
    grads: bool = False,
    max_bytes: int | None = None,
    stop: bool = False,
    features: Dictionary | None = None,
    top: int | None = None,
    index: int | Sequence[int] | None = None,
) -> CaptureOptions:
    """Validates the options of a capture; see `capture` and `keep` for them and their errors."""
    check_at(at)
    if at is not None and grads:
        msg = (
            "grads=True cannot be combined with at=: a gradient reaches the whole tensor, not the "
            "tokens that at= selects. Capture the gradient without at=, then select its tokens"
        )
        raise HookTypeError(msg)
    check_copy(copy)
    flags = {"inputs": inputs, "detach": detach, "grads": grads, "stop": stop}
    for name, flag in flags.items():
        expect(flag, bool, f"{name} must be a bool")
    check_output_index(output_index, "output_index", object)
    if dtype is not None:
        expect(dtype, torch.dtype, "dtype must be a torch.dtype")
        _check_converts(dtype)
    check_index(slice)
    if at is not None and slice is not None and not keeps_rows(slice, 0):
        msg = (
            f"slice={slice!r} chooses among the tokens that at= has chosen: choose them with at=, "
            "and slice the other dimensions, as with slice=(..., 3)"
        )
        raise HookTypeError(msg)
    read = None
    if features is not None or top is not None or index is not None:
        read = KeptFeatures(cast("Dictionary", features), top, index)
        unfit = {"slice": slice is not None, "grads": grads, "copy": copy != "checked"}
        unfit["dtype, with top"] = dtype is not None and top is not None
        if wrong := [name for name, given in unfit.items() if given]:
            msg = f"features= stores values of features, not the tensor: leave out {wrong[0]}="
            raise HookTypeError(msg)
    copies = HostCopies()
    target = None if device is None else _available(device)
    return CaptureOptions(
        stop=stop,
        cut=slice is not None,
        only_last=calls == "last",
        reads_features=read is not None,
        copies=copies,
        collector={
            "detach": detach,
            "copy": copy,
            "keep": _calls_to_keep(calls),
            "joins": calls == "last",
            "convert": converter(copies, target, dtype, slice, copy, read),
            "grads": grads,
            "max_bytes": None if max_bytes is None else at_least(1, "max_bytes", max_bytes),
        },
    )


def _check_converts(dtype: torch.dtype) -> None:
    try:
        torch.empty(1, device="cpu").to(dtype)
    except (NotImplementedError, RuntimeError) as error:  # quantised, packed bits
        msg = f"dtype must be one that floating-point tensors can be converted to, got {dtype}"
        raise HookTypeError(msg) from error


def _available(device: torch.device | str) -> torch.device:
    """Returns a device with its index ("cuda" is one of "cuda:0" and others)."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        msg = (
            f"device={str(device)!r} of a capture is not available: torch finds "
            f"{', '.join(found)}. Engines do not accept a device: their captures arrive on the CPU"
        )
        raise RuntimeError(msg) from error


def _calls_to_keep(calls: Any) -> int | None:
    if isinstance(calls, str):
        if calls in _KEEP_NAMES:
            return _KEEP_NAMES[calls]
        msg = f"calls must be 'last', 'all' or a number of calls, got {calls!r}"
        raise ValueError(msg)
    return at_least(1, "calls", calls, "'last', 'all' or a number of calls")


_KEEP_NAMES = {"last": 1, "all": None}


class CapturePlace(NamedTuple):
    """Collector and token source of a recorder, in the core's form."""

    capture: int | None = None
    """Index among the captures of a plan; None outside of plans."""
    mask: int | None = None
    """Index of the captured positions; None for all tokens."""
    tracker: Tracker | None = None
    """Finds the positions outside of plans."""


class Recorders(NamedTuple):
    """Recorders of a capture, or of a `keep` in a plan."""

    places: dict[str, int]
    """Index of each name in the collector."""
    options: CaptureOptions
    collector: Collector
    """Collector; of a plan, the template of its requests' collectors."""
    handles: list[HookHandle]
    """Handles in the order of the names."""
    multipliers: dict[int, float]
    """Factors of captured tensors, by index, where they are not 1."""
    heads: dict[int, Head]
    """Heads to select from captured tensors, by index."""

    @classmethod
    def begin(  # noqa: PLR0913 (the last two are of plans)
        cls,
        model: nn.Module,
        places: Mapping[str, Place],
        options: CaptureOptions,
        scope: Frame,
        *,
        priority_of: Callable[[Place], int] | None = None,
        place: CapturePlace | None = None,
    ) -> Self:
        """Records the calls in a scope, until it is left, of modules that are instrumented.

        Args:
            model: where calls end that are stopped.
            places: by name.
            options: of the capture.
            scope: the scope.
            priority_of: priority of a place's recorder in a plan; after all in a capture.
            place: of the capture in a plan, or of its positions.
        """
        root = registry_of(model) if options.stop else None
        everything = [*places.values()]
        casts = {
            index: torch.uint8 if it.experts <= _BYTE else torch.uint16
            for index, it in enumerate(everything)
            if it.experts is not None
        }
        collector = Collector(
            [*places],
            stop=None if root is None else root.module,
            casts=casts or None,
            **options.collector,
        )
        handles: dict[int, HookHandle] = {}
        for (priority, inputs, _), indices in _alike(everything, priority_of).items():
            own = [everything[index].module for index in indices]
            part = everything[indices[0]].part
            recorded = record_all(
                collector, own, priority, scope, inputs, part, place=place, indices=indices
            )
            handles |= zip(indices, recorded, strict=True)
        if root is not None:  # after the recorders: the start and end of calls that may be stopped
            calls = RootCalls(collector, place)
            root.register("forward_pre", calls, priority=AHEAD_OF_ALL, scope=scope)
            root.register("forward", calls, priority=BEHIND_ALL, always_call=True, scope=scope)
        # Without the GIL, a dict whose keys another thread made is read under its lock, unless they
        # are interned.
        indices_of = dict(zip(map(sys.intern, places), range(len(places)), strict=True))
        in_order = [handles[index] for index in sorted(handles)]
        factors = {n: each.multiplier for n, each in enumerate(everything) if each.multiplier != 1}
        heads = {index: each.head for index, each in enumerate(everything) if each.head is not None}
        if options.reads_features and (heads or factors):
            name = next(it for n, it in enumerate(places) if n in {*heads, *factors})
            msg = (
                f"features= reads the whole tensor of a module, but {name} is "
                f"{'a head' if heads else 'a multiple'} of it"
            )
            raise HookTypeError(msg)
        if heads and options.cut:
            msg = (
                "slice= and a head, as in @z.3.5, both slice the same tensor: leave one of them out"
            )
            raise HookTypeError(msg)
        return cls(indices_of, options, collector, in_order, factors, heads)

    def part(self, collector: Collector, *, grads: bool = False) -> CapturedPart:
        """Returns the values in a collector, or their gradients."""
        only_last = self.options.only_last
        recorded = RecordedGradients if grads else Recorded
        values = recorded(collector, self.options.copies, joins=only_last and not grads)
        factors = {index: 1 / it if grads else it for index, it in self.multipliers.items()}
        return CapturedPart(self.places, values, only_last, factors, self.heads)


def _alike(
    places: list[Place], priority_of: Callable[[Place], int] | None
) -> dict[tuple[int, bool, Any], list[int]]:
    """Groups indices of places by priority, phase and part."""
    groups: defaultdict[tuple[int, bool, Any], list[int]] = defaultdict(list)
    for index, place in enumerate(places):
        priority = BEHIND_ALL if priority_of is None else priority_of(place)
        part = place.part
        if part is not None:
            steps = part if type(part) is tuple else (part,)
            plain = all(type(step) in {int, str} for step in steps)
            part = (type(part), part) if plain else id(part)
        groups[priority, place.inputs, part].append(index)
    return groups
