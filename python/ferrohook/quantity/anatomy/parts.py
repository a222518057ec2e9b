"""Parts: the blocks of a model's stacks, taken apart into sums and sublayers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrohook.quantity.anatomy.stacks import chains, inside
from ferrohook.quantity.anatomy.sublayers import BlockParts, BlockStack, Tracer

if TYPE_CHECKING:
    from ferrohook.quantity.anatomy.blocks import Anatomist
    from ferrohook.quantity.anatomy.stacks import Block


def stacks_of(anatomist: Anatomist) -> list[BlockStack] | str:
    """Takes apart the stacks of a model, the main one last; the reason if there is none."""
    found: list[list[BlockParts]] = []
    broken: list[dict[int, str]] = []
    covered: list[str] = []
    failures: list[tuple[int, str]] = []
    for chain in chains(anatomist.look):
        if inside(chain[0].path, covered):
            continue
        parts, failed = _taken_apart(anatomist, chain)
        if 2 * len(parts) >= len(chain) and parts:
            found.append(parts)
            broken.append(failed)
            covered += [block.path for block in chain]
        else:
            number, reason = next(iter(failed.items()))
            path = chain[_numbers(chain).index(number)].path
            failures.append((len(chain), f"in {path} {reason}"))
    if not found:
        if not failures:
            return "no numbered modules take what the one before them returned"
        _, reason = max(failures, key=lambda each: each[0])
        return f"no chain of numbered modules adds to what it takes; {reason}"
    order = sorted(range(len(found)), key=lambda place: found[place][-1].block.call.end)
    names = _prefixes([found[place][0].block.path for place in order])
    return [
        BlockStack(name, found[place], broken[place])
        for name, place in zip(names, order, strict=True)
    ]


def _taken_apart(
    anatomist: Anatomist, chain: list[Block]
) -> tuple[list[BlockParts], dict[int, str]]:
    """Returns the blocks of a chain that are understood, and reasons of the others by number."""
    parts, failed = [], {}
    for number, block in zip(_numbers(chain), chain, strict=True):
        steps = anatomist.steps(block)
        if isinstance(steps, str):
            failed[number] = steps
            continue
        tracer = Tracer(anatomist, block, steps)
        results = [tracer.state_site(step.result) for step in steps[:-1]]
        results.append(block.after)
        parts.append(BlockParts(block, number, steps, results, [*tracer.sublayers()]))
    return parts, failed


def _numbers(chain: list[Block]) -> list[int]:
    """Returns the numbers of blocks: those of their names if they rise, else their places."""
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
