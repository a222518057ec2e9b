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
    ats: Sequence[At], positions: Tensor, lengths: int | Sequence[int] | None
) -> tuple[Any, ...]:
    """Returns which tokens of a request's padded rows are at each of its plan's positions.

    Args:
        ats: positions of its plan.
        positions: those of its tokens, on the host.
        lengths: of its prompts.

    Raises:
        RowsError: the length of its prompt is needed and not known.
    """
    _check_lengths(ats, lengths)
    prompts = torch.as_tensor(0 if lengths is None else lengths)
    tokens = Tokens(positions, Prompt(prompts.expand(positions.shape[0]), None))
    masks = (mask_of(at, tokens) for at in ats)
    return tuple(mask if mask.any() else None for mask in masks)


def places_of(ats: Sequence[At], positions: list[int], lengths: Any) -> list[list[int]]:
    """Returns which rows of a request are at each of its plan's positions: places among its rows.

    Raises:
        RowsError: the length of its prompt is needed and not known.
    """
    _check_lengths(ats, lengths)
    length = 0 if lengths is None else int(lengths)
    return [_places(at, positions, length) for at in ats]


def _check_lengths(ats: Sequence[At], lengths: object) -> None:
    for at in ats:
        if lengths is None and needs_prompt(at):
            msg = f"positions {at!r} need the length of the request's prompt: give lengths"
            raise RowsError(msg)


def _places(at: At, positions: list[int], length: int) -> list[int]:
    if at == "prompt":
        chosen = range(length)
    elif at == "last_prompt":
        chosen = range(length - 1, length)
    elif at == "generated":
        return [place for place, position in enumerate(positions) if position >= length]
    elif isinstance(at, int):
        wanted = at if at >= 0 else length + at
        chosen = range(wanted, wanted + 1)
    elif isinstance(at, slice):
        start, stop = (
            bound if bound is None or bound >= 0 else max(length + bound, 0)
            for bound in (at.start, at.stop)
        )
        last = max(positions, default=0) + 1
        chosen = range(start or 0, last if stop is None else stop, at.step or 1)
    else:
        tokens = Tokens(torch.tensor([positions]), Prompt(torch.tensor([length]), None))
        mask = mask_of(at, tokens)[0]
        return mask.nonzero().flatten().tolist()
    return [
        place for place, position in enumerate(positions) if position in chosen and position >= 0
    ]
