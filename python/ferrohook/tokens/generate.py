"""Calls of transformers' `generate` that run: their prompts, drafts, and rows that end.

They are read from the stack: each call has a frame on its thread, and nothing of transformers is
changed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ferrohook.errors import HookError
from ferrohook.tokens.caches import has_states_alone
from ferrohook.tokens.positions import NUMBERS, PAIR, unpadded
from ferrohook.tokens.stacks import DECODER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import FrameType

_GENERATE: Final = "transformers.generation.utils"
_CALLBACKS: Final = frozenset(
    {"transformers.generation.logits_process", "transformers.generation.stopping_criteria"}
)
"""Modules whose objects `generate` calls: models that they call do not run its tokens."""
End: TypeAlias = tuple[int, int]
"""Row of a sequence that ends, and the position of its last token."""


class GenerateCall(NamedTuple):
    """Input of a running call of `generate`."""

    columns: int
    mask: Tensor | None
    """True for the columns without padding; None for all."""
    lengths: Tensor | None
    """Tokens of the prompts; None if they are not known."""
    use_cache: bool
    drafts: bool
    """True if it runs tokens that it may reject."""
    beams: bool
    """True if rows change hands between its calls."""
    number: int
    """Id of its sequences, if they have no cache or share it with drafts."""
    latest: list[int]
    """Id of the sequences of its last call, once it has made one."""
    has_run: bool = False
    """True if this is not its first call of the model."""

    def columns_until(self, end: int, batch: int, device: torch.device) -> Tensor:
        """Returns which of the first columns are no padding: bools, (batch, end).

        Raises:
            HookError: the call has other rows.
        """
        if self.mask is None:
            return torch.ones(batch, end, dtype=torch.bool, device=device)
        if len(self.mask) != batch:
            msg = f"generate has {len(self.mask)} rows, but calls the model with {batch}"
            raise HookError(msg)
        mask = self.mask.to(device)
        new = mask.new_ones(batch, max(end - self.columns, 0))
        return torch.cat((mask, new), 1)[:, :end]


def _contains(local: Mapping[str, Any], module: nn.Module) -> bool:
    """True if a module is part of the model that generates."""
    model = local.get("self")
    return isinstance(model, nn.Module) and any(each is module for each in model.modules())


def call_around(module: nn.Module, is_known: Callable[[Any], bool]) -> dict[str, Any] | None:
    """Returns the local variables of the call of `generate` that a call of a module is in.

    An assistant, which drafts, runs inside the call that it assists.

    Args:
        module: the module.
        is_known: returns whether the module has run in the call with a configuration before.
    """
    local: dict[str, Any] | None = None
    for found in _calls():
        config = found.get("generation_config")
        if local is None and not is_known(config) and not _contains(found, module):
            break
        local = found
        if not _is_assistant(found):
            break
    return local


def in_callback() -> bool:
    """Returns True inside of a callback of `generate`, such as a logits processor."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _CALLBACKS:
            return True
        frame = frame.f_back
    return False


def drafts_itself(module: nn.Module) -> bool:
    """True in a call by an assistant that is the model that it assists, as with early exit."""
    inner, *around = _calls()
    return _is_assistant(inner) and any(_contains(each, module) for each in around)


