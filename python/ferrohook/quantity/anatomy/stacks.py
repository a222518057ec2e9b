"""Stacks: chains of modules of which each takes the output of the one before it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ferrohook.effects.parts import SUM
from ferrohook.quantity.anatomy.observe import Hidden, ObservedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ferrohook.quantity.anatomy.observe import Look, ModuleCall

NUMBERED: Final = re.compile(r"\d+$")
"""Ends the path of a module that may be a block."""


class Block(NamedTuple):
    """A module of a stack in one look, with the places of the stream around it."""

    call: ModuleCall
    before: ObservedTensor
    after: ObservedTensor

    @property
    def path(self) -> str:
        """Its name."""
        return self.call.path


def chains(look: Look) -> list[list[Block]]:
    """Finds the chains of numbered modules that run once, outer ones first.

    A chain of one is any numbered module that takes and returns a tensor of one shape.
    """
    runs: dict[str, list[ModuleCall]] = {}
    for call in look.calls:
        if NUMBERED.search(call.path):
            runs.setdefault(call.path, []).append(call)
    calls = sorted((each[0] for each in runs.values() if len(each) == 1), key=lambda it: it.start)
    following: dict[str, tuple[ModuleCall, Any, Any]] = {}
    taken: set[str] = set()
    for place, call in enumerate(calls):
        for other in calls[place + 1 :]:
            if other.start < call.end or other.path in taken:
                continue
            link = _link(look, call, other, calls)
            if link is not None:
                following[call.path] = (other, *link)
                taken.add(other.path)
                break
    found = [_chain(look, call, following) for call in calls if call.path not in taken]
    return sorted(
        filter(None, found), key=lambda each: (each[0].path.count("."), each[0].call.start)
    )


def _link(
    look: Look, call: ModuleCall, other: ModuleCall, calls: Sequence[ModuleCall]
) -> tuple[Any, Any] | None:
    """Returns the parts of an output and of an input that are one tensor."""
    # Of a pair, the sum is the stream.
    for out, value in sorted(call.outputs.items(), key=lambda it: it[0] != SUM):
        if look.values[value].numel() == 1:
            continue
        if _beside(look, value, other, calls):
            continue
        for part, taken in other.inputs.items():
            if taken == value:
                return out, part
    return None


def _beside(look: Look, value: int, call: ModuleCall, calls: Iterable[ModuleCall]) -> bool:
    """Returns True if a module takes a value beside its stream, as for cross-attention.

    Its output is of another size; or it takes another tensor of this size too, and modules before
    or after it take this value as well.
    """
    size = look.values[value].numel()
    if all(look.values[each].numel() != size for each in call.outputs.values()):
        return True
    if all(look.values[each].numel() != size for each in {*call.inputs.values()} - {value}):
        return False
    apart = (each for each in calls if each.start > call.end or each.end < call.start)
    return any(value in each.inputs.values() for each in apart)


def _chain(
    look: Look, first: ModuleCall, following: dict[str, tuple[ModuleCall, Any, Any]]
) -> list[Block]:
    calls, links = [first], []
    while (step := following.get(calls[-1].path)) is not None:
        calls.append(step[0])
        links.append(step[1:])
    if not links:
        same = _same_shape(look, first)
        links = [] if same is None else [same]
    if not links:
        return []
    outs = [out for out, _ in links[: len(calls) - 1]]
    outs += [links[-1][0]] * (len(calls) - len(outs))
    parts = [links[0][1], *(part for _, part in links[: len(calls) - 1])]
    if outs[-1] not in calls[-1].outputs and (same := _same_shape(look, calls[-1])) is not None:
        outs[-1] = same[0]  # the last block is of another stack
    if parts[0] not in first.inputs and (same := _same_shape(look, first)) is not None:
        parts[0] = same[1]  # the first block takes the stream as one tensor
    blocks: list[Block] = []
    for call, part, out in zip(calls, parts, outs, strict=True):
        if part not in call.inputs or out not in call.outputs:
            return []
        after = look.streams.get(call.path, ObservedTensor.output(call.path, out))
        blocks.append(Block(call, _before(look, call, part, blocks), after))
    return blocks


def _before(look: Look, call: ModuleCall, part: Any, blocks: Sequence[Block]) -> ObservedTensor:
    """Returns the site of the stream that a block takes: its input, or where it comes from."""
    if blocks and blocks[-1].path in look.streams:
        return blocks[-1].after
    site = ObservedTensor.input(call.path, part)
    if is_seen(look, site):
        return site
    return look.source(call.inputs[part], call.start) or site


def is_seen(look: Look, site: ObservedTensor) -> bool:
    """Returns True if a hook may see a tensor as it is here."""
    part_of_stream = site.inputs and site.path in look.streams
    return not part_of_stream and not isinstance(site.part, Hidden)


def _same_shape(look: Look, call: ModuleCall) -> tuple[Any, Any] | None:
    for out, value in call.outputs.items():
        for part, taken in call.inputs.items():
            if look.values[value].shape == look.values[taken].shape:
                return out, part
    return None


def inside(path: str, outer: Iterable[str]) -> bool:
    """Returns True if a path lies below one of others."""
    return any(path.startswith(f"{each}.") for each in outer)
