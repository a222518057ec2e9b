"""Positions of tokens that the hooks and captures of a plan name.

Absolute: the first token of a prompt has position 0, whatever the padding, and tokens that a KV
cache holds count. `sequences` finds the positions of a call.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ferrohook._core import needs_prompt
from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.arguments import expect

if TYPE_CHECKING:
    from collections.abc import Callable

At: TypeAlias = (
    'Literal["prompt", "last_prompt", "generated"] | int | slice | Callable[[Tensor], Tensor]| None'
)
"""Positions: a name, an int, a slice, or a function from positions to bools, both (batch, length).

Negative ints and bounds count from the end of the prompt, so -1 is its last token. The function
gets -1 for padding, and its result there does not count.
"""

EVERYWHERE = slice(0, None)
"""All tokens, by their positions: for what needs these where `at` is None."""
_NAMES = ("prompt", "last_prompt", "generated")
PADDING = -1
"""Position of a padding token; any other negative one is padding too."""
PAIR: Final = 2
"""Number of the dimensions (batch, tokens)."""
NUMBERS: Final = itertools.count(1)
"""Ids of sequences; a member of batches has `OF_REQUEST`."""
OF_REQUEST: Final = 0
"""Id of the sequences of a member of batches."""
_FIRST, _LAST = -(2**63), 2**63 - 1
"""Limits of positions: an int past them is at no token."""


def check_at(at: Any) -> None:
    """Validates positions.

    Raises:
        ValueError: an unknown name, or a slice with a step below 1.
        HookTypeError: none of `At`.
    """
    if isinstance(at, str):
        if at not in _NAMES:
            msg = (
                f"at must be one of {', '.join(_NAMES)}, an int, a slice or a function, got {at!r}"
            )
            raise ValueError(msg)
    elif isinstance(at, slice):
        for bound in (at.start, at.stop, at.step):
            expect(bound, int | None, "the bounds of a slice of positions must be ints")
        if at.step is not None and at.step < 1:
            msg = f"the step of a slice of positions must be at least 1, got {at.step}"
            raise ValueError(msg)
    elif isinstance(at, bool) or not (isinstance(at, int | None) or callable(at)):
        expect(at, (), "at must be a name, an int, a slice or a function of positions")


class Tokens(NamedTuple):
    """Tokens of one forward."""

    positions: Tensor
    """Position of each token, negative for padding: (batch, length)."""
    lengths: Tensor | None
    """Number of tokens of each row's prompt: (batch,); None if they are not known."""
    after: Any = None
    """The sequences of the call, if they may have a KV cache."""
    number: int = 0
    """Id of its sequences: calls with the same one run tokens of the same sequences."""
    cache: Any = None
    """The KV cache that the call was given."""
    given: Tensor | None = None
    """Ids or embeddings that the call was given."""
    mask: Any = None
    """The `attention_mask` that the call was given."""


def unpadded(mask: Any) -> Any:
    """Returns a mask of (batch, tokens) as bools: models take any number but 0 as 1."""
    return mask != 0 if isinstance(mask, Tensor) and mask.dim() == PAIR else mask


def check_prompt(at: At, tokens: Tokens, name: str) -> None:
    """Validates that the prompt of a call is known where positions refer to it.

    Raises:
        HookError: it is not known.
    """
    if tokens.lengths is None and needs_prompt(at):
        msg = (
            f"positions {at!r} refer to the prompt, but a call of {name} does not show where it "
            "ends: the call continues from a KV cache whose first call this request has not seen, "
            "or that generate filled, or that was cut back; or it runs other ids than the call "
            "around it in generate, without a cache. Pass the length of the prompt with "
            "prepared.open(prompt=...)"
        )
        raise HookError(msg)


def mask_of(at: At, tokens: Tokens) -> Tensor:
    """Returns which tokens of a forward are at some positions: bools, (batch, length).

    Raises:
        HookTypeError: the function of `at` returns no bools of the shape of the positions.
    """
    positions = tokens.positions
    lengths = positions.new_zeros(1) if tokens.lengths is None else tokens.lengths[:, None]
    return (positions >= 0) & _chosen(at, positions, lengths)


def first_of(at: At, prompt: int) -> int | None:
    """Returns the first position that is named in a request, None if there is none.

    A function may choose any, so it counts from 0.

    Args:
        at: the positions.
        prompt: length of the request's prompt.
    """
    if isinstance(at, str):
        return {"prompt": 0, "last_prompt": prompt - 1, "generated": prompt}[at]
    if isinstance(at, int):
        position = at if at >= 0 else prompt + at
        return position if position >= 0 else None
    if not isinstance(at, slice):
        return 0
    start, stop = (
        None if bound is None else bound if bound >= 0 else max(0, prompt + bound)
        for bound in (at.start, at.stop)
    )
    return (start or 0) if stop is None or (start or 0) < stop else None


def _chosen(at: At, positions: Tensor, lengths: Tensor) -> Tensor:
    """Returns which positions are chosen, any for padding."""
    if at == "prompt":
        return positions < lengths
    if at == "last_prompt":
        return positions == lengths - 1
    if at == "generated":
        return positions >= lengths
    if isinstance(at, int):
        return positions == _absolute(at, lengths)
    if isinstance(at, slice):
        return _in_slice(at, positions, lengths)
    chosen = cast("Callable[[Tensor], Tensor]", at)(positions.clamp(min=PADDING))
    expected = f"the function of `at` must return a tensor of bools of shape {[*positions.shape]}"
    expect(chosen, Tensor, expected)
    if chosen.dtype != torch.bool or chosen.shape != positions.shape:
        msg = f"{expected}, got {chosen.dtype} of shape {[*chosen.shape]}"
        raise HookTypeError(msg)
    return chosen


def _absolute(position: int, lengths: Tensor) -> Tensor | int:
    """Returns a position; a negative one counts from the end of the prompt."""
    limited = min(max(position, _FIRST), _LAST)
    return limited if limited >= 0 else lengths + limited


def native_at(at: At) -> Any:
    """Returns positions as the core takes them: a function finds places in positions of rows."""
    return functools.partial(_places, at) if callable(at) else at


def _places(at: At, positions: list[list[int]], lengths: list[int]) -> list[int]:
    """Returns the places of the tokens at some positions, row after row."""
    tokens = Tokens(torch.tensor(positions, device="cpu"), torch.tensor(lengths, device="cpu"))
    places: list[int] = mask_of(at, tokens).flatten().nonzero().flatten().tolist()
    return places


def _in_slice(at: slice, positions: Tensor, lengths: Tensor) -> Tensor:
    def bound(value: int) -> Tensor | int:
        found = _absolute(value, lengths)
        return found.clamp(min=0) if isinstance(found, Tensor) else found

    start = 0 if at.start is None else bound(at.start)
    chosen: Tensor = positions >= start
    if at.stop is not None:
        chosen &= positions < bound(at.stop)
    if at.step is None:
        return chosen
    every: Tensor = (positions - start) % min(at.step, _LAST) == 0
    return chosen & every
