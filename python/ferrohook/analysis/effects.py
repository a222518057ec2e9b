"""`Effects`: the table that an analysis returns, which prints and plots itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ferrohook.errors import HookTypeError, SelectionError
from ferrohook.plot import pictures
from ferrohook.util.tables import Printed, frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes
    from torch import Tensor


def check_tokens(tokens: Sequence[str] | None, positions: int) -> None:
    """Validates the labels of the positions.

    Raises:
        HookTypeError: there are more or fewer than positions.
    """
    if tokens is not None and len(tokens) != positions:
        msg = f"tokens must have one label per position: expected {positions}, got {len(tokens)}"
        raise HookTypeError(msg)


def check_labelled(tokens: Sequence[str] | None, over: Sequence[str]) -> None:
    """Validates that labels of positions are for an analysis over these.

    Raises:
        HookTypeError: they are not.
    """
    if tokens is not None and "position" not in over:
        msg = f"tokens= labels positions, but over={over!r} has none"
        raise HookTypeError(msg)


@dataclass(frozen=True, eq=False, repr=False)
class Effects(Printed):
    """Effects by place, and by position and head if an analysis goes over these.

    `print`, notebooks and `plot` show it.
    """

    values: Tensor
    """Shape (places, positions, heads), without the dimensions that are not in `over`."""
    names: list[str]
    """Names of the places."""
    over: tuple[str, ...] = ()
    """Dimensions after the one of the places: "position", "head"."""
    label: str = "effect"
    """Meaning of a value."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores that the values refer to, such as the scores of clean and corrupted input."""
    tokens: Sequence[str] | None = None
    """Labels of the positions."""

    def __post_init__(self) -> None:
        check_labelled(self.tokens, self.over)
        if "position" in self.over:
            check_tokens(self.tokens, self.values.shape[1])

    def __getitem__(self, name: str) -> Tensor:
        """Returns the values of one place.

        Raises:
            SelectionError: there is none of that name.
        """
        if name not in self.names:
            msg = f"{name!r} is not among the places: {', '.join(map(repr, self.names))}"
            raise SelectionError(msg)
        return self.values[self.names.index(name)]

    def largest(self, count: int = 10) -> list[tuple[str, float]]:
        """Returns the labels and values of the cells of the largest absolute value."""
        flat = self._grid().flatten()
        order = flat.nan_to_num().abs().sort(descending=True, stable=True).indices[:count]
        labels = [*self._labels()]
        return [(labels[each], float(flat[each])) for each in order.tolist()]

    def _labels(self) -> Iterator[str]:
        for row in self._rows():
            for column in self._columns() or [""]:
                yield f"{row} {column}".rstrip()

    def _rows(self) -> list[str]:
        """Returns the labels of the rows of `_grid`."""
        if len(self.over) < 2:  # noqa: PLR2004 (both dimensions)
            return self.names
        heads = range(self.values.shape[2])
        return [f"{name} head {head}" for name in self.names for head in heads]

    def _columns(self) -> list[str]:
        """Returns the labels of the columns of `_grid`; empty for a single column."""
        if not self.over:
            return []
        if self.over[0] == "head":
            return [f"head {head}" for head in range(self.values.shape[1])]
        return [*(self.tokens or map(str, range(self.values.shape[1])))]

    def _grid(self) -> Tensor:
        """Returns the values in two dimensions: heads of a place are rows, if there are both."""
        if len(self.over) < 2:  # noqa: PLR2004
            return self.values.reshape(len(self.names), -1)
        return self.values.transpose(1, 2).flatten(0, 1)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the effects as `fh.plot.patching` does.

        Raises:
            HookError: matplotlib is not installed.
        """
        columns = self._columns() or [""]
        ax = pictures.patching(self._grid(), self._rows(), tokens=columns, label=self.label, ax=ax)
        across = self.over[0] if self.over else ""
        ax.set_xlabel("token" if across == "position" and self.tokens else across)
        return ax

    def to_pandas(self) -> pd.DataFrame:
        """Makes a DataFrame with a line for each cell: name, position, token, head, value.

        Raises:
            HookError: the package pandas is not installed.
        """
        axes = ("name", *self.over)
        lines = []
        for index in torch.cartesian_prod(
            *[torch.arange(size, device="cpu") for size in (*self.values.shape, 1)]
        )[:, :-1].tolist():
            line = dict(zip(axes, [self.names[index[0]], *index[1:]], strict=True))
            if self.tokens is not None and "position" in line:
                line["token"] = self.tokens[line["position"]]
            lines.append({**line, self.label: float(self.values[tuple(index)])})
        return frame(lines)

    def _cells(self) -> list[list[str]]:
        """Returns the printed table, headings first."""
        columns = self._columns() or [self.label]
        grid = self._grid()
        finite = grid[grid.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        digits = 2 if not largest else max(2, 1 - math.floor(math.log10(largest)))
        rows = zip(self._rows(), grid.tolist(), strict=True)
        # Not "-0.00".
        lines = [
            [name, *(f"{round(it, digits) + 0.0:.{digits}f}" for it in row)] for name, row in rows
        ]
        return [["name", *columns], *lines]
