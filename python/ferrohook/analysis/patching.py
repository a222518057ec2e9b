"""`activation_patching` and `attribution_patching`: where two texts differ inside a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from ferrohook.analysis.calls import ModelCall, score
from ferrohook.analysis.effects import Effects, check_labelled
from ferrohook.analysis.sweeps import BATCH_SIZE, sweep
from ferrohook.analysis.targets import Targets, cloned
from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from ferrohook.analysis.targets import Cell
    from ferrohook.names.select import Selector
    from ferrohook.util.arguments import OutputIndex

Over: TypeAlias = "Literal['position', 'head'] | Sequence[Literal['position', 'head']]"
"""Dimensions that an analysis goes over beside the places; both are positions, then heads."""


def activation_patching(  # noqa: PLR0913 (options by keyword)
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Callable[[Any], Any],
    what: Selector = "@resid_post.*",
    *,
    over: Over = "position",
    inputs: bool = False,
    output_index: OutputIndex = None,
    heads: int | None = None,
    tokens: Sequence[str] | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool = True,
) -> Effects:
    """Replaces activations on one input by those on another, cell by cell, and measures the score.

    Each cell is a forward on the corrupted input with one place replaced by its value from the
    clean input: at one position, in one head, or all of it. Many cells share a forward, each on a
    copy of the rows. An effect is 0 where the score stays at the corrupted input's, and 1 where
    it reaches the clean input's.

    Args:
        model: any module whose rows are independent of each other; call `eval()` before.
        clean: inputs whose activations are taken: keyword arguments, a tuple of positional ones, or
            the only one. The first dimension of its tensors counts the texts.
        corrupted: inputs of the same shapes that the model runs on.
        metric: maps the model's output to a number, or to one for each text, which are averaged.
        what: places: quantities and modules, see `register`.
        over: go over each "position", each "head", or both; `()` for whole tensors.
        inputs: patch the inputs of the modules instead of their outputs.
        output_index: part of the output to patch, see `capture`; None for its first tensor.
        heads: number of heads that it goes over, side by side in the last dimension; `@z` knows
            its own.
        tokens: labels of the positions that it goes over.
        batch_size: rows of a forward.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: an argument has the wrong type, or a place other shapes than the analysis
            needs.
        HookError: both inputs have the same score; rows of the model depend on each other; or a
            module runs more or less than once.

    Examples:
        >>> difference = lambda out: out.logits[:, -1, mary] - out.logits[:, -1, john]
        >>> effects = fh.analysis.activation_patching(
        ...     model, clean, corrupted, difference, "@resid_pre.*"
        ... )
        >>> effects.plot()
    """
    dimensions = dimensions_of(over, tokens=tokens, heads=heads)
    targets = Targets(model, what, inputs=inputs, output_index=output_index, heads=heads)
    source, target = ModelCall.of(clean, "clean"), ModelCall.of(corrupted, "corrupted")
    sources, clean_output = targets.read(source, cloned)
    shapes, plain = targets.read(target, lambda _, tensor: tensor.shape)
    _check_shapes(sources, shapes)
    cells = targets.all_cells(shapes, dimensions)
    ends = _ends(score(metric, clean_output), score(metric, plain))
    scores = sweep(
        targets,
        cells,
        metric,
        call=target,
        plain=plain,
        sources=sources,
        batch_size=batch_size,
        title="activation patching",
        progress=progress,
    )
    low, high = ends["corrupted"], ends["clean"]
    return as_effects((scores - low) / (high - low), cells, dimensions, scores=ends, tokens=tokens)


def attribution_patching(  # noqa: PLR0913 (options by keyword)
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Callable[[Any], Any],
    what: Selector = "@resid_post.*",
    *,
    over: Over = "position",
    inputs: bool = False,
    output_index: OutputIndex = None,
    heads: int | None = None,
    tokens: Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> Effects:
    """Estimates the effects of `activation_patching` with two forwards and one backward per batch.

    The estimate of a cell is the change that the patch would make times the gradient of the score,
    exact where the model is linear. The gradients of parameters do not change, and parameters need
    no gradients.

    Args:
        model: see `activation_patching`, as for the other arguments.
        clean: inputs whose activations are taken.
        corrupted: inputs that the model runs on.
        metric: maps the model's output to a number, differentiably.
        what: places.
        over: dimensions to go over.
        inputs: the inputs of the modules.
        output_index: part of the output.
        heads: number of heads.
        tokens: labels of the positions that it goes over.
        batch_size: texts of a forward; None for all at once. The metric gets the outputs of that
            many texts, and its values are averaged over the texts.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: see `activation_patching`.
        HookError: both inputs have the same score, a module runs more or less than once, or the
            metric has no gradient.
        ValueError: `batch_size` is less than 1.
    """
    dimensions = dimensions_of(over, tokens=tokens, heads=heads)
    targets = Targets(model, what, inputs=inputs, output_index=output_index, heads=heads)
    source, target = ModelCall.of(clean, "clean"), ModelCall.of(corrupted, "corrupted")
    if source.rows != target.rows:
        msg = (
            f"clean and corrupted must have equally many texts, got {source.rows} and {target.rows}"
        )
        raise HookTypeError(msg)
    pairs = [*zip(source.batches(batch_size), target.batches(batch_size), strict=True)]
    cells: list[Cell] = []
    parts, scores = [], []
    with progress_bar("attribution patching", len(pairs), "batch", shown=progress) as advance:
        for one, other in pairs:
            sources, clean_output = targets.read(one, cloned)
            reached, low = targets.gradients(other, metric)
            _check_shapes(sources, {name: tensor.shape for name, (tensor, _) in reached.items()})
            cells, estimates = [], []
            for name, (tensor, gradient) in reached.items():
                own = targets.cells(name, tensor.shape, dimensions)
                changes = targets.view(name, ((sources[name] - tensor) * gradient).double())
                cells += own
                estimates += [changes[targets.index(cell, changes)].sum() for cell in own]
            share = one.rows / source.rows
            parts.append(torch.stack(estimates).cpu() * share)
            scores.append(torch.stack([score(metric, clean_output).detach(), low]).cpu() * share)
            advance()
    ends = _ends(*torch.stack(scores).sum(0))
    values = torch.stack(parts).sum(0) / (ends["clean"] - ends["corrupted"])
    return as_effects(values, cells, dimensions, label="estimate", scores=ends, tokens=tokens)


def dimensions_of(
    over: Over, *, tokens: Sequence[str] | None = None, heads: int | None = None
) -> tuple[str, ...]:
    """Validates the dimensions that an analysis goes over, and orders them.

    Raises:
        HookTypeError: an unknown dimension, or an option of one that is not among them.
    """
    named = (over,) if isinstance(over, str) else tuple(over)
    if unknown := {*named} - {"position", "head"}:
        msg = f"over must be 'position', 'head', both or (), got {min(unknown, key=str)!r}"
        raise HookTypeError(msg)
    check_labelled(tokens, named)
    if heads is not None and "head" not in named:
        msg = f"heads= only works when over= includes 'head', got over={over!r}"
        raise HookTypeError(msg)
    return tuple(each for each in ("position", "head") if each in named)


def as_effects(
    values: Tensor,
    cells: Sequence[Cell],
    over: tuple[str, ...],
    **options: Any,
) -> Effects:
    """Makes the table of the values of cells, place after place.

    Raises:
        HookTypeError: two places have other numbers of positions.
    """
    names = [*dict.fromkeys(cell.name for cell in cells)]
    shape = []
    for dimension in over:
        sizes = {
            name: 1 + max(getattr(cell, dimension) for cell in cells if cell.name == name)
            for name in names
        }
        one, other = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        if sizes[one] != sizes[other]:
            msg = (
                f"{one!r} and {other!r} have {sizes[one]} and {sizes[other]} {dimension}s: analyse "
                "them separately"
            )
            raise HookTypeError(msg)
        shape.append(sizes[one])
    return Effects(values.reshape(len(names), *shape), names, over, **options)


def _check_shapes(clean: dict[str, Tensor], corrupted: dict[str, torch.Size]) -> None:
    for name, shape in corrupted.items():
        if clean[name].shape != shape:
            msg = (
                f"{name!r} has shape {tuple(clean[name].shape)} on the clean input and "
                f"{tuple(shape)} on the corrupted one: use texts with the same number of tokens"
            )
            raise HookTypeError(msg)


def _ends(clean: Tensor, corrupted: Tensor) -> dict[str, float]:
    ends = {"clean": float(clean.detach()), "corrupted": float(corrupted.detach())}
    if not abs(ends["clean"] - ends["corrupted"]) > 0:
        msg = (
            f"the metric is {ends['clean']} on the clean input and {ends['corrupted']} on the "
            "corrupted one: there is no difference to analyse"
        )
        raise HookError(msg)
    return ends
