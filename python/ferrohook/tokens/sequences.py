"""Tokens of a call of a model: the sequence, position and part (prompt or generated) of each.

The one place that finds them, from these sources:

- How many tokens came before: the KV cache; for one that does not count, the calls that filled it;
  `cache_position`; an `attention_mask` that is longer than the tokens.
- Padding: `attention_mask` of (batch, tokens); in transformers' `generate` the one that it got.
- Where the prompt ends: as passed when the request was opened. Else, in `generate`, at the end of
  its input, even if that is chunked, drafted or cached. Else the first call of a sequence: its
  tokens are the prompt, and tokens that run later with its KV cache are generated.

The state of a sequence is stored with its KV cache, weakly, so that threads, turns and copies of
a cache do not mix. Once the program chooses, reorders or repeats rows itself, as in a beam search
by hand, only what all rows had in common is known. Positions that no source gives are refused
where a plan needs them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ferrohook.errors import HookError
from ferrohook.tokens import generate
from ferrohook.tokens.caches import cache_in, given_cache, lasting, length_of, memory_of
from ferrohook.tokens.positions import NUMBERS, PADDING, PAIR, Tokens, unpadded
from ferrohook.util.weak import PerObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.multiprocessing.reductions import StorageWeakRef

    from ferrohook.tokens.generate import GenerateCall
    from ferrohook.tokens.stacks import TokenStack


class _Sequence(NamedTuple):
    """Prompts and length of the sequences of a KV cache."""

    prompt: tuple[Tensor, int] | None
    """Tokens of the prompts, (batch,), and their columns; None if no source says where they end."""
    seen: int
    """Columns that ran, padding included."""
    ends: Tensor | None
    """Position after the last token of each: (batch,); None if no source says."""
    number: int
    """See `Tokens`."""
    batch: int
    memory: StorageWeakRef | None = None
    """Memory of the keys after the call; it changes when rows are chosen, reordered or repeated."""

    def of_other_rows(self, batch: int) -> _Sequence:
        """Returns the facts common to all rows, for rows chosen from these."""

        def common(values: Tensor | None) -> Tensor | None:
            if values is None or bool((values != values[:1]).any()):
                return None
            return values[:1].expand(batch)

        lengths = None if self.prompt is None else common(self.prompt[0])
        prompt = None if self.prompt is None or lengths is None else (lengths, self.prompt[1])
        return _Sequence(prompt, self.seen, common(self.ends), next(NUMBERS), batch)


class Sequences:
    """Sequences that a request or batch has seen run.

    Args:
        prompt: numbers of tokens of the prompts, one for each row or one for all; none if the
            caller did not pass them.
        accept: called with the number of tokens that have run and stay, and the id of their
            sequences: after each step of a generation with drafts, and where a cache was cut back.
        stopped: returns the ends of the sequences of an id, of earlier turns too.
        one_text: calls run the text of the call around them, or are refused.
    """

    def __init__(
        self,
        prompt: Sequence[int] = (),
        accept: Callable[[int, int], None] | None = None,
        stopped: Callable[[int], Iterable[generate.End]] | None = None,
        *,
        one_text: bool = False,
    ) -> None:
        self.prompt = prompt
        self._accept = accept
        self._stopped = stopped
        self._one_text = one_text
        self._known: PerObject[Any] = PerObject()
        """Sequences by their cache, and generations by their configuration."""

    def _get(self, key: Any) -> Any:
        return self._known.get(lasting(key))

    def _put(self, key: Any, value: Any) -> None:
        with contextlib.suppress(TypeError):  # a tuple: nothing can be kept with it
            self._known[lasting(key)] = value

    def find(
        self,
        stack: TokenStack,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outer: Tokens | None = None,
    ) -> Tokens:
        """Finds the tokens of a call.

        Args:
            stack: the module, as what takes tokens.
            module: the module.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            outer: tokens of the call around it, which it does not repeat.

        Raises:
            HookError: their positions are not known.
        """
        call = _StackCall(stack, stack.arguments(args, kwargs))
        before: _Sequence | None = None if call.cache is None else self._get(call.cache)
        past = call.past(before)
        generation = None if stack.encoder else self._generation(module, call, past)
        other = (
            outer is not None and not self._one_text and _is_other_text(call, past, before, outer)
        )
        # Or the text of `generate`, whose ids the model edited: only a cache tells them apart.
        unknown = other and generation is not None and call.cache is None
        if unknown:
            self._refuse_stops(stack)
        generation = None if other else generation
        if generation is not None and outer is not None and _has_other_length(call, past, outer):
            # A prompt of more tokens than `generate` knows of. Later calls do not show it.
            generation = self._without_lengths(module, generation)
        if before is not None and call.has_other_rows(before, reorders=generation is not None):
            before = before.of_other_rows(call.batch)
        if generation is not None and call.cache is None and generation.has_run:
            # Without a cache all tokens run again. Else the model keeps its own cache, and a longer
            # mask may show how many tokens it holds.
            past = past or None if generation.use_cache else 0
        goes_on = _continued(before, past, generation)
        positions = call.positions(past, generation, goes_on)
        ends = positions.amax(-1) + 1 if call.length else positions.new_zeros(call.batch)
        if goes_on is not None and goes_on.ends is not None:
            ends = torch.maximum(goes_on.ends, ends)
        known = generation is None and not unknown
        prompt = _prompt_of(call, past, before, ends) if known else None
        number = _number_of(call, past, before, generation)
        drafts = generation is not None and generation.drafts
        if before is not None and past and past < before.seen and call.length and not drafts:
            number = self._cut_back(positions, number)
        after = (
            _Sequence(prompt, past + call.length, ends, number, call.batch)
            if past is not None and call.length
            else None
        )
        if call.cache is not None and after is not None:
            self._put(call.cache, after)
        if generation is not None:
            generation.latest[:] = [number]
            lengths = generation.lengths
        else:
            lengths = None if prompt is None else prompt[0]
        lengths = self._lengths(call, lengths)
        if drafts and generate.drafts_itself(module):  # its accepted tokens run again
            positions = torch.full_like(positions, PADDING)
        return Tokens(positions, lengths, after, number, call.cache, call.given, call.mask)

    def _refuse_stops(self, stack: TokenStack) -> None:
        if self._stopped is not None:
            msg = (
                f"a call of {stack.name} in generate runs other ids than the call around it, "
                "without a cache: whether they are its text, whose rows a plan with stop() ends, "
                "is not known. Pass use_cache=True"
            )
            raise HookError(msg)

    def _cut_back(self, positions: Tensor, number: int) -> int:
        """Takes back the rows of tokens that were cut out of a cache; returns the new number.

        Args:
            positions: of the tokens that run after the cut.
            number: of the sequences before it.
        """
        starts = positions[:, 0].unique().tolist()
        if self._accept is None or len(starts) > 1:
            return next(NUMBERS)  # no row of before is part of its value any more
        self._accept(starts[0], number)
        return number

    def note(self, tokens: Tokens, output: Any) -> None:
        """Takes note of the KV cache after a call: the given one, or the one in its output."""
        cache = cache_in(output) if tokens.cache is None else tokens.cache
        if tokens.after is not None and cache is not None:
            self._put(cache, tokens.after._replace(memory=memory_of(cache)))

    def _generation(
        self, module: nn.Module, call: _StackCall, past: int | None
    ) -> GenerateCall | None:
        """Returns the input of the call of `generate` that a call is in; None outside of any."""
        local = generate.call_around(module, lambda config: self._get(config) is not None)
        if local is None:
            return None
        config = local.get("generation_config")
        known: GenerateCall | None = self._get(config)
        if known is None:
            known = generate.read(local, call.cache, past, call.length, call.device)
            if known.drafts and self._accept is not None:
                generate.watch(local, known, self._accept)
            if self._stopped is not None:
                generate.end_rows(local, known, self._stopped)
            self._put(config, known._replace(has_run=True))
        return known

    def _without_lengths(self, module: nn.Module, generation: GenerateCall) -> GenerateCall:
        """Notes that the prompts of the call of `generate` around a call are not known."""
        local = generate.call_around(module, lambda config: self._get(config) is not None)
        unknown = generation._replace(lengths=None)
        if local is not None:
            self._put(local.get("generation_config"), unknown._replace(has_run=True))
        return unknown

    def _lengths(self, call: _StackCall, found: Tensor | None) -> Tensor | None:
        """Returns the lengths of the prompts of a call; None if no source gives them."""
        if not self.prompt:
            return found if found is not None and len(found) == call.batch else None
        if len(self.prompt) not in {1, call.batch}:
            msg = f"prompt has {len(self.prompt)} lengths for a call of {call.batch} rows"
            raise HookError(msg)
        return torch.tensor(self.prompt, device=call.device).expand(call.batch)


class _StackCall:
    """Arguments of a call of a stack."""

    def __init__(self, stack: TokenStack, arguments: dict[str, Any]) -> None:
        self._name = stack.name
        self._arguments = arguments
        self.given = stack.tokens(arguments)
        self.batch, self.length = self.given.shape[:2]
        self.device = self.given.device
        self.cache = given_cache(arguments)
        self.mask = arguments.get(f"{stack.prefix}attention_mask")
        self._mask = unpadded(self.mask)
        places = arguments.get(f"{stack.prefix}position_ids")
        # With three dimensions they are not only positions of tokens (M-RoPE).
        self._places: Tensor | None = None
        if isinstance(places, Tensor) and places.dim() <= PAIR:
            self._places = places.long()

    def past(self, before: _Sequence | None) -> int | None:
        """Returns how many tokens, padding included, came before; None if no source shows it."""
        cache, start = self.cache, self._arguments.get("cache_position")
        if isinstance(cache, tuple | list) and cache and isinstance(cache[0], tuple | list):
            return int(cache[0][0].shape[-2])
        if cache is not None and (length := length_of(cache)) is not None:
            return length
        if before is not None:
            return before.seen
        if isinstance(start, Tensor) and start.numel():
            return int(start.reshape(-1)[0])
        mask = self._columns()
        if cache is not None and (mask is None or mask.shape[1] == self.length):
            return None
        return 0 if mask is None else max(mask.shape[1] - self.length, 0)

    def has_other_rows(self, before: _Sequence, *, reorders: bool) -> bool:
        """True if the rows of the cache were chosen, reordered or repeated since a call.

        Args:
            before: the sequence after that call.
            reorders: the caller is known to reorder rows itself.
        """
        if before.batch != self.batch:
            return True
        if reorders or self.batch == 1 or before.memory is None:
            return False
        memory = memory_of(self.cache)
        return memory is not None and memory.cdata != before.memory.cdata

    def is_one_run(self) -> bool:
        """True if each row is one sequence, its tokens in order."""
        if self._places is None or self._columns() is not None:
            return True
        return bool((self._places.diff() == 1).all())

    def positions(
        self, past: int | None, generation: GenerateCall | None, before: _Sequence | None
    ) -> Tensor:
        """Returns the position of each token, `PADDING` for padding: (batch, length).

        Raises:
            HookError: no source shows them.
        """
        if past is None:
            if self._places is None:
                raise self._unknown
            return self._places.expand(self.batch, self.length)
        own, until = self._columns(), past + self.length
        if own is not None and own.shape[1] >= until:
            return _counted(own[:, :until])[:, past:]
        if generation is not None:
            return _counted(generation.columns_until(until, self.batch, self.device))[:, past:]
        if own is not None and before is not None and own.shape[1] == self.length:
            if before.ends is None:
                raise self._unknown
            counted = _counted(own)
            return (counted + before.ends[:, None]).where(counted >= 0, PADDING)
        if self._places is not None and (self._mask is None or self.is_one_run()):
            return self._places.expand(self.batch, self.length)
        if self._mask is not None or (before is not None and before.ends is None):
            raise self._unknown
        columns = torch.arange(self.length, device=self.device).expand(self.batch, self.length)
        return columns + (past if before is None else cast("Tensor", before.ends)[:, None])

    def _columns(self) -> Tensor | None:
        mask = self._mask
        return mask if isinstance(mask, Tensor) and mask.dim() == PAIR else None

    @property
    def _unknown(self) -> HookError:
        given = [name for name, value in self._arguments.items() if value is not None]
        return HookError(
            f"the positions of a call of {self._name} are not known: {', '.join(given)} do not "
            "show how many tokens came before, or which are padding. Pass an attention_mask of "
            "shape (batch, tokens so far), or position_ids that increase by one"
        )


def _is_other_text(
    call: _StackCall, past: int | None, before: _Sequence | None, outer: Tokens
) -> bool:
    """True if a call does not run the text of the call around it, as one of guidance.

    Args:
        call: the call, which does not repeat the ids around it.
        past: number of tokens, padding included, that came before; None if it is not known.
        before: the sequences that its cache has.
        outer: tokens of the call around it.
    """
    if call.given.shape[:2] == outer.positions.shape:
        return True
    # Embeddings may be those of the text and a tuned prompt.
    ids = all(each is not None and each.dim() == PAIR for each in (call.given, outer.given))
    if call.cache is None:
        return ids
    if outer.cache is not None:
        return call.cache is not outer.cache
    # The model's own cache has as many tokens as the text around it. It may be another text's that
    # has grown to this length: one whose prompt was known.
    known = before is not None and before.prompt is not None
    return known or (ids and _has_other_length(call, past, outer))


def _has_other_length(call: _StackCall, past: int | None, outer: Tokens) -> bool:
    """True if a text is known to have other tokens than the one around it, by their numbers."""
    if past is None or outer.after is None:
        return False
    length, expected = past + call.length, outer.after.seen
    # The model around it may be given tokens that the cache has, and drop them.
    return length > expected or (length < expected and call.cache is not outer.cache)


def _continued(
    before: _Sequence | None, past: int | None, generation: GenerateCall | None
) -> _Sequence | None:
    """Returns the sequences that a call continues, with their ends if these are still known."""
    if before is None or not past:
        return None
    if past == before.seen:
        return before
    # The cache was cut back or filled elsewhere: how much of that was padding is not known.
    padded = before.ends is None or bool((before.ends != before.seen).any())
    return before._replace(ends=None) if padded and generation is None else None


def _prompt_of(
    call: _StackCall, past: int | None, before: _Sequence | None, ends: Tensor
) -> tuple[Tensor, int] | None:
    """Returns the prompts of a call outside of `generate`, as `_Sequence` has them.

    Args:
        call: the call.
        past: number of tokens, padding included, that came before; None if it is not known.
        before: the sequences that its cache has.
        ends: position after the last token of each row.
    """
    if past == 0:
        return (ends, call.length) if call.is_one_run() else None
    if before is None or past is None or before.prompt is None:
        return None
    # Not if the cache was cut back into its prompt.
    return before.prompt if past >= before.prompt[1] else None


def _number_of(
    call: _StackCall, past: int | None, before: _Sequence | None, generation: GenerateCall | None
) -> int:
    """Returns the number of the sequences that a call continues, or a new one."""
    if generation is not None and generation.beams:
        return next(NUMBERS)
    # A model may draft for itself: its call with the drafts replaces their rows.
    if generation is not None and generation.drafts:
        return generation.number
    if before is not None and past:
        return before.number
    # Without a cache all tokens of a generation run again.
    if generation is not None and call.cache is None:
        return generation.number
    return next(NUMBERS)


def _counted(mask: Tensor) -> Tensor:
    """Returns the position of each column, `PADDING` for padding."""
    return (mask.cumsum(-1) - 1).where(mask, PADDING)
