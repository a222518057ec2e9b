"""Sublayers: each contribution to the stream, and its kind: attention, MLP or another mixer."""

# No module is found by its name or class: an MLP is the sublayer whose output at a token depends
# only on its input at that token. A model family that calls its MLP something else needs nothing.

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.equations import SIGNIFICANT, differ, tolerance
from ferrohook.quantity.anatomy.observe import Hidden, ObservedTensor, noise
from ferrohook.util.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from ferrohook.quantity.anatomy.blocks import Anatomist, StreamStep
    from ferrohook.quantity.anatomy.ends import Beginning, Ending
    from ferrohook.quantity.anatomy.observe import Look, ModuleCall, Sighting, Writes
    from ferrohook.quantity.anatomy.stacks import Block
    from ferrohook.quantity.anatomy.subjects import Subject
    from ferrohook.quantity.proofs.attention import FoundHeads

TITLES: Final = {"attention": "attn", "cross": "cross", "mixer": "mixer", "mlp": "mlp"}
"""Names of contributions, by the kinds of their sublayers."""


class Entry(NamedTuple):
    """Input of a sublayer from the stream."""

    sites: tuple[ObservedTensor, ...]
    """One, or several of a module that takes it more than once, as query, key and value."""
    state: int
    """Value of the stream that it is computed from."""
    norm: str | None
    """Path of the norm between the two."""


class Sublayer(NamedTuple):
    """A contribution to the stream, and its input."""

    contribution: ObservedTensor
    raw: ObservedTensor
    """The contribution before what rescales it."""
    step: int
    """Place of its step in the block."""
    term: int
    """Place among the contributions of the step."""
    entry: Entry | None
    last: ObservedTensor | None
    """Input of the last projection, and its output."""
    projected: ObservedTensor | None
    rescaled: tuple[str, ...]
    """Paths of norms and factors between the last projection and the contribution, in order."""
    inside: frozenset[str]
    """Paths of the modules that it was followed through."""


