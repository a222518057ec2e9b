"""Parts: the blocks of a model's stacks, taken apart into sums and sublayers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ferrohook.quantity.anatomy.observe import ObservedTensor
from ferrohook.quantity.anatomy.stacks import chains, inside
from ferrohook.quantity.anatomy.sublayers import BlockParts, BlockStack, Tracer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrohook.quantity.anatomy.blocks import Anatomist
    from ferrohook.quantity.anatomy.observe import Look
    from ferrohook.quantity.anatomy.stacks import Block


class Stacks(NamedTuple):
    """Stacks of a model."""

    proved: list[BlockStack]
    failures: dict[str, str]
    """Reasons of the others, by the prefix of their names."""
    blocks: list[str]
    """Paths of the blocks of all."""
    ends: list[ObservedTensor]
    """Sites of the output of the last block of each."""


class _Apart(NamedTuple):
    """A chain, taken apart."""

    chain: list[Block]
    parts: list[BlockParts]
    failed: dict[int, str]
    """Reasons of the blocks that are not understood, by number."""

    @property
    def is_proved(self) -> bool:
        return bool(self.parts) and len(self.parts) >= len(self.failed)

    @property
    def failure(self) -> str:
        number, reason = next(iter(self.failed.items()))
        path = self.chain[_numbers(self.chain).index(number)].path
        return f"no chain of numbered modules adds to its input; in {path} {reason}"

    @property
    def paths(self) -> list[str]:
        return [block.path for block in self.chain]


def stacks_of(anatomist: Anatomist) -> Stacks:
    """Takes apart the stacks of a model, the main one last."""
    proved: list[_Apart] = []
    others: list[_Apart] = []
    for chain in _split(anatomist, chains(anatomist.look)):
        covered = [path for each in proved for path in each.paths]
        if inside(chain[0].path, covered):
            continue
        apart = _taken_apart(anatomist, chain)
        (proved if apart.is_proved else others).append(apart)
    if not proved:
        reason = "no numbered modules take the output of the one before them"
        if others:
            reason = max(others, key=lambda each: len(each.chain)).failure
        return Stacks([], {"": reason}, [], [])
    others = [each for each in others if _may_be_stack(anatomist.look, each, proved)]
    found = sorted([*proved, *others], key=lambda each: each.chain[-1].call.end)
    named = [*zip(_prefixes([each.paths[0] for each in found]), found, strict=True)]
    return Stacks(
        [BlockStack(name, each.parts, each.failed) for name, each in named if each.is_proved],
        {name: each.failure for name, each in named if not each.is_proved},
        [path for each in found for path in each.paths],
        [each.chain[-1].after for each in found],
    )


def _may_be_stack(look: Look, apart: _Apart, proved: list[_Apart]) -> bool:
    """Returns True if a chain is a stack that is not understood, and no part or head of one.

    Its blocks have modules and keep the size of their input.
    """
    outer = {call.path.rpartition(".")[0] for call in look.calls}
    sites = [site for block in apart.chain for site in (block.before, block.after)]
    sizes = {look.values[look.sites[site].value].numel() for site in sites}
    own = [path for each in proved for path in each.paths]
    beside = not inside(apart.paths[0], own) and not any(inside(it, apart.paths) for it in own)
    return beside and len(sizes) == 1 and outer.issuperset(apart.paths)


def _split(anatomist: Anatomist, found: list[list[Block]]) -> Iterator[list[Block]]:
    """Cuts chains where a block takes a result of the one before beside its stream.

    As the first block of a decoder does that reads an encoder of as many tokens.
    """
    for chain in found:
        start = 0
        for place, block in enumerate(chain):
            moved = place > start and _parent(block) != _parent(chain[place - 1])
            stream = None if place == start else _other_stream(anatomist, block, moved=moved)
            if stream is not None:
                yield chain[start:place]
                chain[place] = block._replace(before=stream)
                start = place
        yield chain[start:]


def _parent(block: Block) -> str:
    return block.path.rpartition(".")[0]


def _other_stream(anatomist: Anatomist, block: Block, *, moved: bool) -> ObservedTensor | None:
    """Returns the input to which a block adds, if it is not the one that its chain says.

    Of a block that is not understood and stands elsewhere than the one before it, `moved`, the
    first other input.
    """
    taken = anatomist.look.sites[block.before].value
    size = anatomist.look.values[taken].numel()
    others = [
        ObservedTensor.input(block.path, part)
        for part, value in block.call.inputs.items()
        if value != taken and anatomist.look.values[value].numel() == size
    ]
    if not others or not isinstance(anatomist.steps(block), str):
        return None
    adds = (it for it in others if not isinstance(anatomist.steps(block._replace(before=it)), str))
    return next(adds, others[0] if moved else None)


def _taken_apart(anatomist: Anatomist, chain: list[Block]) -> _Apart:
    parts: list[BlockParts] = []
    failed: dict[int, str] = {}
    for number, block in zip(_numbers(chain), chain, strict=True):
        steps = anatomist.steps(block)
        if isinstance(steps, str):
            failed[number] = steps
            continue
        tracer = Tracer(anatomist, block, steps)
        results = [tracer.state_site(step.result) for step in steps[:-1]]
        results.append(block.after)
        parts.append(BlockParts(block, number, steps, results, [*tracer.sublayers()]))
    return _Apart(chain, parts, failed)


def _numbers(chain: list[Block]) -> list[int]:
    """Returns the numbers of blocks: the ones in their names if they rise, else their places."""
    names = [block.path.rpartition(".") for block in chain]
    if len({parent for parent, _, _ in names}) == 1 and all(last.isdigit() for *_, last in names):
        numbers = [int(last) for *_, last in names]
        if numbers == sorted({*numbers}):
            return numbers
    return [*range(len(chain))]


def _prefixes(paths: list[str]) -> list[str]:
    """Returns prefixes of names for stacks: none for the last, the main one."""
    if not paths:
        return []
    main = paths[-1].split(".")
    prefixes: list[str] = []
    for path in paths[:-1]:
        own = next((each for each in path.split(".") if each not in main), "other")
        while f"{own}." in prefixes:
            own = f"{own}_"
        prefixes.append(f"{own}.")
    return [*prefixes, ""]
