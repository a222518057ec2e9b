"""Sublayers: each contribution to the stream, and its kind: attention, MLP or another mixer."""

# No module is found by its name or class: an MLP is the sublayer whose output at a token depends
# only on its input at that token. A model family that calls its MLP something else needs nothing.

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.equations import differ, tolerance
from ferrohook.quantity.anatomy.observe import Hidden, ObservedTensor, noise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from ferrohook.quantity.anatomy.blocks import Anatomist, StreamStep
    from ferrohook.quantity.anatomy.ends import Beginning, Ending
    from ferrohook.quantity.anatomy.observe import Look, ModuleCall
    from ferrohook.quantity.anatomy.stacks import Block
    from ferrohook.quantity.anatomy.subjects import Subject
    from ferrohook.quantity.proofs.attention import FoundHeads

TITLES: Final = {"attention": "attn", "cross": "cross", "mixer": "mixer", "mlp": "mlp"}
"""Names of contributions, by the kinds of their sublayers."""


class Entry(NamedTuple):
    """What a sublayer takes of the stream."""

    sites: tuple[ObservedTensor, ...]
    """One, or those of a module that takes it several times, as query, key and value."""
    state: int
    """Value of the stream that it is computed from."""
    norm: str | None
    """Path of the norm between the two."""


class Sublayer(NamedTuple):
    """A contribution to the stream, and what it is computed from."""

    contribution: ObservedTensor
    step: int
    """Place of its step in the block."""
    term: int
    """Place among the contributions of the step."""
    entry: Entry | None
    last: ObservedTensor | None
    """Input of the last projection, and its output."""
    projected: ObservedTensor | None
    norm: str | None
    """Path of the norm, or of the factors, between the last projection and the contribution."""
    inside: frozenset[str]
    """Paths of the modules that it was followed through."""


@dataclasses.dataclass
class BlockParts:
    """A block of a stack, taken apart."""

    block: Block
    index: int
    steps: list[StreamStep]
    results: list[ObservedTensor | None]
    """Sites of the results of its steps."""
    sublayers: list[Sublayer]
    kinds: dict[ObservedTensor, str] = dataclasses.field(default_factory=dict)
    """Kinds of its contributions: attention, cross, mixer or mlp."""
    moving: set[ObservedTensor] = dataclasses.field(default_factory=set)
    """Contributions that depend on what their sublayer takes."""


@dataclasses.dataclass
class BlockStack:
    """A stack of blocks, taken apart."""

    prefix: str
    parts: list[BlockParts]
    broken: dict[int, str]
    """Blocks that are not understood, with the reason."""
    beginning: Beginning | None = None
    ending: Ending | None = None


