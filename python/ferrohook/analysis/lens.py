"""`logit_lens`: tokens that a model would predict from the hidden states of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ferrohook.analysis.calls import (
    ModelCall,
    check_repeatable,
    relative_distance,
    tolerance,
    variants,
)
from ferrohook.analysis.effects import check_tokens
from ferrohook.analysis.sweeps import BATCH_SIZE
from ferrohook.analysis.targets import Targets, cloned
from ferrohook.errors import HookError, HookTypeError
from ferrohook.plot import pictures
from ferrohook.util.arguments import OutputIndex, at_least, expect_callable
from ferrohook.util.progress import progress_bar
from ferrohook.util.tables import Printed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.axes import Axes
    from torch import nn

    from ferrohook.names.select import Selector


class Decoder(Protocol):
    """Tokenizer: the method `decode` returns the text of a token id."""

    def decode(self, token_id: int, /) -> str: ...  # noqa: D102 (see the class)


@dataclass(frozen=True, eq=False, repr=False)
class Lens(Printed):
    """Predictions of each layer, see `logit_lens`. `print`, notebooks and `plot` show them."""

    names: list[str]
    """Names of the layers, in the order in which they ran."""
    ids: Tensor
    """The likeliest tokens: shape (layers, batch, positions, top), int64."""
    probabilities: Tensor
    """Their probabilities, float32."""
    decode: Callable[[int], str] = str
    """Text of a token id."""
    tokens: Sequence[str] | None = None
    """Labels of the positions; by default the texts of `inputs`."""
    inputs: Tensor | None = None
    """Token ids that the model was given, shape (batch, positions), where `decode` reads them."""

    def __post_init__(self) -> None:
        check_tokens(self.tokens, self.ids.shape[2])

    def texts(self, row: int = 0) -> list[list[str]]:
        """Returns the likeliest token of each layer at each position of one text."""
        return [[self.decode(each) for each in line] for line in self.ids[:, row, :, 0].tolist()]

    def plot(self, row: int = 0, *, ax: Axes | None = None) -> Axes:
        """Draws the likeliest tokens of one text, as `fh.plot.logit_lens` does.

        Raises:
            HookError: matplotlib is not installed.
        """
        best = self.probabilities[:, row, :, 0]
        texts, tokens = self.texts(row), self._labels(row)
        return pictures.predictions(best, texts, self.names, tokens=tokens, ax=ax)

    def _labels(self, row: int) -> Sequence[str] | None:
        if self.tokens is None and self.inputs is not None:
            return [self.decode(each) for each in self.inputs[row].tolist()]
        return self.tokens

    def _cells(self) -> list[list[str]]:
        positions = self._labels(0) or map(str, range(self.ids.shape[2]))
        lines = zip(self.names, self.texts(), strict=True)
        return [["name", *positions], *([name, *texts] for name, texts in lines)]


def logit_lens(  # noqa: PLR0913 (options by keyword)
    model: nn.Module,
    batch: Any,
    what: Selector = "@resid_post.*",
    *,
    to_logits: Callable[[Tensor], Tensor] | None = None,
    output_index: OutputIndex = None,
    top: int = 1,
    decode: Callable[[int], str] | Decoder = str,
    tokens: Sequence[str] | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool = True,
) -> Lens:
    """Decodes the hidden states of all layers with the model's own head.

    The model's own code maps them to logits: each hidden state replaces the last layer's in a
    copy of the rows, so that the norm, the head, scales and caps are the model's. The
    model is called once more with a row for each layer and text.

    Args:
        model: a model that returns logits, as a tensor or as `logits` of its output.
        batch: keyword arguments of the model, a tuple of positional ones, or the only one.
        what: hidden states, the last one among them: quantities or modules, see `register`.
        to_logits: maps a hidden state to logits, in place of the model's own code.
        output_index: part of a layer's output, see `capture`; None for its first tensor.
        top: number of tokens to keep.
        decode: a tokenizer, or a function of a token id.
        tokens: labels of the positions; by default the texts of `input_ids` if `decode` is given.
        batch_size: rows of a forward.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: an argument has the wrong type, two layers have other shapes, or the output
            has no logits.
        HookError: the last of the layers is not the last one of the model: what follows it mixes
            positions; rows of the model depend on each other; or a layer runs more or less than
            once.

    Examples:
        >>> lens = fh.analysis.logit_lens(model, ids, decode=tokenizer)
        >>> lens.plot()
    """
    decoding: Any = getattr(decode, "decode", decode)
    expect_callable(decoding, "decode must be a tokenizer or a function of a token id")
    targets = Targets(model, what, output_index=output_index)
    call = ModelCall.of(batch)
    found, output = targets.read(call, cloned)
    states = _checked(found)
    ids, probabilities = [], []
    with (
        torch.no_grad(),
        progress_bar("logit lens", len(states), "layer", shown=progress) as advance,
    ):
        if to_logits is None:
            all_logits = _by_the_model(targets, call, states, output, batch_size)
        else:
            all_logits = map(to_logits, states.values())
        for logits in all_logits:
            likeliest = logits.float().softmax(-1).topk(at_least(1, "top", top))
            ids.append(likeliest.indices.cpu())
            probabilities.append(likeliest.values.cpu())
            advance()
    inputs = None if decode is str else call.token_ids(ids[0].shape[:2])
    return Lens([*states], torch.stack(ids), torch.stack(probabilities), decoding, tokens, inputs)


def _checked(states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Validates that all hidden states have one shape, (batch, positions, width)."""
    *_, (last, expected) = states.items()
    for name, state in states.items():
        if state.shape != expected.shape or state.dim() != 3:  # noqa: PLR2004 (the dimensions)
            msg = (
                "hidden states must have one shape, (batch, positions, width), got "
                f"{tuple(state.shape)} of {name!r} and {tuple(expected.shape)} of {last!r}"
            )
            raise HookTypeError(msg)
    return states


