"""`sweep`: the score of a model with one cell after the other changed, many in one forward."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from ferrohook.analysis.calls import check_repeatable, score, variants
from ferrohook.arguments import at_least_one
from ferrohook.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ferrohook.analysis.calls import Call
    from ferrohook.analysis.places import Cell, Change, Places

BATCH_SIZE = 32
"""Rows of a forward."""


def sweep(  # noqa: PLR0913 (all but the first three by keyword)
    places: Places,
    cells: Sequence[Cell],
    metric: Callable[[Any], Any],
    *,
    call: Call,
    plain: Any,
    sources: Mapping[str, Tensor],
    batch_size: int,
    title: str,
    progress: bool,
) -> Tensor:
    """Returns the score of the model for each cell, with that cell replaced alone.

    The inputs are repeated for as many cells as fit in a forward. In the first one a copy stays
    unchanged, and is compared with the output of the inputs alone.

    Args:
        places: places of the cells.
        cells: cells to replace.
        metric: maps the output of a call to a number.
        call: the inputs.
        plain: the output of the inputs alone.
        sources: values of each place, as its tensor in `call`.
        batch_size: rows of a forward; a single cell has as many as the inputs.
        title: text before the progress bar.
        progress: show a bar.

    Raises:
        HookError: rows of the model are not independent, see `check_repeatable`.
    """
    together = max(at_least_one("batch_size", batch_size) // call.rows, 1)
    queue: list[Cell | None] = [*cells] if together == 1 else [None, *cells]
    chunks = [queue[start : start + together] for start in range(0, len(queue), together)]
    scores = []
    with progress_bar(title, len(chunks), "forward", shown=progress) as advance, torch.no_grad():
        for chunk in chunks:
            with places.changed(_changes(places, chunk, sources)):
                output = call.repeated(len(chunk)).run(places.model)
            for cell, own in zip(chunk, variants(output, plain, len(chunk)), strict=True):
                if cell is None:
                    check_repeatable(own, plain, places.model)
                else:
                    scores.append(score(metric, own))
            advance()
    return torch.stack(scores).cpu()


def _changes(
    places: Places, chunk: Sequence[Cell | None], sources: Mapping[str, Tensor]
) -> dict[str, Change]:
    """Makes the functions that replace each cell in its copy of the rows."""
    numbered = [(cell.name, number, cell) for number, cell in enumerate(chunk) if cell is not None]

    def change(name: str, own: list[tuple[int, Cell]]) -> Change:
        def replace(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            copies = places.view(tensor.unflatten(0, (len(chunk), -1)))
            source = places.view(sources[name])
            for number, cell in own:
                index = places.index(cell)
                copies[number][index] = source[index]
            return tensor

        return replace

    ordered = sorted(numbered, key=lambda each: each[0])
    return {
        name: change(name, [(number, cell) for _, number, cell in own])
        for name, own in itertools.groupby(ordered, key=lambda each: each[0])
    }
