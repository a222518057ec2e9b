"""`generating`: requests for the prompts of transformers' `model.generate`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ferrohook._core import Attachment
from ferrohook.attach.instrument import attach
from ferrohook.attach.priorities import AHEAD_OF_ALL
from ferrohook.errors import HookError, RowsError
from ferrohook.plans import Request
from ferrohook.rows.batches import Batch, models_of
from ferrohook.tokens.generate import in_callback
from ferrohook.tokens.positions import OF_REQUEST, check_prompt
from ferrohook.tokens.sequences import Sequences
from ferrohook.tokens.stacks import stacks_in
from ferrohook.util.arguments import expect
from ferrohook.util.weak import weakly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from ferrohook.tokens.positions import Tokens
    from ferrohook.tokens.stacks import TokenStack


class _GenerationBatch(Batch):
    """Forwards of a generation: a row for each prompt."""

    _model: nn.Module
    _places: dict[Request, int]
    _sequences: Sequences
    _running: list[Tokens | None]
    """Tokens of the calls that run, inner ones after outer ones."""
    _texts: dict[nn.Module, int]
    """Number of the texts that each decoder runs."""
    _inside: dict[nn.Module, bool]
    """Decoders that have run in the outermost call; False if not with the tokens around them."""

    def _attach(self) -> None:
        """Makes each call find its positions; called as it is entered."""
        attachment = Attachment()
        attachment.release_with(self)
        stacks = stacks_in(self._model)
        parts = {path: self._model.get_submodule(path) for path in stacks}
        attach(parts, attachment)
        for path, stack in stacks.items():
            find = functools.partial(weakly(self.find), stack)
            first: Any = {"priority": AHEAD_OF_ALL, "prepend": True, "scope": self}
            attachment.register([parts[path]], "forward_pre", find, with_kwargs=True, **first)
            end: Any = {"always_call": True, "scope": self}
            attachment.register([parts[path]], "forward", weakly(self.end), **end)

    def find(
        self, stack: TokenStack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Sets the positions of a call."""
        around = next((each for each in reversed(self._running) if each is not None), None)
        self._running.append(None)
        if around is None:
            self._inside.clear()
        if stack.inner and around is not None and stack.repeats(args, kwargs, around):
            self._check_text(stack, module, around, repeats=True)
            return
        if in_callback():
            msg = (
                "a logits processor of generate called the model with another text, as "
                "guidance_scale has it do: no prompt has its rows. Leave it out"
            )
            raise RowsError(msg)
        outer = around if stack.inner else None
        tokens = self._sequences.find(stack, module, args, kwargs, outer)
        self._check_text(stack, module, tokens, repeats=False)
        self._running[-1] = tokens
        if (rows := len(tokens.positions)) != self.size:
            msg = (
                f"the model was called with {rows} rows for {self.size} prompts: rows of beams, "
                "and of several sequences per prompt, change owners between steps. Call generate "
                "with num_beams=1 and num_return_sequences=1, and pass one entry per prompt"
            )
            raise RowsError(msg)
        untold = [each for each in self._places if not each.prompt]
        for request in untold:
            for at in request.plan_positions:
                check_prompt(at, tokens, module._get_name())
        known = tokens.positions.new_zeros(rows) if tokens.lengths is None else tokens.lengths
        both = torch.cat((known[:, None], tokens.positions), 1).cpu()  # the one wait for a GPU
        lengths = {} if tokens.lengths is None else {it: self._places[it] for it in untold}
        prompts = both[:, 0].tolist()
        self.move(both[:, 1:], {request: prompts[row] for request, row in lengths.items()})

    def _check_text(
        self, stack: TokenStack, module: nn.Module, tokens: Tokens, *, repeats: bool
    ) -> None:
        if stack.encoder:
            return
        # Without a cache all texts in a call of `generate` have one number.
        same = repeats and self._inside.get(module, repeats)
        another = module in self._inside and tokens.cache is None and not same
        self._inside[module] = repeats
        if another or self._texts.setdefault(module, tokens.number) != tokens.number:
            msg = (
                "other texts begin in this batch, and their rows would mix with those before: make "
                "a batch with generating for each call of generate, with requests opened for it"
            )
            raise RowsError(msg)

    def accept(self, tokens: int, _sequences: int) -> None:
        """Takes back the rows of rejected drafts; `tokens`: number of accepted ones."""
        for request in self._places:
            request.accept(tokens, OF_REQUEST)

    def stopped(self, _sequences: int) -> list[tuple[int, int]]:
        """Returns the rows that their plans have ended, with the positions of their last tokens."""
        return [(row, end.position) for it, row in self._places.items() for end in it.stopped]

    def end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Ends a call."""
        if self._running and (tokens := self._running.pop()) is not None:
            self._sequences.note(tokens, output)


def generating(requests: Sequence[Request | None]) -> Batch:
    """Makes a batch for transformers' `model.generate`, with one request per prompt.

    The positions of each forward are found from `generate` and from the inputs of the model:
    `attention_mask`, the KV cache, `position_ids`. So `at=` of plans works, also with chunked
    prompts, after a cache and with draft tokens. A capture has the activations of all positions
    that ran, (positions, ...). A prompt that ends before the others continues with padding tokens:
    cut its activations to its length.

    Args:
        requests: one for each row of `input_ids`, open and not entered; None for a prompt without.

    Raises:
        HookTypeError: `requests` is not a list of these.
        HookError: the model takes no tokens.
        RowsError: no request, one for several prompts, or requests of several models; when the
            model is called, more rows than prompts, as with beams, a call by a logits processor, as
            with `guidance_scale`, or other texts after the first ones.

    Examples:
        >>> a, b = plan_a.prepare(model).open(), plan_b.prepare(model).open()
        >>> with fh.rows.generating([a, None, b]):
        ...     model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"))
        >>> a.acts["model.layers.3"]  # (positions, width)
    """
    expect(requests, list | tuple, "generating needs a list of requests")
    places: dict[Request, int] = {}
    for row, request in enumerate(requests):
        if request is None:
            continue
        expect(
            request,
            Request,
            "generating needs a request per prompt, or None for a prompt without one",
        )
        if (other := places.setdefault(request, row)) != row:
            msg = f"{request!r} is used for prompts {other} and {row}: open a request for each"
            raise RowsError(msg)
    models = models_of(places)
    made = _GenerationBatch(dict(places), 0, len(requests) or None, [])
    (model,) = models
    if not stacks_in(model):
        msg = f"{type(model).__name__} takes neither input_ids nor inputs_embeds"
        raise HookError(msg)
    made._model, made._places = model, places
    made._attach_as_entered()
    stopped = weakly(made.stopped) if any(it.may_stop for it in places) else None
    made._sequences = Sequences(accept=weakly(made.accept), stopped=stopped, one_text=True)
    made._running, made._texts, made._inside = [], {}, {}
    return made
