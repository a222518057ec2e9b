"""Positions of the rows of a batch, for the hooks and captures of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrohook._core import needs_prompt
from ferrohook.errors import RowsError
from ferrohook.tokens.positions import Tokens, mask_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ferrohook.tokens.positions import At


def masks_of(ats: Sequence[At], positions: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns which tokens of a request's padded rows are at each of its plan's positions.

    Args:
        ats: positions of its plan.
        positions: positions of its tokens, on the host.
        lengths: of its prompts, see `check_lengths`.
    """
    prompts = torch.tensor(lengths or [0])
    tokens = Tokens(positions, prompts.expand(positions.shape[0]))
    return tuple(mask_of(at, tokens) for at in ats)


def check_lengths(ats: Sequence[At], lengths: Sequence[int], rows: int = 1) -> None:
    """Validates the lengths of a request's prompts: one for each of its rows, or one for all.

    Raises:
        RowsError: there are others, or none, and its plan's positions need them.
    """
    for at in ats:
        if not lengths and needs_prompt(at):
            msg = f"positions {at!r} need the length of the request's prompt: pass lengths"
            raise RowsError(msg)
    if len(lengths) not in {0, 1, rows}:
        msg = f"lengths has {len(lengths)} prompts for a request with {rows} rows"
        raise RowsError(msg)
