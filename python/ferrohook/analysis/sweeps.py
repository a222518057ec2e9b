"""`sweep`: the score of a model with one cell after the other changed, many in one forward."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from ferrohook.analysis.calls import check_repeatable, score, variants
from ferrohook.errors import HookError
from ferrohook.util.arguments import at_least
from ferrohook.util.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ferrohook.analysis.calls import ModelCall
    from ferrohook.analysis.targets import Cell, Change, Targets

BATCH_SIZE = 32
"""Rows of a forward."""


def sweep(  # noqa: PLR0913 (all but the first three by keyword)
    targets: Targets,
    cells: Sequence[Cell],
    metric: Callable[[Any], Any],
    *,
    call: ModelCall,
    plain: Any,
    sources: Mapping[str, Tensor],
    batch_size: int,
    title: str,
    progress: bool,
) -> Tensor:
    """Returns the score of the model for each cell, with only that cell replaced.

    The inputs are repeated for as many cells as fit in a forward. In the first one a copy stays
    unchanged (the only one, if a cell fills a forward), and is compared with the output of the
    original inputs.

    Args:
        targets: tensors of the model that the cells are parts of.
        cells: cells to replace.
        metric: maps the output of a call to a number.
        call: the inputs.
        plain: the output of the original inputs.
        sources: values of each target, of the shape of its tensor in `call`.
        batch_size: rows of a forward; a single cell has as many as the inputs.
        title: text before the progress bar.
        progress: show a bar.

    Raises:
        HookError: rows of the model are not independent, see `check_repeatable`.
    """
    together = max(at_least(1, "batch_size", batch_size) // call.rows, 1)
    queue: list[Cell | None] = [None, *cells]
    chunks = [queue[start : start + together] for start in range(0, len(queue), together)]
    scores = []
    with progress_bar(title, len(chunks), "forward", shown=progress) as advance, torch.no_grad():
        for chunk in chunks:
            with targets.changed(_changes(targets, chunk, sources)):
                output = call.repeated(len(chunk)).run(targets.model)
            for cell, own in zip(chunk, variants(output, plain, len(chunk)), strict=True):
                if cell is None:
                    check_repeatable(own, plain, targets.model)
                else:
                    scores.append(score(metric, own))
            advance()
    return torch.stack(scores).cpu()


def _changes(
    targets: Targets, chunk: Sequence[Cell | None], sources: Mapping[str, Tensor]
) -> dict[str, Change]:
    """Makes the functions that replace each cell in its copy of the rows."""
    numbered = [(cell.name, number, cell) for number, cell in enumerate(chunk) if cell is not None]

    def change(name: str, own: list[tuple[int, Cell]]) -> Change:
        def replace(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            source = targets.view(name, sources[name])
            if len(tensor) != len(chunk) * len(source):
                msg = (
                    f"{name!r} has {len(source)} rows, but {len(tensor)} for inputs repeated "
                    f"{len(chunk)} times: it does not have one row per text. Pass batch_size=1 to "
                    "run one forward per variant"
                )
                raise HookError(msg)
            for number, cell in own:
                rows = slice(number * len(source), (number + 1) * len(source))
                index = targets.index(cell, source)
                targets.view(name, tensor[rows])[index] = source[index]
            return tensor

        return replace

    ordered = sorted(numbered, key=lambda each: each[0])
    return {
        name: change(name, [(number, cell) for _, number, cell in own])
        for name, own in itertools.groupby(ordered, key=lambda each: each[0])
    }
