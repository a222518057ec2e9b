"""`direct_logit_attribution`: what each part of the residual stream adds to a logit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ferrohook.analysis.calls import Call, relative_distance, tolerance
from ferrohook.analysis.effects import Effects
from ferrohook.analysis.patching import dimensions_of
from ferrohook.analysis.places import Places
from ferrohook.errors import HookError, HookTypeError, SelectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from ferrohook.analysis.patching import Over
    from ferrohook.analysis.places import Change
    from ferrohook.selection import Selector


def direct_logit_attribution(  # noqa: PLR0913 (options by keyword)
    model: nn.Module,
    batch: Any,
    metric: Callable[[Any], Any],
    what: Selector,
    *,
    norm: str,
    over: Over = (),
    output_index: int | str | None = None,
    heads: int | None = None,
    tokens: Sequence[str] | None = None,
) -> Effects:
    """Splits a logit into what each place adds to it directly, by the residual stream.

    The last norm is taken as linear, with the scale that it has on this batch (of a layer norm or
    an RMS norm, which calling it tells apart), and what follows it by its gradient, which is the
    head itself where no cap stands behind it. `scores["rest"]` is the part of the metric that no
    place gives: biases, and places of the stream that were not selected.

    Args:
        model: any module; call `eval()` before.
        batch: keyword arguments of the model, a tuple of positional ones, or the only one.
        metric: maps the model's output to a logit or a difference of logits, or to one for each
            text, which are averaged; differentiably.
        what: places that are added to the stream, such as the attentions and MLPs; see `select`.
            Over heads: the projections behind the attentions.
        norm: path of the norm before the head.
        over: split each place by "position", "head" or both; `()` for neither.
        output_index: part of the places' outputs, see `capture`; None for the first tensor.
        heads: number of heads that lie side by side in the inputs of the places.
        tokens: labels of the positions.

    Raises:
        SelectionError: `what` or `norm` matches nothing.
        HookTypeError: an argument has the wrong type, or a place has not the shape of the stream.
        HookError: `norm` is neither a layer norm nor an RMS norm, a place is not linear in its
            heads, a module runs more or less than once, or the metric has no gradient.

    Examples:
        >>> logit = lambda out: out.logits[:, -1, token]
        >>> parts = ["model.embed_tokens", "**.self_attn", "**.mlp"]
        >>> fh.analysis.direct_logit_attribution(
        ...     model, ids, logit, parts, norm="model.norm"
        ... )
    """
    dimensions = dimensions_of(over)
    call = Call.of(batch)
    places = Places(model, what, output_index=output_index)
    parts, _ = places.read(call, Tensor.clone)
    (stream,) = _one(Places(model, norm, inputs=True), norm).read(call, Tensor.clone)[0].values()
    found, value = Places(model, norm).gradients(call, metric)
    ((normed, gradient),) = found.values()
    linear = _Frozen.of(norm, model.get_submodule(norm), stream, normed)

    def given(name: str, part: Tensor) -> Tensor:
        """Returns what a tensor in the stream adds to the metric, by position."""
        try:
            added = part.expand_as(stream)  # embeddings of positions have one row
        except RuntimeError:
            msg = (
                f"{name!r} has the shape {tuple(part.shape)} and the stream "
                f"{tuple(stream.shape)}: attribution takes what is added to the stream"
            )
            raise HookTypeError(msg) from None
        return (linear(added) * gradient.double()).sum((0, -1))

    if "head" in dimensions:
        inputs = Places(model, what, inputs=True, heads=heads)
        by_head = [
            torch.stack([given(name, part) for name, part in each.items()])
            for each in _by_head(places, inputs, call, parts)
        ]
        values = torch.stack(by_head, dim=-1)  # places, positions, heads
    else:
        values = torch.stack([given(name, part) for name, part in parts.items()])
    values = (values if "position" in dimensions else values.sum(1)).cpu()
    metric_value = float(value)
    scores = {"metric": metric_value, "rest": metric_value - float(values.sum())}
    return Effects(values, [*parts], dimensions, "attribution", scores, tokens)


def _one(places: Places, norm: str) -> Places:
    if len(places.names) != 1:
        msg = f"norm takes one module, {norm!r} matches {len(places.names)}"
        raise SelectionError(msg)
    return places


class _Frozen(NamedTuple):
    """A norm as the linear function that it is for the scale of one stream."""

    gain: Tensor
    centred: bool
    scale: Tensor

    def __call__(self, tensor: Tensor) -> Tensor:
        return _gained(tensor, self.gain, centred=self.centred) * self.scale

    @classmethod
    def of(cls, name: str, norm: nn.Module, stream: Tensor, normed: Tensor) -> _Frozen:
        """Finds the function by calling the norm, and validates it on the stream.

        Raises:
            HookError: the norm is none of the known kinds.
        """
        width = stream.shape[-1]
        signs = torch.ones(width).double()
        signs[1::2] = -1
        if width % 2:
            signs[-3:] = torch.tensor([1.0, 1.0, -2.0])  # the mean is 0
        probes = torch.stack([torch.zeros(width), signs, torch.linspace(0.5, 1.5, width)])
        probes = probes[:, None].to(stream)
        with torch.no_grad():
            # One at a time, in the dimensions of the stream.
            bias, answer, slope = (norm(probe[None])[0].double() for probe in probes)
        gain = (answer - bias) / probes[1].double()
        kinds = [
            (_distance(probes[2], slope - bias, gain, centred=centred), centred)
            for centred in (False, True)
        ]
        _, centred = min(kinds)
        scale = _scale(stream, normed.double() - bias, gain, centred=centred)
        found = cls(gain, centred, scale)
        if not relative_distance(found(stream) + bias, normed.double()) <= tolerance(normed):
            msg = (
                f"{name!r} ({norm._get_name()}) is neither a layer norm nor an RMS norm: its "
                "output is not its input times a gain and a scale"
            )
            raise HookError(msg)
        return found


def _gained(tensor: Tensor, gain: Tensor, *, centred: bool) -> Tensor:
    exact = tensor.double()
    return gain * (exact - exact.mean(-1, keepdim=True) if centred else exact)


def _scale(x: Tensor, y: Tensor, gain: Tensor, *, centred: bool) -> Tensor:
    """Fits the number by which the gained input is the output, at each position."""
    taken = _gained(x, gain, centred=centred)
    return (taken * y).sum(-1, keepdim=True) / taken.square().sum(-1, keepdim=True)


def _distance(x: Tensor, y: Tensor, gain: Tensor, *, centred: bool) -> float:
    taken = _gained(x, gain, centred=centred)
    return relative_distance(taken * _scale(x, y, gain, centred=centred), y)


def _by_head(
    places: Places, inputs: Places, call: Call, outputs: dict[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Yields what each head adds to the output of each place.

    The projections run on one head at a time, the others at zero. All places at once, as each of
    them gets its own input whatever the stream is.

    Raises:
        HookError: the outputs are not the sums of the heads' and of a constant.
    """
    read, _ = inputs.read(call, Tensor.clone)
    cells = {name: inputs.cells(name, tensor.shape, ("head",)) for name, tensor in read.items()}

    def alone(head: int | None) -> dict[str, Tensor]:
        """Runs one head alone, or none."""
        only = {name: torch.zeros_like(tensor) for name, tensor in read.items()}
        for name, tensor in read.items():
            for cell in cells[name]:
                if cell.head == head:
                    index = inputs.index(cell)
                    inputs.view(only[name])[index] = inputs.view(tensor)[index]

        def replaced(name: str) -> Change:
            return lambda _: only[name]

        with inputs.changed({name: replaced(name) for name in only}):
            return places.read(call, lambda tensor: tensor.double())[0]

    constant = alone(None)
    sums = {**constant}
    for head in range(inputs.heads or 0):
        added = {name: tensor - constant[name] for name, tensor in alone(head).items()}
        sums = {name: tensor + added[name] for name, tensor in sums.items()}
        yield added
    for name, whole in outputs.items():
        if relative_distance(sums[name], whole.double()) > tolerance(whole):
            msg = (
                f"{name!r} is not linear in its heads: take the projection behind the attention, "
                "in a model without a norm behind it"
            )
            raise HookError(msg)