class Tracer:
    """Follows values of a block back to the stream."""

    def __init__(self, anatomist: Anatomist, block: Block, steps: list[StreamStep]) -> None:
        self._look = anatomist.look
        prefix = f"{block.path}."
        self._calls = sorted(
            (each for each in self._look.calls if each.path.startswith(prefix)),
            key=lambda it: it.start,
        )
        self._prefix = prefix
        self._block = block
        self._steps = steps
        states = [steps[0].source, *(each.result for each in steps)]
        self._states = states
        self._norms: dict[int, ModuleCall] = {}
        """Norms of the stream, by what they return."""
        for call in self._calls:
            (*taken,) = call.inputs.values()
            (*returned,) = call.made.values()
            one = len(taken) == len(returned) == 1 and taken[0] in states
            if one and returned[0] not in states and anatomist.is_norm(call):
                self._norms.setdefault(returned[0], call)
        self._anatomist = anatomist

    def sublayers(self) -> Iterator[Sublayer]:
        """Yields the sublayers in the order of their contributions."""
        for number, step in enumerate(self._steps):
            end = self._first(step.result)
            for term, value in enumerate(step.terms):
                site = self.output_site(value, end)
                if site is None:
                    continue
                followed: set[str] = set()
                entry = self._entry(value, {*self._states[: number + 1]}, followed)
                last = self._last(value)
                yield Sublayer(site, number, term, entry, *last, frozenset(followed))

    def _first(self, value: int) -> int:
        prefix, own = self._prefix, self._block.after
        return min(
            each.time
            for each in self._look.sightings
            if each.value == value and (each.site.path.startswith(prefix) or each.site == own)
        )

    def output_site(self, value: int, end: int | None = None) -> ObservedTensor | None:
        """Returns the site of the last output that is a value before a time, or of an input."""
        found = [
            each
            for each in self._look.sightings
            if each.value == value
            and each.site.path.startswith(self._prefix)
            and each.site in self._look.sites
            and not isinstance(each.site.part, Hidden)
            and (end is None or each.time <= end)
        ]
        outputs = [each.site for each in found if not each.site.inputs]
        return outputs[-1] if outputs else found[0].site if found else None

    def state_site(self, value: int) -> ObservedTensor | None:
        """Returns the site of a value of the stream: of the outermost module that computes it.

        Failing that, the first input.
        """
        calls = self._producers(value)
        outer: ModuleCall | None = None
        for call in sorted(calls, key=lambda it: it.end):
            if outer is None or (call.start < outer.start and call.end > outer.end):
                outer = call
        if outer is not None:
            part = next(part for part, each in outer.outputs.items() if each == value)
            site = ObservedTensor.output(outer.path, part)
            if site in self._look.sites:
                return site
        inputs = (
            each.site
            for each in self._look.sightings
            if each.value == value
            and each.site.inputs
            and each.site.path.startswith(self._prefix)
            and each.site in self._look.sites
            and not isinstance(each.site.part, Hidden)
        )
        return next(inputs, None)

    def _producers(self, value: int) -> list[ModuleCall]:
        return [call for call in self._calls if value in call.outputs.values()]

    def _consumers(self, value: int) -> list[ModuleCall]:
        return [call for call in self._calls if value in call.inputs.values()]

    def _enclosing(self, call: ModuleCall) -> ModuleCall | None:
        outer = [each for each in self._calls if each.start < call.start and each.end > call.end]
        return outer[-1] if outer else None

    def _entry(self, value: int, states: set[int], followed: set[str]) -> Entry | None:
        """Finds what a contribution is computed from: a norm of the stream, or the stream."""
        waiting, done = [value], {value}
        normed: set[int] = set()
        plain: dict[ObservedTensor, int] = {}
        while waiting:
            number = waiting.pop()
            if number in self._norms and {*self._norms[number].inputs.values()} <= states:
                normed.add(number)
                continue
            call = self._maker(number)
            if call is None:
                continue
            followed.add(call.path)
            for part, taken in call.inputs.items():
                if taken in states:
                    plain[ObservedTensor.input(call.path, part)] = taken
                elif taken not in done:
                    done.add(taken)
                    waiting.append(taken)
        if len(normed) == 1:
            call = self._norms[normed.pop()]
            (part,) = call.made
            (state,) = call.inputs.values()
            site = ObservedTensor.output(call.path, part)
            return Entry((site,), state, call.path) if site in self._look.sites else None
        if not normed and not plain:
            return self._first_taker(value, followed)
        sites = tuple(site for site in plain if not isinstance(site.part, Hidden))
        one = len({*plain.values()}) == len({site.path for site in plain}) == 1
        if normed or not one or not sites or not {*sites} <= self._look.sites.keys():
            return None
        return Entry(sites, plain[sites[0]], None)

    def _maker(self, value: int) -> ModuleCall | None:
        """Returns the call that computes a value, or in whose own code it is computed."""
        # Not a dropout in eval mode, which returns what it takes.
        made = (it for it in self._producers(value) if value not in it.inputs.values())
        call = next(made, None)
        consumers = self._consumers(value)
        return self._enclosing(consumers[0]) if call is None and consumers else call

    def _first_taker(self, value: int, followed: set[str]) -> Entry | None:
        """Finds the one module that takes the stream between the sum before and a contribution.

        For blocks whose own code is in between, such as `fc2(relu(fc1(x)))`: nothing follows the
        value from module to module there.
        """
        step = next(each for each in self._steps if value in each.terms)
        norms = [made for made, it in self._norms.items() if step.source in it.inputs.values()]
        wanted = {step.source, *norms}
        end = self._first(value)
        start = self._first(step.source) if step is not self._steps[0] else 0
        takers = [
            call
            for call in self._calls
            if start <= call.start
            and call.end < end
            and call.inputs
            and {*call.inputs.values()} <= wanted
            and call not in self._norms.values()
            and value not in call.outputs.values()
        ]
        if len({call.path for call in takers}) != 1:
            return None
        ((part, taken), *others) = takers[0].inputs.items()
        followed.add(takers[0].path)
        if others:
            return None
        if taken in self._norms:
            norm = self._norms[taken]
            (part,) = norm.made
            return Entry((ObservedTensor.output(norm.path, part),), step.source, norm.path)
        return Entry((ObservedTensor.input(takers[0].path, part),), step.source, None)

    def _last(self, value: int) -> tuple[ObservedTensor | None, ObservedTensor | None, str | None]:
        """Finds the last projection before a contribution."""
        norm = None
        calls = self._producers(value)
        for call in calls:
            (*taken,) = call.inputs.values()
            if len(taken) == 1 and taken[0] != value and self._rescales(call):
                norm, value = call.path, taken[0]
                calls = self._producers(value)
                break
        leaves = [
            call
            for call in calls
            if len(call.inputs) == 1
            and not self._children(call)
            and value not in call.inputs.values()
        ]
        if not leaves:
            return None, None, None
        call = leaves[0]
        (taken_part,), (part,) = (
            call.inputs,
            [p for p, it in call.outputs.items() if it == value][:1],
        )
        site = ObservedTensor.input(call.path, taken_part)
        output = ObservedTensor.output(call.path, part)
        if not {site, output} <= self._look.sites.keys() or isinstance(taken_part, Hidden):
            return None, None, None
        return site, output, norm

    def _rescales(self, call: ModuleCall) -> bool:
        return self._anatomist.is_norm(call) or self._anatomist.is_gain(call)

    def _children(self, call: ModuleCall) -> bool:
        return any(each.path.startswith(f"{call.path}.") for each in self._calls)


