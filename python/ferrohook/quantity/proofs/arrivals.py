"""Arrivals: the equations hold for values written to quantities, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.observe import noise
from ferrohook.quantity.anatomy.sublayers import TITLES
from ferrohook.quantity.proofs.checks import Checks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrohook.quantity.anatomy.observe import ObservedTensor
    from ferrohook.quantity.anatomy.subjects import Subject
    from ferrohook.quantity.anatomy.sublayers import BlockParts, BlockStack
    from ferrohook.quantity.proofs.proved import Proved


class Arrivals:
    """Writes to the quantities of one model.

    Args:
        subject: the copy that was examined.
        stacks: of the model.
    """

    def __init__(self, subject: Subject, stacks: Sequence[BlockStack]) -> None:
        self._subject = subject
        self._stacks = stacks

    def prove(self, proved: Sequence[Proved]) -> None:
        """Finds the quantities outside of attention that can be written, and the residuals.

        All are written to at once; if an equation fails, each kind by itself.
        """
        outside = [each for each in proved if each.point is None]
        sites = {each.name: each.site for each in outside}
        # Causally nothing follows from the sum at the input of the module that takes it.
        sums = {name for name in sites if _kind(name) == "resid_mid" and sites[name].inputs}
        everything = {name: site for name, site in sites.items() if name not in sums}
        residuals = self._residuals(everything)
        for kind in sorted({_kind(name) for name in everything.keys() - residuals}):
            own = {name: site for name, site in everything.items() if _kind(name) == kind}
            residuals |= {name: it for name, it in self._residuals(own).items() if name in own}
        for each in outside:
            each.writable = each.name in residuals
            each.residual = max(each.residual, residuals.get(each.name, 0.0))

    def _residuals(self, written: dict[str, ObservedTensor]) -> dict[str, float]:
        """Returns residuals of the names whose equations hold while all of them are written to."""
        try:
            look = self._subject.look(dict.fromkeys(written.values(), noise(0.5)))
        except HookError:
            return {}
        check = Checks(self._subject.model, look)
        for stack in self._stacks:
            for part in stack.parts:
                _check_part(check, stack, part)
            if stack.beginning is not None:
                check.begins(f"{stack.prefix}embed", stack.beginning, stack.parts[0].block.before)
            if stack.ending is not None:
                check.ends(stack.ending, stack.parts[-1].block.after)
        return {
            name: check.residuals[name]
            for name in written
            if name in check.residuals and name not in check.failed
        }


def _check_part(check: Checks, stack: BlockStack, part: BlockParts) -> None:
    prefix, index = stack.prefix, part.index
    names = [f"{prefix}resid_pre.{index}", f"{prefix}resid_post.{index}"]
    names += [f"{prefix}resid_mid.{index}"]
    states = {part.steps[0].source: part.block.before}
    states |= {
        step.result: site
        for step, site in zip(part.steps, part.results, strict=True)
        if site is not None
    }
    terms = {(each.step, each.term): each.contribution for each in part.sublayers}
    for each in part.sublayers:
        title = TITLES.get(part.kinds.get(each.contribution, ""))
        names.append(f"{prefix}{title}_out.{index}")
        entry = each.entry
        if entry is not None and entry.state in states and each.contribution in part.moving:
            entered = [f"{prefix}{title}_in.{index}"]
            # It has to see a value written to the sum between; later modules read the others.
            if states[entry.state] in part.results[:-1]:
                entered.append(f"{prefix}resid_mid.{index}")
            check.enters(entered, states[entry.state], entry)
            if each.contribution in part.partly:
                check.fail(entered[:1])
        if each.last is not None:
            inner = {"attn": "z", "mlp": "mlp_act"}.get(str(title))
            check.projects(f"{prefix}{inner}.{index}", each)
    check.sums(names, part.block.before, part.steps, part.results, terms)


def _kind(name: str) -> str:
    """Returns the name of a quantity without the number of its block."""
    head, _, last = name.rpartition(".")
    return head if last.isdigit() else name
