"""Kinds of sublayers: attention, cross-attention, other mixers of tokens, position-wise ones."""

# Told by behaviour, in looks in which each sublayer takes what it took before but for one token,
# and in which it takes the same at all tokens: attention mixes tokens, and averages them.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.equations import ALIKE, tolerance
from ferrohook.quantity.anatomy.observe import noise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ferrohook.quantity.anatomy.observe import Look, ObservedTensor
    from ferrohook.quantity.anatomy.parts import BlockParts, BlockStack
    from ferrohook.quantity.anatomy.subjects import Subject
    from ferrohook.quantity.anatomy.sublayers import Sublayer
    from ferrohook.quantity.proofs.attention import FoundHeads


class Classifier:
    """Tells the kinds of the sublayers of one model.

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
        """Tells the kinds of a stack's contributions; cross-attention reads `others`."""
        entries = {
            site
            for part in stack.parts
            for each in part.sublayers
            if each.entry is not None
            for site in each.entry.sites
        }
        clean = {site: self._look.tensor(site) for site in entries}
        moved = self._held(clean, _first_moved)
        same = self._held(clean, _all_equal)
        if moved is None or same is None:
            return
        sources = {each.parts[-1].block.after: noise(0.5) for each in others}
        elsewhere = self._held(clean, None, sources) if sources else None
        for part in stack.parts:
            for each in part.sublayers:
                if each.entry is not None and each.contribution in moved.sites:
                    self._tell(part, each, moved, same, elsewhere)

    def _tell(
        self, part: BlockParts, each: Sublayer, moved: Look, same: Look, elsewhere: Look | None
    ) -> None:
        site = each.contribution
        own = self._look.tensor(site)
        changed = _changed(own, moved.tensor(site))
        if bool(changed[0]):
            part.moving.add(site)
        if elsewhere is not None and bool(_changed(own, elsewhere.tensor(site)).any()):
            part.kinds[site] = "cross"
        elif not bool(changed[1:].any()):
            part.kinds[site] = "mlp" if bool(changed[0]) else "constant"
        elif self._attends(each) or _is_average(_positions(same.tensor(site))):
            part.kinds[site] = "attention"
        else:
            part.kinds[site] = "mixer"

    def _attends(self, sublayer: Sublayer) -> bool:
        """Returns True if it goes through an attention module whose pattern is proved."""
        paths = self._heads.keys() & sublayer.inside
        return any(self._heads[path].inside for path in paths)

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


def _is_average(positions: Tensor) -> bool:
    size = float(positions.abs().max())
    return float((positions - positions[:1]).abs().max()) <= ALIKE * size


def _first_moved(tensor: Tensor) -> Tensor:
    moved = tensor.clone()
    flat = moved.view(-1, moved.shape[-1])
    flat[0] = noise(1.0)(flat[0])
    return moved


def _all_equal(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat[:1].expand_as(flat).reshape(tensor.shape).clone()


def _replacing(value: Tensor) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        return value.to(tensor).reshape(tensor.shape)

    return change
