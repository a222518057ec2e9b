"""`ablation`: places that a model does without, and places that it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from ferrohook.analysis.calls import ModelCall, score
from ferrohook.analysis.patching import as_effects, dimensions_of
from ferrohook.analysis.sweeps import BATCH_SIZE, sweep
from ferrohook.analysis.targets import Targets
from ferrohook.errors import HookError, HookTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from ferrohook.analysis.effects import Effects
    from ferrohook.analysis.patching import Over
    from ferrohook.names.select import Selector
    from ferrohook.util.arguments import OutputIndex


def ablation(  # noqa: PLR0913 (options by keyword)
    model: nn.Module,
    batch: Any,
    metric: Callable[[Any], Any],
    what: Selector = ("@attn_out.*", "@mlp_out.*"),
    *,
    by: Literal["zero", "mean"] = "zero",
    reference: Any = None,
    over: Over = (),
    inputs: bool = False,
    output_index: OutputIndex = None,
    heads: int | None = None,
    tokens: Sequence[str] | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool = True,
) -> Effects:
    """Switches off one place at a time, and measures how much the score changes.

    Many cells share a forward, see `activation_patching`.

    Args:
        model: any module whose rows are independent of each other; call `eval()` before.
        batch: keyword arguments of the model, a tuple of positional ones, or the only one.
        metric: maps the model's output to a number, or to one for each text, which are averaged.
        what: places: quantities and modules, see `register`.
        by: value of a place that is switched off: "zero", or its "mean" over texts and positions,
            without the padding that `attention_mask` marks.
        reference: inputs to take the means over; None for `batch`.
        over: go over each "position", each "head", or both; `()` for whole tensors.
        inputs: switch off the inputs of the modules instead of their outputs.
        output_index: part of the output, see `capture`; None for its first tensor.
        heads: number of heads that it goes over, side by side in the last dimension; `@z` knows
            its own.
        tokens: labels of the positions that it goes over.
        batch_size: rows of a forward.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: an argument has the wrong type, or a place other shapes than the analysis
            needs.
        ValueError: an unknown `by`.
        HookError: rows of the model depend on each other; or a module runs more or less than once.

    Examples:
        >>> effects = fh.analysis.ablation(model, ids, loss, "@mlp_out.*", by="mean")
        >>> effects.largest(3)
    """
    if by not in {"zero", "mean"}:
        msg = f"by must be 'zero' or 'mean', got {by!r}"
        raise ValueError(msg)
    if reference is not None and by != "mean":
        msg = "reference= only works with by='mean'"
        raise HookTypeError(msg)
    dimensions = dimensions_of(over, tokens=tokens, heads=heads)
    targets = Targets(model, what, inputs=inputs, output_index=output_index, heads=heads)
    call = ModelCall.of(batch)

    def shaped(name: str, tensor: Tensor) -> tuple[torch.Size, Tensor]:
        off = targets.mean(name, tensor, call.mask) if by == "mean" else torch.zeros_like(tensor)
        return tensor.shape, off

    found, output = targets.read(call, shaped)
    shapes = {name: shape for name, (shape, _) in found.items()}
    sources = {name: source for name, (_, source) in found.items()}
    if reference is not None:
        other = ModelCall.of(reference, "reference")
        sources, _ = targets.read(other, lambda name, it: targets.mean(name, it, other.mask))
    cells = targets.all_cells(shapes, dimensions)
    plain = float(score(metric, output).detach())
    scores = sweep(
        targets,
        cells,
        metric,
        call=call,
        plain=output,
        sources={name: _expanded(name, it, shapes[name]) for name, it in sources.items()},
        batch_size=batch_size,
        title="ablation",
        progress=progress,
    )
    return as_effects(
        scores - plain, cells, dimensions, label="change", scores={"plain": plain}, tokens=tokens
    )


def _expanded(name: str, source: Tensor, shape: torch.Size) -> Tensor:
    try:
        return source.expand(shape)
    except RuntimeError as error:
        msg = (
            f"the mean of {name!r} over the reference has shape {tuple(source.shape)}, which does "
            f"not fit {tuple(shape)}: pass a reference of the same length"
        )
        raise HookError(msg) from error
