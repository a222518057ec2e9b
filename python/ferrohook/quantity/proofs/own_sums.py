"""Sums of blocks with the model's own parameters: their multipliers and residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrohook.quantity.anatomy.equations import fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ferrohook.quantity.anatomy.observe import Look, ObservedTensor
    from ferrohook.quantity.anatomy.sublayers import BlockParts, Sublayer


class OwnSums:
    """Sums that were found in a copy with uneven parameters, in the model itself.

    Args:
        look: of the copy, in which the sums were found.
        first: with the model's own parameters.
    """

    def __init__(self, look: Look, first: Look) -> None:
        self._look = look
        self._first = first

    def residual(self, part: BlockParts, steps: int | None = None) -> float | str:
        """Returns the largest residual of the sums of a block, or of its first steps.

        The reason if one fails.
        """
        largest = 0.0
        for number, step in enumerate(part.steps[:steps]):
            if not step.terms:
                continue
            found = self._multipliers(part, number)
            if isinstance(found, str):
                return found
            largest = max(largest, found[1])
        return largest

    def multiplier(self, part: BlockParts, each: Sublayer) -> float:
        """Returns the multiplier of a contribution to a block whose sums hold."""
        found = self._multipliers(part, each.step)
        return 1.0 if isinstance(found, str) else found[0][1 + each.term]

    def stream_factors(self, parts: Sequence[BlockParts]) -> dict[ObservedTensor, float]:
        """Returns the factors that tensors of a stack have in the stream after its last block.

        Left out is what comes before a norm of the stream, or before a block without sums.
        """
        found: dict[ObservedTensor, float] = {}
        factor, state = 1.0, parts[-1].steps[-1].result
        for part in reversed(parts):
            if part.steps[-1].result != state:
                break
            for number in reversed(range(len(part.steps))):
                step, site = part.steps[number], part.results[number]
                if site is not None:
                    found[site] = factor
                multipliers = self._multipliers(part, number) if step.terms else "a norm"
                if isinstance(multipliers, str):
                    return found
                found |= {it.contribution: factor for it in part.sublayers if it.step == number}
                factor *= multipliers[0][0]
            found[part.block.before] = factor
            state = part.steps[0].source
        return found

    def _multipliers(self, part: BlockParts, number: int) -> tuple[tuple[float, ...], float] | str:
        """Returns the multipliers of a step, solved for, and the residual; the reason if none."""
        step = part.steps[number]
        tensors = self._tensors(part, number)
        if isinstance(tensors, str):
            return tensors
        total, terms = tensors
        known = fit(total, terms, step.multipliers)
        if known.equal:
            return step.multipliers, known.residual
        solved = fit(total, terms)
        if solved.holds:
            return solved.multipliers, solved.residual
        return f"its sum fails by {solved.residual:.1e} with the model's own parameters"

    def _tensors(self, part: BlockParts, number: int) -> tuple[Tensor, list[Tensor]] | str:
        """Returns the sum of a step and its terms; the reason if one of them is nowhere."""
        step = part.steps[number]
        found = []
        for value in (step.result, step.source, *step.terms):
            site = self._site(part, value)
            if site is None or site not in self._first.sites:
                return self._several(part, value)
            found.append(self._first.tensor(site))
        total, *terms = found
        if any(term.numel() != total.numel() for term in terms):
            return "a tensor of its sum has a different size with the model's own parameters"
        return total, terms

    def _several(self, part: BlockParts, value: int) -> str:
        """Returns the reason for a value that no module passes once."""
        prefix = f"{part.block.path}."
        paths = {it.site.path for it in self._look.sightings if it.value == value}
        inside = sorted(it.removeprefix(prefix) for it in paths if it.startswith(prefix))
        return (
            "a tensor of its sum is only seen at modules that run several times: "
            f"{', '.join(inside) or 'none in the block'}"
        )

    def _site(self, part: BlockParts, value: int) -> ObservedTensor | None:
        if value == part.steps[0].source:
            return part.block.before
        if value == part.steps[-1].result:
            return part.block.after
        prefix = f"{part.block.path}."
        sites = self._look.sites.items()
        own = (it for it, seen in sites if seen.value == value and it.path.startswith(prefix))
        return next(own, None)