def _calls() -> Iterator[dict[str, Any]]:
    """Yields the local variables of the calls of `generate` on the stack, inner ones first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        place = frame.f_globals.get("__name__")
        if place in _CALLBACKS:
            return
        if place == _GENERATE and frame.f_code.co_name == "generate":
            yield frame.f_locals
        frame = frame.f_back


def _is_assistant(local: Mapping[str, Any]) -> bool:
    return bool(getattr(local.get("generation_config"), "is_assistant", False))


def read(
    local: Mapping[str, Any], cache: Any, past: int | None, length: int, device: torch.device
) -> GenerateCall:
    """Reads the input of a call of `generate`, as its first call of the model begins.

    Args:
        local: its local variables.
        cache: the KV cache of the model's call.
        past: number of tokens, padding included, that came before; None if it is not known.
        length: number of tokens of the model's call.
        device: device of the tokens.

    Raises:
        HookError: this version of transformers has others.
    """
    try:
        config, options, ids = (
            local[name] for name in ("generation_config", "model_kwargs", "input_ids")
        )
        decodes = bool(getattr(local["self"].config, "is_encoder_decoder", False))
    except KeyError as error:
        msg = (
            f"generate of this version of transformers does not expose its prompt ({error}): pass "
            "the number of its tokens with open(prompt=...)"
        )
        raise HookError(msg) from error
    mask = unpadded(options.get(f"{DECODER}attention_mask" if decodes else "attention_mask"))
    embeds = None if decodes else options.get("inputs_embeds")
    # After a cache its input is the whole text, if it has a mask as long, and else a continuation.
    whole = getattr(config, "_mask_length", None) if mask is None else mask.shape[1]
    if embeds is not None:
        columns = embeds.shape[1]
    elif whole is None or (past and has_states_alone(cache)):
        columns = (past or 0) + ids.shape[1]
    else:
        columns = whole
    lengths: Tensor | None = torch.full((len(ids),), columns, device=device)
    if mask is not None:
        fits = mask.dim() == PAIR and mask.shape[1] == columns
        mask, lengths = (mask, mask.to(device).sum(-1)) if fits else (None, None)
    drafts = getattr(local.get("decoding_method"), "__name__", "") == "_assisted_decoding"
    if not drafts and past is not None and past + length > columns:
        lengths = None  # a tuned prompt, of which `generate` does not know
    if (local.get("generation_mode_kwargs") or {}).get("assistant_tokenizer") is not None:
        lengths = None  # the drafts are of other tokens
    beams, number = (getattr(config, "num_beams", None) or 1) > 1, next(NUMBERS)
    uses_cache = bool(config.use_cache)
    return GenerateCall(columns, mask, lengths, uses_cache, drafts, beams, number, latest=[])


def watch(
    local: Mapping[str, Any], generation: GenerateCall, accept: Callable[[int, int], None]
) -> None:
    """Makes the stopping criteria of a call of `generate` report its accepted tokens, step by step.

    The list of them is made for the call. There is one row: others `generate` does not draft for.
    """
    before = local["input_ids"].shape[1]
    padding = 0 if generation.mask is None else int((~generation.mask).sum())
    prompt = generation.columns - padding

    def accepted(ids: Tensor, _scores: Any, **_others: Any) -> Tensor:
        # The last token was computed, and has not run.
        accept(prompt + ids.shape[1] - before - 1, generation.number)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    criteria = local.get("prepared_stopping_criteria")
    if not isinstance(criteria, list):
        msg = "generate of this version of transformers does not expose which drafts it rejects"
        raise HookError(msg)
    criteria.append(accepted)


def end_rows(
    local: Mapping[str, Any], generation: GenerateCall, stopped: Callable[[int], Iterable[End]]
) -> None:
    """Makes a call of `generate` end rows: the next token of each is the end-of-sequence token.

    Args:
        local: its local variables: the lists of processors and criteria, which are made for it.
        generation: its input.
        stopped: returns the ends of some sequences.

    Raises:
        HookError: it drafts or has beams, has several texts and no token to end one with, or this
            version of transformers has other lists.
    """
    if generation.drafts or generation.beams:
        msg = "a plan with stop() needs generate without drafts and beams"
        raise HookError(msg)
    processors = local.get("prepared_logits_processor")
    criteria = local.get("prepared_stopping_criteria")
    if not isinstance(processors, list) or not isinstance(criteria, list):
        msg = "generate of this version of transformers does not expose how its rows end"
        raise HookError(msg)
    config = local["generation_config"]
    ends = [getattr(config, name, None) for name in ("_eos_token_tensor", "_pad_token_tensor")]
    end = next((int(it.reshape(-1)[0]) for it in ends if isinstance(it, Tensor)), None)
    if end is None and len(local["input_ids"]) > 1:
        msg = (
            "a plan with stop() cannot end one of several texts without a token for it: pass "
            "eos_token_id or pad_token_id to generate"
        )
        raise HookError(msg)
    lasts = None if generation.lengths is None else (generation.lengths - 1).tolist()

    def ended_rows() -> list[int]:
        found = [it for number in generation.latest for it in stopped(number) or ()]
        # An end before the last token of the prompt belongs to an earlier turn.
        return [row for row, position in found if lasts is None or position >= lasts[row]]

    def end_next(_ids: Tensor, scores: Tensor, **_others: Any) -> Tensor:
        rows = ended_rows()
        if not rows or end is None:
            return scores
        scores = scores.clone()
        scores[rows] = -torch.inf
        scores[rows, end] = 0
        return scores

    def ended(ids: Tensor, _scores: Any, **_others: Any) -> Tensor:
        found = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        found[ended_rows()] = True
        return found

    processors.append(end_next)
    criteria.append(ended)