class _Last(NamedTuple):
    """The last projection before a contribution."""

    raw: int
    """Value of the contribution before what rescales it."""
    taken: ObservedTensor | None = None
    projected: ObservedTensor | None = None
    after: tuple[str, ...] = ()


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
    partly: set[ObservedTensor] = dataclasses.field(default_factory=set)
    """Contributions of MLPs that depend on more of the stream than what their entry has."""


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
        """Norms of the stream, by their output."""
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
                raw = self.output_site(last.raw, end) or site
                inside = frozenset(followed)
                yield Sublayer(
                    site, raw, number, term, entry, last.taken, last.projected, last.after, inside
                )

    def _first(self, value: int) -> int:
        prefix, own = self._prefix, self._block.after
        return min(
            each.time
            for each in self._look.sightings
            if each.value == value and (each.site.path.startswith(prefix) or each.site == own)
        )

    def output_site(self, value: int, end: int | None = None) -> ObservedTensor | None:
        """Returns the site of the last output that is a value before a time, or of an input."""
        found = [it for it in self._seen(value) if end is None or it.time <= end]
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
        return next((it.site for it in self._seen(value) if it.site.inputs), None)

    def _seen(self, value: int) -> list[Sighting]:
        """Returns the sightings of a value in the block, at sites that hooks see once."""
        return [
            each
            for each in self._look.sites.values()
            if each.value == value
            and each.site.path.startswith(self._prefix)
            and not isinstance(each.site.part, Hidden)
        ]

    def _producers(self, value: int) -> list[ModuleCall]:
        return [call for call in self._calls if value in call.outputs.values()]

    def _consumers(self, value: int) -> list[ModuleCall]:
        return [call for call in self._calls if value in call.inputs.values()]

    def _enclosing(self, call: ModuleCall) -> ModuleCall | None:
        outer = [each for each in self._calls if each.start < call.start and each.end > call.end]
        return outer[-1] if outer else None

    def _entry(self, value: int, states: set[int], followed: set[str]) -> Entry | None:
        """Finds the input of a contribution: a norm of the stream, or the stream."""
        waiting, done = [value], {value}
        normed: set[int] = set()
        plain: dict[ObservedTensor, int] = {}
        while waiting:
            number = waiting.pop()
            if number in self._norms and {*self._norms[number].inputs.values()} <= states:
                normed.add(number)
                continue
            for path, part, taken in self._takes(number, value, followed):
                if taken in states:
                    plain[ObservedTensor.input(path, part)] = taken
                elif taken not in done:
                    done.add(taken)
                    waiting.append(taken)
        if len(normed) == 1:
            return self._after_norm(normed.pop())
        if not normed and not plain:
            return self._first_taker(value, followed)
        one = len({*plain.values()}) == len({site.path for site in plain}) == 1
        if normed or not one:
            return None
        (path,), (state,) = {site.path for site in plain}, {*plain.values()}
        sites = tuple(site for site in plain if not isinstance(site.part, Hidden))
        if not sites:  # of a module that takes it where no hook sees, those inside
            inner = (it for it in self._consumers(state) if it.path.startswith(f"{path}."))
            sites = _seen_inputs(inner, state)
        return Entry(sites, state, None) if sites and {*sites} <= self._look.sites.keys() else None

    def _takes(
        self, value: int, contribution: int, followed: set[str]
    ) -> Iterator[tuple[str, Any, int]]:
        """Yields the input of the module that computes a value, with its path and the part."""
        call = self._maker(value)
        if call is None:
            return
        followed.add(call.path)
        # Inputs of a module that adds to the stream stay in the stream.
        if not self._adds(call, contribution):
            for part, taken in call.inputs.items():
                yield call.path, part, taken

    def _after_norm(self, value: int) -> Entry | None:
        """Makes the entry of the output of a norm of the stream."""
        call = self._norms[value]
        (part,), (state,) = call.made, call.inputs.values()
        site = ObservedTensor.output(call.path, part)
        return Entry((site,), state, call.path) if site in self._look.sites else None

    def _maker(self, value: int) -> ModuleCall | None:
        """Returns the call that computes a value, or in whose own code it is computed."""
        # Not a dropout in eval mode, which returns its input.
        made = (it for it in self._producers(value) if value not in it.inputs.values())
        call = next(made, None)
        consumers = self._consumers(value)
        return self._enclosing(consumers[0]) if call is None and consumers else call

    def _first_taker(self, value: int, followed: set[str]) -> Entry | None:
        """Finds what modules take of the stream between the sum before and a contribution.

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
            and not wanted.isdisjoint(call.inputs.values())
            and call not in self._norms.values()
            and {value, *call.inputs.values()}.isdisjoint(call.outputs.values())
            and not self._adds(call, value)
        ]
        followed |= {call.path for call in takers}
        taken = {each for call in takers for each in call.inputs.values()} & wanted
        if len(taken) != 1:
            return None
        (state,) = taken
        if state in self._norms:
            return self._after_norm(state)
        return Entry(_seen_inputs(takers, state), step.source, None)

    def _adds(self, call: ModuleCall, contribution: int) -> bool:
        """Returns True if the stream or another contribution to it is computed in a module."""
        results = {value for step in self._steps for value in (step.result, *step.terms)}
        results.discard(contribution)
        inside = (it for it in self._calls if call.start <= it.start and it.end <= call.end)
        return any(not results.isdisjoint(it.made.values()) for it in inside)

    def _last(self, value: int) -> _Last:
        """Finds the last projection before a contribution, and what rescales its output."""
        rescaled: list[str] = []
        calls = self._producers(value)
        while (call := next(filter(self._rescales, calls), None)) is not None:
            rescaled.insert(0, call.path)
            (value,) = call.inputs.values()
            # Only earlier calls: a fused norm returns what it takes, too.
            calls = [each for each in self._producers(value) if each.end < call.start]
        leaves = [
            call
            for call in calls
            if len(call.inputs) == 1
            and not self._children(call)
            and value not in call.inputs.values()
        ]
        if not leaves or not self._anatomist.is_projection(leaves[0]):
            return _Last(value)
        call = leaves[0]
        (taken_part,), (part,) = (
            call.inputs,
            [p for p, it in call.outputs.items() if it == value][:1],
        )
        site = ObservedTensor.input(call.path, taken_part)
        output = ObservedTensor.output(call.path, part)
        if not {site, output} <= self._look.sites.keys() or isinstance(taken_part, Hidden):
            return _Last(value)
        return _Last(value, site, output, tuple(rescaled))

    def _rescales(self, call: ModuleCall) -> bool:
        if len(call.inputs) != 1 or not call.made:
            return False
        return self._anatomist.is_norm(call) or self._anatomist.is_gain(call)

    def _children(self, call: ModuleCall) -> bool:
        return any(each.path.startswith(f"{call.path}.") for each in self._calls)


def _seen_inputs(calls: Iterable[ModuleCall], value: int) -> tuple[ObservedTensor, ...]:
    """Returns the inputs of modules that are a value, where hooks see them."""
    return tuple(
        ObservedTensor.input(call.path, part)
        for call in calls
        for part, each in call.inputs.items()
        if each == value and not isinstance(part, Hidden)
    )


# --- Kinds ------------------------------------------------------------------------------------

# Found by experiments with what each sublayer takes: change some tokens, the others, and all; make
# all tokens equal. Attention mixes tokens by weights that depend on them, and averages, but for
# sinks.


class Experiments(NamedTuple):
    """Looks in which the input of each sublayer is changed."""

    some: Look
    """Changes at some tokens."""
    others: Look
    """Changes at all other tokens."""
    both: Look
    """The changes of `some` and of `others`."""
    same: Look
    """Equal tokens; the stream itself is another, which only an entry should read."""


class Triples(NamedTuple):
    """Looks in which the first two of each three tokens are changed, and the third one is not."""

    first: Look
    second: Look
    both: Look
    exchanged: Look
    """The changes of both, with the two changed tokens of the last three exchanged."""


class Classifier:
    """Finds the kinds of the sublayers of one model.

    Args:
        subject: the copy that was examined.
        look: of the copy.
        heads: quantities found inside its attention modules, by path.
    """

    def __init__(self, subject: Subject, look: Look, heads: Mapping[str, FoundHeads]) -> None:
        self._subject = subject
        self._look = look
        self._heads = heads
        self._mixed = False
        """True if a sublayer mixes tokens in the example."""

    def classify(self, stack: BlockStack, others: Sequence[ObservedTensor]) -> None:
        """Finds the kinds of a stack's contributions; cross-attention reads `others`."""
        entries = {
            site
            for part in stack.parts
            for each in part.sublayers
            if each.entry is not None
            for site in each.entry.sites
        }
        clean = {site: self._look.tensor(site) for site in entries}
        # So that a change reaches no other sublayer by the stream.
        added = {each.contribution for part in stack.parts for each in part.sublayers}
        starts = {part.block.before: self._look.tensor(part.block.before) for part in stack.parts}
        kept = {site: _replacing(self._look.tensor(site)) for site in added | starts.keys()}
        looks = [self._held(clean, change, kept) for change in (_some, _others, _all)]
        moved = {site: _replacing(_all(tensor)) for site, tensor in starts.items()}
        looks.append(self._held(clean, _equal, kept | moved))
        if not all(looks):
            return
        experiments = Experiments(*filter(None, looks))
        sources = dict.fromkeys(others, noise(0.5))
        elsewhere = self._held(clean, None, kept | sources) if sources else None
        given = tensors_in([*self._subject.example.args, *self._subject.example.kwargs.values()])
        masked = len([*given]) > 1
        # With a mask few tokens may be mixed, and be changed together.
        unsure = {"mixer", "mlp"} if masked else {"mixer"}
        thirds = _Thirds(self._rows(stack))
        undecided: list[tuple[BlockParts, Sublayer]] = []
        for part in stack.parts:
            for each in part.sublayers:
                # Another choice of experts passes other modules.
                seen = all(each.raw in it.sites for it in (*experiments, elsewhere) if it)
                if each.entry is not None and seen:
                    self._classify(part, each, experiments, elsewhere, thirds)
                    if part.kinds[each.contribution] in unsure:
                        undecided.append((part, each))
        if undecided:
            self._decide(undecided, clean, kept, experiments, thirds)
        if masked and not self._mixed:  # the mask may let each token see only itself
            for part in stack.parts:
                mlps = [site for site, kind in part.kinds.items() if kind == "mlp"]
                part.kinds |= dict.fromkeys(mlps, "unmixed")

    def _rows(self, stack: BlockStack) -> tuple[int, int] | None:
        """Returns how many rows and tokens a stack's stream has: a decoder's are not the example's.

        Where modules see positions of all rows in one dimension, the example has the numbers.
        """
        stream = self._look.tensor(stack.parts[0].block.before)
        if stream.dim() == 3:  # noqa: PLR2004 (rows, tokens, width)
            return stream.shape[0], stream.shape[1]
        return self._subject.example.shape

    def _decide(
        self,
        undecided: Sequence[tuple[BlockParts, Sublayer]],
        clean: Mapping[ObservedTensor, Tensor],
        kept: Writes,
        experiments: Experiments,
        thirds: _Thirds,
    ) -> None:
        """Finds what sublayers are that mix tokens, or may."""
        both = thirds.moved(0, 1)
        changes = thirds.moved(0), thirds.moved(1), both, lambda it: thirds.exchanged(both(it))
        looks = [self._held(clean, change, kept) for change in changes]
        if not all(looks):
            return
        triples = Triples(*filter(None, looks))
        for part, each in undecided:
            if not all(each.raw in it.sites for it in triples):
                del part.kinds[each.contribution]
            elif part.kinds[each.contribution] == "mixer" or self._moves(each, triples, thirds):
                kind = self._mixing(each.raw, experiments, triples, thirds)
                part.kinds[each.contribution] = kind

    def _moves(self, each: Sublayer, triples: Triples, thirds: _Thirds) -> bool:
        """Returns True if a sublayer mixes tokens in looks in which some of each three change."""
        own = self._look.tensor(each.raw)
        looks = zip((triples.first, triples.second), (0, 1), strict=True)
        moves = any(
            bool(_changed(own, look.tensor(each.raw))[~thirds.chosen(own, which)].any())
            for look, which in looks
        )
        self._mixed |= moves
        return moves

    def _classify(
        self,
        part: BlockParts,
        each: Sublayer,
        looks: Experiments,
        elsewhere: Look | None,
        thirds: _Thirds,
    ) -> None:
        """Finds the kind of a contribution; `mixer` if it mixes tokens in any way."""
        site = each.contribution
        own, some, others = (it.tensor(each.raw) for it in (self._look, looks.some, looks.others))
        moved = _chosen(own)
        by_some, by_others = _changed(own, some), _changed(own, others)
        mixes = bool(by_some[~moved].any()) or bool(by_others[moved].any())
        self._mixed |= mixes
        if bool(by_some.any()) or bool(by_others.any()):
            part.moving.add(site)
        if elsewhere is not None and bool(_changed(own, elsewhere.tensor(each.raw)).any()):
            part.kinds[site] = "cross"
        elif self._attends(each):
            part.kinds[site] = "attention"
        elif thirds.tokens(own) == 1:
            part.kinds[site] = "unmixed"
        elif not mixes:
            part.kinds[site] = "mlp" if site in part.moving else "constant"
            if bool(_changed(_equal(own), looks.same.tensor(each.raw)).any()):
                part.partly.add(site)
        else:
            part.kinds[site] = "mixer"

    def _mixing(
        self, site: ObservedTensor, looks: Experiments, triples: Triples, thirds: _Thirds
    ) -> str:
        """Distinguishes attention from other mixers of tokens.

        Weights that depend on the tokens couple them: the effects of two do not add up. Attention
        with sinks does not average; where a token that stays takes two others, these are coupled in
        any order. In a short row or a window of two, none does.
        """
        own = self._look.tensor(site)
        first, second, both, exchanged = (look.tensor(site) for look in triples)
        # The effects are coupled by about their product.
        enough = SIGNIFICANT * math.sqrt(tolerance(own))
        takes_two = _changed(own, first, enough) & _changed(own, second, enough)
        takes_two &= thirds.chosen(own, 2)
        shown = bool(takes_two.any())
        some, others, every = (look.tensor(site) for look in looks[:3])
        coupled = bool(_changed(every, some + others - own).any())
        if _is_average(looks.same.tensor(site)):
            return "attention" if coupled else "mixer" if shown else "unclear"
        if not shown:
            short = thirds.tokens(own) <= 2  # noqa: PLR2004 (no third one)
            return "unclear" if coupled or short else "mixer"
        coupled = bool(_changed(both, first + second - own)[takes_two].any())
        seen = takes_two & thirds.last(own)
        ordered = not bool(seen.any()) or bool(_changed(both, exchanged)[seen].any())
        return "attention" if coupled and not ordered else "mixer"

    def _attends(self, sublayer: Sublayer) -> bool:
        """Returns True if it goes through a function that models call as attention."""
        return bool(self._heads.keys() & sublayer.inside)

    def _held(
        self,
        clean: Mapping[ObservedTensor, Tensor],
        change: Callable[[Tensor], Tensor] | None,
        more: Writes,
    ) -> Look | None:
        """Looks while each sublayer takes its former input, changed; None if the model fails."""
        writes = {**more}
        for site, tensor in clean.items():
            writes[site] = _replacing(tensor if change is None else change(tensor))
        try:
            return self._subject.look(writes)
        except HookError:
            return None


