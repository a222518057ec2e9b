"""Anatomy of a block: the sums that make its output of its input."""

from __future__ import annotations

import heapq
import math
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ferrohook.quantity.anatomy.equations import ROUNDINGS, Terms, differ, fit, tolerance
from ferrohook.quantity.anatomy.observe import noise
from ferrohook.quantity.anatomy.subjects import through

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from ferrohook.quantity.anatomy.equations import Fit
    from ferrohook.quantity.anatomy.observe import Look, ModuleCall, ObservedTensor
    from ferrohook.quantity.anatomy.stacks import Block

_ONE: Final = 1.0
_TWO: Final = 2.5
_NORM: Final = 1.2
"""Costs of the steps of an anatomy: of all, the one with the fewest terms is taken."""
_SWAPPED: Final = 2
"""Channels that are exchanged to recognise a norm."""
EQUATION: Final = "resid_pre + contributions = resid_post"
NOTHING_ADDED: Final = "its output is only a norm of its input: it adds nothing"
_TRIED: Final = 8
"""Pairs of values that are tried as the terms of a sum, at most."""
MOST_VALUES: Final = 400
"""Tensors of the stream's size inside a block, at most."""


class StreamStep(NamedTuple):
    """A step of the stream: a sum with contributions, or a norm."""

    source: int
    """Value of the stream before it."""
    result: int
    terms: tuple[int, ...]
    """Values of the contributions; none for a norm."""
    multipliers: tuple[float, ...]
    """Multipliers of the stream and of the contributions."""
    norm: str | None = None
    """Path of a norm."""