# --- Kinds ------------------------------------------------------------------------------------

# Found by experiments with what each sublayer takes: change some tokens, the others, and all; make
# all tokens equal. Attention mixes tokens by weights that depend on them, and averages.


class Experiments(NamedTuple):
    """Looks in which what each sublayer takes is changed."""

    some: Look
    """At some tokens."""
    others: Look
    """At all others."""
    both: Look
    """At all, as in the two."""
    same: Look
    """All tokens are equal."""


class Classifier:
    """Finds the kinds of the sublayers of one model.

    Args:
        subject: the copy that was looked at.
        look: of the copy.
        heads: what was found inside its attention modules, by path.
    """

    def __init__(self, subject: Subject, look: Look, heads: Mapping[str, FoundHeads]) -> None:
        self._subject = subject
        self._look = look
        self._heads = heads

    def classify(self, stack: BlockStack, others: Sequence[BlockStack]) -> None:
        """Finds the kinds of a stack's contributions; cross-attention reads `others`."""
        entries = {
            site
            for part in stack.parts
            for each in part.sublayers
            if each.entry is not None
            for site in each.entry.sites
        }
        clean = {site: self._look.tensor(site) for site in entries}
        looks = [self._held(clean, change) for change in (_some, _others, _all, _equal)]
        if not all(looks):
            return
        experiments = Experiments(*filter(None, looks))
        sources = {each.parts[-1].block.after: noise(0.5) for each in others}
        elsewhere = self._held(clean, None, sources) if sources else None
        for part in stack.parts:
            for each in part.sublayers:
                if each.entry is not None and each.contribution in experiments.some.sites:
                    self._classify(part, each, experiments, elsewhere)

    def _classify(
        self, part: BlockParts, each: Sublayer, looks: Experiments, elsewhere: Look | None
    ) -> None:
        site = each.contribution
        own = self._look.tensor(site)
        some, others, both, same = (look.tensor(site) for look in looks)
        moved = _chosen(own)
        by_some, by_others = _changed(own, some), _changed(own, others)
        if bool(by_some.any()) or bool(by_others.any()):
            part.moving.add(site)
        if elsewhere is not None and bool(_changed(own, elsewhere.tensor(site)).any()):
            part.kinds[site] = "cross"
        elif self._attends(each):
            part.kinds[site] = "attention"
        elif self._single(own):
            part.kinds[site] = "unmixed"
        elif not bool(by_some[~moved].any()) and not bool(by_others[moved].any()):
            part.kinds[site] = "mlp" if site in part.moving else "constant"
        elif _is_average(same) and bool(_changed(both, some + others - own).any()):
            part.kinds[site] = "attention"
        else:
            part.kinds[site] = "mixer"

    def _single(self, contribution: Tensor) -> bool:
        """Returns True if no row of the example has two tokens."""
        shape = self._subject.example.shape
        tokens = contribution.shape[-2] if shape is None else shape[1]
        return tokens == 1

    def _attends(self, sublayer: Sublayer) -> bool:
        """Returns True if it goes through a function that models call as attention."""
        return bool(self._heads.keys() & sublayer.inside)

    def _held(
        self,
        clean: Mapping[ObservedTensor, Tensor],
        change: Callable[[Tensor], Tensor] | None,
        more: Mapping[ObservedTensor, Callable[[Tensor], Tensor]] | None = None,
    ) -> Look | None:
        """Looks while each sublayer takes what it took before, changed; None if the model fails."""
        writes: dict[ObservedTensor, Any] = {**(more or {})}
        for site, tensor in clean.items():
            writes[site] = _replacing(tensor if change is None else change(tensor))
        try:
            return self._subject.look(writes)
        except HookError:
            return None