def _positions(tensor: Tensor) -> Tensor:
    """Returns a tensor as (positions, width)."""
    return tensor.double().reshape(-1, tensor.shape[-1])


def _changed(one: Tensor, other: Tensor, limit: float = 0.0) -> Tensor:
    """Returns which positions differ by more than rounding, and a limit relative to the largest."""
    before, after = _positions(one), _positions(other)
    least = max(limit, tolerance(one, other))
    return (before - after).abs().amax(-1) > least * before.abs().max()


def _is_average(tensor: Tensor) -> bool:
    positions = _positions(tensor)
    return differ(positions, positions[:1].expand_as(positions)) <= tolerance(tensor)


def _chosen(tensor: Tensor) -> Tensor:
    """Chooses about half of the positions, without a period: those with an odd number of ones."""
    count = tensor.numel() // tensor.shape[-1]
    odd = [place.bit_count() % 2 == 1 for place in range(count)]
    return torch.tensor(odd, device=tensor.device)


def _moved(tensor: Tensor, chosen: Tensor) -> Tensor:
    flat = tensor.reshape(-1, tensor.shape[-1])
    return noise(1.0)(flat).where(chosen[:, None], flat).reshape(tensor.shape)


def _some(tensor: Tensor) -> Tensor:
    return _moved(tensor, _chosen(tensor))


