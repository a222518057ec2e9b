"""`direct_logit_attribution`: what each part of the residual stream adds to a logit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ferrohook.analysis.calls import ModelCall, relative_distance, tolerance
from ferrohook.analysis.effects import Effects
from ferrohook.analysis.norms import FrozenNorm
from ferrohook.analysis.patching import dimensions_of
from ferrohook.analysis.targets import Targets, cloned
from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.quantity import quantities
from ferrohook.util.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from ferrohook.analysis.patching import Over
    from ferrohook.analysis.targets import Change
    from ferrohook.names.select import Selector
    from ferrohook.util.arguments import OutputIndex

_Z: Final = re.compile(r"(@|\.)z\.")


def direct_logit_attribution(  # noqa: PLR0913 (options by keyword)
    model: nn.Module,
    batch: Any,
    metric: Callable[[Any], Any],
    what: Selector = None,
    *,
    norm: str = "@final_norm",
    over: Over = (),
    output_index: OutputIndex = None,
    heads: int | None = None,
    tokens: Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> Effects:
    """Splits a logit into the direct contributions of places through the residual stream.

    The last norm is taken as linear, with the scale that it has on this batch (calling it shows
    whether it is a layer norm or an RMS norm). The code after it is taken by its gradient, which is
    the head itself if no cap follows. `scores["rest"]` is the remaining part of the metric: biases,
    and places of the stream that were not selected.

    A quantity includes the multipliers that the stream passes in later blocks.

    Args:
        model: any module; call `eval()` before.
        batch: keyword arguments of the model, a tuple of positional ones, or the only one.
        metric: maps the model's output to a logit or a difference of logits, or to one for each
            text, which are averaged; differentiably.
        what: places that are added to the stream: quantities, and modules whose outputs are added
            without multipliers, see `register`. None for the embedding (`@resid_pre.0` where it
            passes a norm or a projection first), attentions and MLPs. Over heads: `"@z.*"`, which
            is the default, or the projections after the attentions.
        norm: the norm before the head, a quantity or a module.
        over: split each place by "position", "head" or both; `()` for neither.
        output_index: part of the places' outputs, see `capture`; None for the first tensor.
        heads: number of heads that it goes over, side by side in the inputs of the projections.
        tokens: labels of the positions that it goes over.
        batch_size: texts of a forward; None for all at once. The metric gets the outputs of that
            many texts, and its values are averaged over the texts.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Raises:
        SelectionError: `what` or `norm` matches nothing.
        HookTypeError: an argument has the wrong type, or a place does not have the shape of the
            stream, or is a quantity that is not a term of it.
        HookError: `norm` is neither a layer norm nor an RMS norm, a place is not linear in its
            heads, a module runs more or less than once, or the metric has no gradient.
        ValueError: `batch_size` is less than 1.

    Examples:
        >>> logit = lambda out: out.logits[:, -1, token]
        >>> fh.analysis.direct_logit_attribution(model, ids, logit)
    """
    dimensions = dimensions_of(over, tokens=tokens, heads=heads)
    call = ModelCall.of(batch)
    projected = None
    if "head" in dimensions:
        projected, targets = _projections(model, what or "@z.*", heads, output_index)
    else:
        targets = Targets(model, what or _parts(model), output_index=output_index)
    path = _path(Targets(model, norm), norm)
    batches = call.batches(batch_size)
    names: list[str] = []
    found, scores = [], []
    with progress_bar("logit attribution", len(batches), "batch", shown=progress) as advance:
        for each in batches:
            names, values, value = _attributed(targets, projected, each, metric, (norm, path))
            found.append(values.cpu() * each.rows / call.rows)
            scores.append(float(value) * each.rows / call.rows)
            advance()
    values = torch.stack(found).sum(0)
    values = values if "position" in dimensions else values.sum(1)
    total = sum(scores)
    rest = {"metric": total, "rest": total - float(values.sum())}
    return Effects(values, names, dimensions, "attribution", rest, tokens)


def _attributed(
    targets: Targets,
    projected: Targets | None,
    call: ModelCall,
    metric: Callable[[Any], Any],
    norm: tuple[str, str],
) -> tuple[list[str], Tensor, Tensor]:
    """Attributes the metric of one call.

    Args:
        targets: the contributions to the stream.
        projected: tensors that split into heads; None to leave the heads together.
        call: the texts.
        metric: maps the output to a number.
        norm: name and path of the last norm.

    Returns:
        The names of the places, their attributions by position (and head), and the metric.
    """
    factors = _factors(targets)
    parts, _ = targets.read(call, cloned)
    name, path = norm
    (stream,) = Targets(targets.model, path, inputs=True).read(call, cloned)[0].values()
    found, value = Targets(targets.model, path).gradients(call, metric)
    ((normed, gradient),) = found.values()
    linear = FrozenNorm.of(name, targets.model.get_submodule(path), stream, normed)

    def given(name: str, part: Tensor) -> Tensor:
        """Returns the contribution of a tensor in the stream to the metric, by position."""
        try:
            added = part.expand_as(stream)  # embeddings of positions have one row
        except RuntimeError:
            msg = (
                f"{name!r} has shape {tuple(part.shape)}, but the stream has shape "
                f"{tuple(stream.shape)}: attribution only works on tensors that are added to the "
                "stream"
            )
            raise HookTypeError(msg) from None
        return factors[name] * (linear(added) * gradient.double()).sum((0, -1))

    if projected is None:
        values = torch.stack([given(name, part) for name, part in parts.items()])
    else:
        by_head = [
            torch.stack([given(name, part) for name, part in each.items()])
            for each in _by_head(targets, projected, call, parts)
        ]
        values = torch.stack(by_head, dim=-1)  # places, positions, heads
    return [*parts], values, value


def _parts(model: nn.Module) -> list[str]:
    """Returns the parts of a model's residual stream."""
    embedded = quantities(model)["embed"].stream_factor is not None
    return ["@embed" if embedded else "@resid_pre.0", "@attn_out.*", "@mlp_out.*"]


