"""Positions of the rows of a batch, for the hooks and captures of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrohook.errors import RowsError
from ferrohook.plans.positions import Prompt, Tokens, mask_of, needs_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ferrohook.plans.positions import At


def masks_of(ats: Sequence[At], positions: Tensor, lengths: Sequence[int]) -> tuple[Any, ...]:
    """Returns which tokens of a request's padded rows are at each of its plan's positions.

    Args:
        ats: positions of its plan.
        positions: those of its tokens, on the host.
        lengths: of its prompts: one for each row, one for all, or none if they are not known.

    Raises:
        RowsError: the length of its prompt is needed and not known.
    """
    _check_lengths(ats, lengths)
    prompts = torch.tensor(lengths or [0])
    tokens = Tokens(positions, Prompt(prompts.expand(positions.shape[0]), None))
    masks = (mask_of(at, tokens) for at in ats)
    return tuple(mask if mask.any() else None for mask in masks)


def _check_lengths(ats: Sequence[At], lengths: Sequence[int]) -> None:
    for at in ats:
        if not lengths and needs_prompt(at):
            msg = f"positions {at!r} need the length of the request's prompt: give lengths"
            raise RowsError(msg)
