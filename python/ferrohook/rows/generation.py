"""`generating`: requests for the prompts of transformers' `model.generate`."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch

from ferrohook._core import Attachment
from ferrohook.arguments import expect
from ferrohook.errors import HookError, RowsError
from ferrohook.instrumentation import attach
from ferrohook.plans import Request
from ferrohook.plans.positions import Prompt, knows_positions, tokens_of
from ferrohook.priorities import AHEAD_OF_ALL
from ferrohook.rows.batches import Batch, models_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class _Generation(Batch):
    """Forwards of a generation: a row for each prompt."""

    _model: nn.Module
    _places: dict[Request, int]
    _prompt: Prompt | None = None
    _attached = False

    def __enter__(self) -> Self:
        try:
            self._attach()
        except BaseException:
            self._close()
            raise
        return super().__enter__()

    def _attach(self) -> None:
        if self._attached:
            return
        self._attached = True
        attachment = Attachment()
        attachment.release_with(self)
        attach({"": self._model}, attachment)
        # Not a method, which the model would keep the batch by.
        find = functools.partial(_find, weakref.ref(self))
        first: Any = {"priority": AHEAD_OF_ALL, "prepend": True, "scope": self}
        attachment.register([self._model], "forward_pre", find, with_kwargs=True, **first)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Sets the positions of a forward."""
        tokens = tokens_of(self._model, args, kwargs, self._prompt)
        if (rows := len(tokens.positions)) != self.size:
            msg = (
                f"the model is called with {rows} rows for {self.size} prompts: rows of beams, and "
                "of several sequences for a prompt, change hands between steps. Call generate with "
                "num_beams=1 and num_return_sequences=1, and give an entry for each prompt"
            )
            raise RowsError(msg)
        self._prompt = tokens.prompt
        both = torch.cat((tokens.prompt.lengths[:, None], tokens.positions), 1)
        both = both.cpu()  # the one wait for a GPU
        lengths = both[:, 0].tolist()
        self.move(both[:, 1:], {request: lengths[row] for request, row in self._places.items()})


def _find(
    shared: weakref.ref[_Generation],
    _model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if (generation := shared()) is not None:
        generation.find(args, kwargs)


def generating(requests: Sequence[Request | None]) -> Batch:
    """Makes a batch for `model.generate` of transformers, which a request shares for each prompt.

    The positions of each forward are found from what the model is called with: `attention_mask`,
    `past_key_values`, `position_ids`. So `at=` of plans works, and a capture has the activations of
    all positions that ran, (positions, ...). A prompt that ends before the others goes on with
    padding tokens: cut its activations to its length.

    Args:
        requests: one for each row of `input_ids`, open and not entered; None for a prompt without.

    Raises:
        HookTypeError: `requests` is no list of these.
        HookError: the model takes no tokens.
        RowsError: no request, one for several prompts, or requests of several models; when the
            model is called, more rows than prompts, as with beams.

    Examples:
        >>> a, b = plan_a.prepare(model).open(), plan_b.prepare(model).open()
        >>> with fh.rows.generating([a, None, b]):
        ...     model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"))
        >>> a.acts["model.layers.3"]  # (positions, width)
    """
    expect(requests, (list, tuple), "generating takes a list of requests")
    places: dict[Request, int] = {}
    for row, request in enumerate(requests):
        if request is None:
            continue
        expect(request, Request, "generating takes requests, and None for prompts without")
        if (other := places.setdefault(request, row)) != row:
            msg = f"{request!r} is for the prompts {other} and {row}: open a request for each"
            raise RowsError(msg)
    models = models_of(places)
    made = _Generation(dict(places), 0, len(requests) or None, [])
    (model,) = models
    if not knows_positions(model):
        msg = f"{type(model).__name__} is called without input_ids or inputs_embeds"
        raise HookError(msg)
    made._model, made._places = model, places
    return made