def _by_the_model(
    targets: Targets, call: ModelCall, states: dict[str, Tensor], output: Any, batch_size: int
) -> Iterator[Tensor]:
    """Yields the logits that the model makes of each state in place of the last one."""
    *_, last = states
    _check_last(targets, call, last, states[last], output)
    together = max(at_least(1, "batch_size", batch_size) // call.rows, 1)
    names = [*states]
    for start in range(0, len(names), together):
        chunk = names[start : start + together]
        stacked = torch.cat([states[name] for name in chunk])
        with targets.changed({last: lambda _, stacked=stacked: stacked}):  # type: ignore[misc]
            made = call.repeated(len(chunk)).run(targets.model)
        for name, own in zip(chunk, variants(made, output, len(chunk)), strict=True):
            if name == last:
                check_repeatable(own, output, targets.model)
            yield _logits(own)


def _check_last(targets: Targets, call: ModelCall, last: str, state: Tensor, output: Any) -> None:
    """Validates that the logits of a position depend only on the last state of that position.

    Raises:
        HookError: they do not, as where other layers follow.
    """
    changed, before = state.clone(), _logits(output)
    mask = torch.ones(before.shape[:2], dtype=torch.bool, device="cpu")
    if call.mask is not None and call.mask.shape == mask.shape:
        mask = call.mask.cpu()
    texts, first = torch.arange(len(mask), device="cpu"), mask.int().argmax(1)
    changed[texts, first] = -changed[texts, first].flip(-1)
    with targets.changed({last: lambda _: changed}):
        logits = _logits(call.run(targets.model))
    others = mask.clone()
    others[texts, first] = False
    if not others.any():
        return
    expected = before[others.to(before.device)]
    if relative_distance(logits[others.to(logits.device)], expected) > tolerance(expected):
        msg = (
            f"{last!r} is not the last layer: the model mixes positions after it. Select all "
            "layers, or pass to_logits"
        )
        raise HookError(msg)


def _logits(output: Any) -> Tensor:
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        msg = f"a logit lens needs a model that returns logits, got {type(output).__name__}"
        raise HookTypeError(msg)
    return found
