"""Checks of equations in a look in which quantities were written to."""

# A written tensor counts twice: its old value must satisfy the equation that produces it, its new
# value the equations that consume it.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ferrohook.quantity.anatomy.equations import differ, tolerance
from ferrohook.quantity.anatomy.subjects import through

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from ferrohook.quantity.anatomy.blocks import StreamStep
    from ferrohook.quantity.anatomy.ends import Beginning, Ending
    from ferrohook.quantity.anatomy.observe import Look, ObservedTensor
    from ferrohook.quantity.anatomy.sublayers import Entry, Sublayer


class Checks:
    """Residuals of equations, by the names of the quantities in them.

    Args:
        model: the copy that was examined.
        look: with writes.
    """

    def __init__(self, model: nn.Module, look: Look) -> None:
        self._model = model
        self._look = look
        self.residuals: dict[str, float] = {}
        self.failed: set[str] = set()
        """Quantities of which an equation fails by more than rounding."""

    def sums(
        self,
        names: list[str],
        before: ObservedTensor,
        steps: list[StreamStep],
        results: Sequence[ObservedTensor | None],
        terms: dict[tuple[int, int], ObservedTensor],
    ) -> None:
        """Checks the steps of a block."""
        state = self._after(before)
        for number, (step, site) in enumerate(zip(steps, results, strict=True)):
            if state is None:
                break
            if step.terms:
                added = [
                    self._after(terms[number, term]) if (number, term) in terms else None
                    for term in range(len(step.terms))
                ]
                state = _sum(step.multipliers, [state, *added])
            elif step.norm is not None:
                state = self._through([step.norm], state)
            if site is not None:
                self._compare(names, self._before(site), state)
                state = self._after(site)
        if state is None:
            self.fail(names)

    def enters(self, names: list[str], state: ObservedTensor, entry: Entry) -> None:
        """Checks the input that a sublayer takes of the stream."""
        norms = () if entry.norm is None else (entry.norm,)
        taken = self._through(norms, self._after(state))
        self._compare(names, self._before(entry.sites[0]), taken)

    def projects(self, name: str, sublayer: Sublayer) -> None:
        """Checks the last projection of a sublayer, and what rescales its output."""
        if sublayer.last is None or sublayer.projected is None:
            return
        projected = self._through([sublayer.projected.path], self._after(sublayer.last))
        self._compare([name], self._before(sublayer.projected), projected)
        rescaled = self._through(sublayer.rescaled, projected)
        self._compare([name], self._before(sublayer.contribution), rescaled)

    def begins(self, name: str, began: Beginning, stream: ObservedTensor) -> None:
        """Checks how the stream begins."""
        embed = self._after(began.embed)
        state = self._through(began.first, embed)
        if embed is not None and state is not None:
            total = state.double() * began.multiplier
            if began.positions is not None:
                rows = total.reshape(-1, began.positions.numel()) + began.positions
                total = rows.view_as(total)
            state = self._through(began.modules, total.to(embed.dtype))
        self._compare([name], self._before(stream), state)

    def ends(self, ended: Ending, stream: ObservedTensor) -> None:
        """Checks how the stream ends."""
        state = self._after(stream)
        if ended.norm is not None:
            taken = self._through([ended.norm.path], state)
            self._compare(["final_norm"], self._before(ended.norm), taken)
            state = self._after(ended.norm)
        if ended.logits is None:
            return
        state = self._through(ended.modules, state)
        if state is not None:
            state = state.double() * ended.multiplier
            if ended.cap is not None:
                state = ended.cap * torch.tanh(state / ended.cap)
        names = ["logits", *(["final_norm"] if ended.norm is not None else [])]
        self._compare(names, self._before(ended.logits), state)

    def _through(self, paths: Iterable[str], state: Tensor | None) -> Tensor | None:
        """Returns a tensor after modules, in order; None if there is none, or one of them fails."""
        for path in paths:
            state = None if state is None else through(self._model, path, state)
        return state

    def _before(self, site: ObservedTensor) -> Tensor | None:
        return self._look.tensor(site) if site in self._look.sites else None

    def _after(self, site: ObservedTensor) -> Tensor | None:
        return self._look.tensor(site, after=True) if site in self._look.sites else None

    def _compare(self, names: list[str], one: Tensor | None, other: Tensor | None) -> None:
        if one is None or other is None:
            self.fail(names)
            return
        residual = differ(one, other)
        for name in names:
            self.residuals[name] = max(self.residuals.get(name, 0.0), residual)
        if not residual <= tolerance(one, other):
            self.failed |= {*names}

    def fail(self, names: list[str]) -> None:
        """Notes that nothing arrives by these names."""
        self.failed |= {*names}


def _sum(multipliers: Sequence[float], terms: Sequence[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for factor, term in zip(multipliers, terms, strict=True):
        if term is None:
            return None
        part = factor * term.double()
        total = part if total is None else total + part.view_as(total)
    first = terms[0]
    return None if total is None or first is None else total.to(first.dtype)
