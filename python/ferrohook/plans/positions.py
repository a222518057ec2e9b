"""Positions of tokens in the calls of a model, for the hooks and captures of a plan.

Absolute: the first token of a prompt has position 0, whatever the padding, and tokens that a KV
cache holds count. They are found from what transformers' models are called with: `input_ids` or
`inputs_embeds` for the shape, `attention_mask` for the padding, `past_key_values` or `cache` (or
the length of the mask) for the tokens before; failing these, `position_ids`.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ferrohook.arguments import expect
from ferrohook.errors import HookError, HookTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

At: TypeAlias = (
    'Literal["prompt", "last_prompt", "generated"] | int | slice | Callable[[Tensor], Tensor]| None'
)
"""Positions: a name, an int, a slice, or a function from positions to bools, both (batch, length).

Negative ints and bounds count from the end of the prompt, so -1 is its last token. The function
gets -1 for padding, and what it returns there does not count.
"""

_NAMES = ("prompt", "last_prompt", "generated")
_TOKENS = ("input_ids", "inputs_embeds")
_CACHES = ("cache", "past_key_values")
"""Names of the KV cache: from transformers 5.24 on, and before."""
PADDING = -1
"""Position of a padding token; any other negative one is padding too."""
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
            msg = f"at is one of {', '.join(_NAMES)}, an int, a slice or a function, got {at!r}"
            raise ValueError(msg)
    elif isinstance(at, slice):
        for bound in (at.start, at.stop, at.step):
            expect(bound, (int, type(None)), "the bounds of a slice of positions are ints")
        if at.step is not None and at.step < 1:
            msg = f"the step of a slice of positions is at least 1, got {at.step}"
            raise ValueError(msg)
    elif isinstance(at, bool) or not (isinstance(at, int | None) or callable(at)):
        expect(at, (), "at is a name, an int, a slice or a function of positions")


def needs_prompt(at: At) -> bool:
    """True if positions refer to the length of the prompt."""
    if isinstance(at, slice):
        return any(bound is not None and bound < 0 for bound in (at.start, at.stop))
    return isinstance(at, str) or (isinstance(at, int) and at < 0)


class Prompt(NamedTuple):
    """The prompts of the running generation."""

    lengths: Tensor
    """Number of tokens of each row's prompt: (batch,)."""
    ids: Tensor | None
    """Token ids of the latest forward without cached tokens: (batch, length)."""


class Tokens(NamedTuple):
    """Tokens of one forward."""

    positions: Tensor
    """Position of each token, `PADDING` for padding: (batch, length)."""
    prompt: Prompt


def knows_positions(model: nn.Module) -> bool:
    """True if positions can be found from the arguments of a model's forward."""
    try:
        names = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
    return any(name in names for name in _TOKENS)


def tokens_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: Prompt | None
) -> Tokens:
    """Finds the positions of a forward's tokens; `before`: the prompts of the forward before it.

    Raises:
        HookError: the call takes no tokens.
    """
    signature = inspect.signature(model.forward)
    arguments = signature.bind_partial(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    tokens = next((arguments[name] for name in _TOKENS if arguments.get(name) is not None), None)
    if tokens is None:
        msg = (
            f"the positions of a call of {type(model).__name__} are not known: it has neither "
            "input_ids nor inputs_embeds; in a batch, give them by positions="
        )
        raise HookError(msg)
    batch, length = tokens.shape[:2]
    given_mask = arguments.get("attention_mask")
    mask = given_mask if isinstance(given_mask, Tensor) and given_mask.dim() == 2 else None  # noqa: PLR2004 (rows and columns)
    past = _cached(arguments, mask, length)
    if mask is not None and mask.shape[1] >= past + length:
        real = mask[:, : past + length].to(torch.long)
        positions = (real.cumsum(-1) - 1).where(real > 0, PADDING)[:, past:]
    elif (given := arguments.get("position_ids")) is not None:
        positions = given.expand(batch, length)
        if mask is None and given_mask is not None:
            positions = _without_padding(positions)
    else:
        positions = torch.arange(past, past + length, device=tokens.device).expand(batch, length)
    ids = arguments.get("input_ids")
    return Tokens(positions, _prompt(positions, past, ids, before))


def _without_padding(positions: Tensor) -> Tensor:
    """Marks the padding on the left, for which `generate` has position 0 too.

    With a static cache the attention mask has four dimensions, and says nothing of it.
    """
    zero = positions == 0
    padding = zero.clone()
    padding[:, :-1] &= zero[:, 1:]
    padding[:, -1:] = False
    return positions.masked_fill(padding, PADDING)


def _cached(arguments: Mapping[str, Any], mask: Tensor | None, length: int) -> int:
    """Returns the number of tokens, padding included, that the KV cache holds."""
    for name in _CACHES:
        cache: Any = arguments.get(name)
        if hasattr(cache, "get_seq_length"):
            return int(cache.get_seq_length())
        if isinstance(cache, tuple | list) and cache:
            return int(cache[0][0].shape[-2])
    return 0 if mask is None else max(mask.shape[1] - length, 0)


def _prompt(positions: Tensor, past: int, ids: Tensor | None, before: Prompt | None) -> Prompt:
    if before is not None and before.lengths.shape[0] == positions.shape[0]:
        if past:
            return before
        # Generation without a cache runs all tokens again.
        former = before.ids
        if (
            ids is not None
            and former is not None
            and former.shape[1] < ids.shape[1]
            and torch.equal(ids[:, : former.shape[1]], former)
        ):
            return Prompt(before.lengths, ids)
    return Prompt(positions.amax(-1) + 1, ids)


def mask_of(at: At, tokens: Tokens) -> Tensor:
    """Returns which tokens of a forward are at some positions: bools, (batch, length).

    Raises:
        HookTypeError: the function of `at` returns no bools of the shape of the positions.
    """
    positions, lengths = tokens.positions, tokens.prompt.lengths[:, None]
    return (positions >= 0) & _chosen(at, positions, lengths)


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
    expected = f"the function of `at` returns a tensor of bools of the shape {[*positions.shape]}"
    expect(chosen, Tensor, expected)
    if chosen.dtype != torch.bool or chosen.shape != positions.shape:
        msg = f"{expected}, got {chosen.dtype} of the shape {[*chosen.shape]}"
        raise HookTypeError(msg)
    return chosen


def _absolute(position: int, lengths: Tensor) -> Tensor | int:
    """Returns a position; a negative one counts from the end of the prompt."""
    limited = min(max(position, _FIRST), _LAST)
    return limited if limited >= 0 else lengths + limited


def native_at(at: At) -> Any:
    """Returns positions as the core takes them: a function finds places in a list of positions."""
    return functools.partial(_places, at) if callable(at) else at


def _places(at: At, positions: list[int], length: int) -> list[int]:
    tokens = Tokens(torch.tensor([positions]), Prompt(torch.tensor([length]), None))
    places: list[int] = mask_of(at, tokens)[0].nonzero().flatten().tolist()
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
