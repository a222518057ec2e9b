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


def masks_of(
    ats: Sequence[At], positions: Tensor, lengths: int | Sequence[int] | None, dim: int
) -> tuple[Any, ...]:
    """Returns which rows of a request are at each of its plan's positions.

    Each is None for none, or a tensor of bools: (rows,), for dim=1 (1, rows), or (rows, columns).

    Raises:
        RowsError: the length of its prompt is needed and not known.
    """
    flat = positions.dim() == 1
    if flat:
        positions = positions[None]
    if lengths is None:
        for at in ats:
            if needs_prompt(at):
                msg = f"positions {at!r} need the length of the request's prompt: give lengths"
                raise RowsError(msg)
        lengths = 0
    prompts = torch.as_tensor(lengths, device=positions.device).expand(positions.shape[0])
    tokens = Tokens(positions, Prompt(prompts, None))
    masks = [mask_of(at, tokens) for at in ats]
    if positions.device.type == "cpu":
        masks = [mask if mask.any() else None for mask in masks]
    if flat and dim == 0:
        masks = [None if mask is None else mask[0] for mask in masks]
    return tuple(masks)