def _others(tensor: Tensor) -> Tensor:
    return _moved(tensor, ~_chosen(tensor))


def _all(tensor: Tensor) -> Tensor:
    return noise(1.0)(tensor.reshape(-1, tensor.shape[-1])).reshape(tensor.shape)


class _Thirds:
    """Changes of the first and the second of each three tokens in a row.

    Args:
        shape: rows and tokens of the stream; None if they are not known.
    """

    def __init__(self, shape: tuple[int, int] | None) -> None:
        self._shape = shape

    def tokens(self, tensor: Tensor) -> int:
        """Returns the number of tokens in a row of a tensor."""
        if self._shape is not None and math.prod(self._shape) == tensor.numel() // tensor.shape[-1]:
            return self._shape[1]
        return tensor.shape[-2]

    def chosen(self, tensor: Tensor, *which: int) -> Tensor:
        """Chooses positions by their places in each three."""
        return torch.isin(self._places(tensor) % 3, torch.tensor(which, device=tensor.device))

    def moved(self, *which: int) -> Callable[[Tensor], Tensor]:
        """Makes the change that moves tokens."""
        return lambda tensor: _moved(tensor, self.chosen(tensor, *which))

    def last(self, tensor: Tensor) -> Tensor:
        """Chooses the last of the last three tokens of each row."""
        tokens = self.tokens(tensor)
        return self._places(tensor) == tokens // 3 * 3 - 1

    def exchanged(self, tensor: Tensor) -> Tensor:
        """Exchanges the two before that one."""
        flat = tensor.reshape(-1, tensor.shape[-1])
        (last,) = self.last(tensor).nonzero(as_tuple=True)
        order = torch.arange(len(flat), device=tensor.device)
        order[last - 1], order[last - 2] = last - 2, last - 1
        return flat[order].reshape(tensor.shape)

    def _places(self, tensor: Tensor) -> Tensor:
        count = tensor.numel() // tensor.shape[-1]
        return torch.arange(count, device=tensor.device) % self.tokens(tensor)


def _equal(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat[:1].expand_as(flat).reshape(tensor.shape).clone()


def _replacing(value: Tensor) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        return value.to(tensor, copy=True).reshape(tensor.shape)  # models change it in place

    return change