class Anatomist:
    """Finds the steps of the blocks of one look.

    Args:
        model: the copy that was examined, whose modules are called to find norms.
        look: tensors of one forward.
    """

    def __init__(self, model: nn.Module, look: Look) -> None:
        self._model = model
        self.look = look
        self._norms: dict[str, bool] = {}
        self._steps: dict[tuple[ObservedTensor, ObservedTensor], list[StreamStep] | str] = {}

    def steps(self, block: Block) -> list[StreamStep] | str:
        """Returns the steps from a block's input to its output; the reason if there are none."""
        ends = block.before, block.after
        if ends not in self._steps:
            self._steps[ends] = self._searched(block)
        return self._steps[ends]

    def _searched(self, block: Block) -> list[StreamStep] | str:
        start = self.look.sites[block.before].value
        end = self.look.sites[block.after].value
        if start == end:
            return "its output is its input"
        seen = self._values(block, start, end)
        if len(seen) > MOST_VALUES:
            return (
                f"{len(seen)} tensors have the size of the stream, too many to search for its sum"
            )
        if end not in seen:
            return f"{EQUATION} fails: its output does not have the size of its input"
        numbers = [*seen]
        terms = Terms([self.look.values[each] for each in numbers])
        sums = {
            number: self._pairs(terms, numbers, seen, place) for place, number in enumerate(numbers)
        }
        order = count()
        queue: list[tuple[float, int, int, tuple[StreamStep, ...]]] = [(0, next(order), start, ())]
        done: set[int] = set()
        while queue:
            cost, _, state, way = heapq.heappop(queue)
            if state == end:
                return [*way] if any(step.terms for step in way) else NOTHING_ADDED
            if state in done:
                continue
            done.add(state)
            for extra, step in self._from(state, block, terms, numbers, seen, sums):
                if step.result not in done:
                    heapq.heappush(queue, (cost + extra, next(order), step.result, (*way, step)))
        return self._failure(terms, numbers.index(start), numbers.index(end))

    def _failure(self, terms: Terms, start: int, end: int) -> str:
        """Describes by how much the nearest sum fails."""
        residual = terms.nearest(end, start)
        if residual <= 2 * ROUNDINGS * terms.eps:
            return (
                f"{EQUATION} proves nothing: a contribution is too small to distinguish from "
                "rounding"
            )
        return (
            f"{EQUATION} fails by {residual:.1e}: its output is not a sum of its input and tensors "
            "that its modules return"
        )

    def _values(self, block: Block, start: int, end: int) -> dict[int, int]:
        """Returns the values of the stream's size in a block, with the times of first use."""
        size = self.look.values[start].numel()
        found = {start: block.call.start}
        prefix = f"{block.path}."
        for each in self.look.sightings:
            own = each.site.path == block.path and each.value in {start, end}
            if not (own or each.site.path.startswith(prefix)):
                continue
            value = self.look.values[each.value]
            if value.numel() == size and bool(value.any()):
                found.setdefault(each.value, each.time)
        return found

    def _pairs(
        self, terms: Terms, numbers: list[int], seen: dict[int, int], place: int
    ) -> list[tuple[int, int]]:
        """Returns the pairs of values whose sum, with any multipliers, is a value."""
        return [*islice(_ranked(terms, numbers, seen, place, None), _TRIED)]

    def _from(  # noqa: PLR0913, PLR0917 (what `steps` knows of the block)
        self,
        state: int,
        block: Block,
        terms: Terms,
        numbers: list[int],
        seen: dict[int, int],
        sums: dict[int, list[tuple[int, int]]],
    ) -> Iterator[tuple[float, StreamStep]]:
        """Yields the steps that begin at a value of the stream, with their costs."""
        place = numbers.index(state)
        for other, result in enumerate(numbers):
            if result == state or seen[result] < seen[state]:
                continue
            step = self._one(state, result, sums[result])
            if step is None:
                step = self._two(terms, numbers, seen, place, other)
            if step is not None:
                yield (_ONE if len(step.terms) == 1 else _TWO), step
        for call in self.look.calls:
            if call.path.startswith(f"{block.path}.") and [*call.inputs.values()] == [state]:
                (result, *others) = [*call.made.values()] or [state]
                if result in seen and result != state and not others and self.is_norm(call):
                    yield _NORM, StreamStep(state, result, (), (1.0,), call.path)

    def _one(self, state: int, result: int, pairs: list[tuple[int, int]]) -> StreamStep | None:
        for pair in pairs:
            if state in pair:
                (other,) = {*pair} - {state}
                found = self.fit(result, (state, other), (1.0,))
                if not found.holds:
                    found = self.fit(result, (state, other))
                if found.holds:
                    return StreamStep(state, result, (other,), found.multipliers)
        return None

    def _two(
        self, terms: Terms, numbers: list[int], seen: dict[int, int], place: int, other: int
    ) -> StreamStep | None:
        for pair in islice(_ranked(terms, numbers, seen, other, place), _TRIED):
            found = self.fit(numbers[other], (numbers[place], *pair), (1.0,))
            if found.holds:
                first, second = sorted(pair, key=seen.__getitem__)
                found = self.fit(numbers[other], (numbers[place], first, second), (1.0,))
                return StreamStep(
                    numbers[place], numbers[other], (first, second), found.multipliers
                )
        return None

    def fit(self, total: int, terms: tuple[int, ...], fixed: tuple[float, ...] = ()) -> Fit:
        """Fits a value by others."""
        values = self.look.values
        return fit(values[total], [values[each] for each in terms], fixed)

    def is_norm(self, call: ModuleCall) -> bool:
        """Returns True if a module divides its input by its size, and leaves channels apart.

        The output does not change with the size of the input; where two channels are exchanged,
        it changes only in these two; where one is enlarged, it changes in the others too. The
        epsilon makes each row smaller by a factor, before the bias.
        """
        known = self._norms.get(call.path)
        if known is None:
            known = self._norms[call.path] = self._tested(call)
        return known

    def kind_of(self, path: str) -> str:
        """Returns the name of the operation of a module between projection and contribution."""
        return "norm" if self._norms.get(path) else "scale"

    def is_gain(self, call: ModuleCall) -> bool:
        """Returns True if a module multiplies each channel by a factor, as LayerScale does."""
        taken, returned = [*call.inputs.values()], [*call.outputs.values()]
        if len(taken) != 1 or len(returned) != 1:
            return False
        x, y = self.look.values[taken[0]], self.look.values[returned[0]]
        if x.numel() != y.numel() or y.numel() == y.shape[-1]:
            return False
        rows, result = (each.reshape(-1, y.shape[-1]).double() for each in (x, y))
        factors = (rows * result).sum(0) / rows.square().sum(0)
        return differ(result, rows * factors) <= tolerance(x, y)

    def is_projection(self, call: ModuleCall) -> bool:
        """Returns True if a module is affine, unlike one that computes a whole sublayer."""
        x = self._taken(call)
        other = noise(1.0)(x)
        returned = through(self._model, call.path, torch.cat([x, other, x + other, 0 * x]))
        if returned is None or len(returned) != 4 * len(x):
            return False
        one, two, both, none = returned.chunk(4)
        return differ(both + none, one + two) <= tolerance(one, two)

    def _taken(self, call: ModuleCall) -> Tensor:
        """Returns the one tensor that a module takes."""
        (value,) = call.inputs.values()
        (sighting,) = [
            each
            for each in self.look.sightings
            if each.site.path == call.path
            and each.value == value
            and each.site.inputs
            and each.time == call.start
        ]
        return self.look.values[value].view(sighting.shape)

    def _tested(self, call: ModuleCall) -> bool:
        taken = self._taken(call)
        if taken.shape[-1] <= _SWAPPED:
            return False
        x = taken * _exact_scale(taken)
        swapped, larger = x.clone(), x.clone()
        swapped[..., :_SWAPPED] = x[..., :_SWAPPED].flip(-1)
        larger[..., 0] = x.norm(dim=-1)
        tried = (x, x * 4, swapped, larger, taken, torch.zeros_like(x))
        returned = [through(self._model, call.path, each) for each in tried]
        small, large, other, divided, own, bias = returned
        if small is None or large is None or other is None or divided is None:
            return False
        if own is None or bias is None or small.shape != x.shape:
            return False
        same_size = _close(small, large) and not _close(small, x)
        apart = _close(small[..., _SWAPPED:], other[..., _SWAPPED:])
        # A function of each element is not, however large they are: tanh, for example.
        by_size = not _close(small[..., _SWAPPED:], divided[..., _SWAPPED:])
        moved = not _close(small[..., :_SWAPPED], other[..., :_SWAPPED])
        if not (same_size and apart and by_size and moved):
            return False
        # A sublayer with its norm after it is no norm, though nothing that it adds is that large.
        bias = bias.nan_to_num()
        whole, own = small - bias, own - bias
        factors = (own * whole).sum(-1, keepdim=True) / whole.square().sum(-1, keepdim=True)
        return _close(own + bias, factors.nan_to_num() * whole + bias)


def _ranked(
    terms: Terms, numbers: list[int], seen: dict[int, int], total: int, start: int | None
) -> Iterator[tuple[int, int]]:
    """Yields the pairs of values before another one that may make it, best first."""
    time = seen[numbers[total]]
    for _, *places in terms.twos(total, start):
        one, other = (numbers[place] for place in places)
        if max(seen[one], seen[other]) <= time:
            yield one, other


def _exact_scale(x: Tensor) -> float:
    """Returns a power of two that makes a tensor large: a norm's epsilon has no effect there.

    The epsilon is added to the square, so it rounds to nothing where the size is 1 / rounding. Four
    times as large, the squares are still finite.
    """
    info = torch.finfo(x.dtype)
    largest = min(1 / info.eps, math.sqrt(info.max) / 8)
    return 2.0 ** math.floor(math.log2(largest / (float(x.abs().max()) or 1.0)))


def _close(one: Tensor, other: Tensor) -> bool:
    """Returns True if two results of norms are equal but for rounding; some compute in float32."""
    limit = max(tolerance(one, other), tolerance(one.float(), other.float()))
    return differ(one, other) <= limit