def _positions(tensor: Tensor) -> Tensor:
    """Returns a tensor as (positions, width)."""
    return tensor.double().reshape(-1, tensor.shape[-1])


def _changed(one: Tensor, other: Tensor) -> Tensor:
    """Returns which positions differ by more than rounding."""
    before, after = _positions(one), _positions(other)
    return (before - after).abs().amax(-1) > tolerance(one, other) * before.abs().max()


def _is_average(tensor: Tensor) -> bool:
    positions = _positions(tensor)
    return differ(positions, positions[:1].expand_as(positions)) <= tolerance(tensor)


def _chosen(tensor: Tensor) -> Tensor:
    """Chooses about half of the positions, without a period: those with an odd number of ones."""
    count = tensor.numel() // tensor.shape[-1]
    return torch.tensor([place.bit_count() % 2 == 1 for place in range(count)])


def _moved(tensor: Tensor, chosen: Tensor) -> Tensor:
    flat = tensor.reshape(-1, tensor.shape[-1])
    return noise(1.0)(flat).where(chosen[:, None], flat).reshape(tensor.shape)


def _some(tensor: Tensor) -> Tensor:
    return _moved(tensor, _chosen(tensor))


def _others(tensor: Tensor) -> Tensor:
    return _moved(tensor, ~_chosen(tensor))


def _all(tensor: Tensor) -> Tensor:
    return noise(1.0)(tensor.reshape(-1, tensor.shape[-1])).reshape(tensor.shape)


def _equal(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat[:1].expand_as(flat).reshape(tensor.shape).clone()


def _replacing(value: Tensor) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        return value.to(tensor).reshape(tensor.shape)

    return change