def _factors(targets: Targets) -> dict[str, float]:
    """Returns the factors of places in the stream that the last norm takes.

    Raises:
        HookTypeError: one is no term of it.
    """
    factors = {}
    for name, place in targets.places.items():
        if place.stream_factor is None:
            msg = (
                f"{name!r} is not a term of the stream after the last block, or passes through a "
                "norm on the way there: attribution only works on tensors that are added to that "
                "stream"
            )
            raise HookTypeError(msg)
        factors[name] = place.stream_factor
    return factors


def _path(norm: Targets, name: str) -> str:
    """Returns the path of the module whose output a norm is."""
    if len(norm.places) != 1:
        msg = f"norm must select one module, {name!r} matches {len(norm.places)}"
        raise SelectionError(msg)
    (place,) = norm.places.values()
    return place.path


def _projections(
    model: nn.Module, what: Selector, heads: int | None, output_index: OutputIndex
) -> tuple[Targets, Targets]:
    """Returns inputs of projections, split into heads, and their contributions, in one order.

    Of `@z` that is the attention's contribution, of modules their own input and output.
    """
    taken = Targets(model, what, heads=heads)
    quantities = [name for name in taken.names if taken.places[name].quantity]
    if not quantities:
        inputs = Targets(model, what, inputs=True, heads=heads)
        return inputs, Targets(model, what, output_index=output_index)
    added = [_Z.sub(r"\1attn_out.", name) for name in taken.names]
    if added == taken.names or len({*added}) < len(added):
        got = taken.names[0]
        msg = f"over='head' needs '@z.*' or the projections after the attentions, got {got!r}"
        raise HookTypeError(msg)
    return taken, Targets(model, added)


def _by_head(
    targets: Targets, inputs: Targets, call: ModelCall, outputs: dict[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Yields what each head adds to the output of each place.

    The projections run on one head at a time, the others at zero. All places at once, as each of
    them gets its own input whatever the stream is.

    Raises:
        HookError: the outputs are not the sums of the heads' and of a constant.
    """
    read, _ = inputs.read(call, cloned)
    cells = {name: inputs.cells(name, tensor.shape, ("head",)) for name, tensor in read.items()}

    def alone(head: int | None) -> dict[str, Tensor]:
        """Runs only one head, or none."""
        only = {name: torch.zeros_like(tensor) for name, tensor in read.items()}
        for name, tensor in read.items():
            for cell in cells[name]:
                if cell.head == head:
                    seen = inputs.view(name, tensor)
                    index = inputs.index(cell, seen)
                    inputs.view(name, only[name])[index] = seen[index]

        def replaced(name: str) -> Change:
            return lambda _: only[name]

        with inputs.changed({name: replaced(name) for name in only}):
            return targets.read(call, lambda _, tensor: tensor.double())[0]

    constant = alone(None)
    sums = {**constant}
    for head in range(max(map(len, cells.values()))):
        added = {name: tensor - constant[name] for name, tensor in alone(head).items()}
        sums = {name: tensor + added[name] for name, tensor in sums.items()}
        yield added
    for name, whole in outputs.items():
        if relative_distance(sums[name], whole.double()) > tolerance(whole):
            msg = (
                f"{name!r} is not linear in its heads: use the projection after the attention, in "
                "a model without a norm after it"
            )
            raise HookError(msg)
