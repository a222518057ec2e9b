"""Rows of captured values, and tables of them: text, HTML with sparklines, a pandas DataFrame."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ferrohook.errors import StaleActivationError
from ferrohook.util.tensors import leaves_by_path, nbytes, shape_of
from ferrohook.util.texts import MODEL, imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pandas as pd

HEADINGS = ("name", "call", "part", "shape", "dtype", "bytes")
STATISTICS = ("norm", "mean", "std", "min", "max", "nonfinite")
BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
MOST_BARS = 32
"""Characters of a sparkline; a longer one shows the largest of several norms."""
MOST_ROWS = 200
"""Rows of an HTML table."""
STALE = "changed in place"
MOST_COLUMNS = 12
"""Columns of a grid after the names; a wider grid lacks the columns in the middle."""
GAP = "…"


class Row(NamedTuple):
    """A tensor of a captured value, or a part of it without tensors."""

    name: str
    call: int | None
    """Index among the captured calls; None if only the last one is captured."""
    part: str
    """Python expression of its place in the value, such as `[0]`."""
    leaf: Any
    calls: str = ""
    """Calls that the value is of, if there were others: `last of 4`."""

    @property
    def shape(self) -> str:
        """Shape of a tensor; of a nested one with None where its components differ."""
        return str(shape_of(self.leaf)) if isinstance(self.leaf, Tensor) else "-"

    @property
    def dtype(self) -> str:
        """Dtype of a tensor, type of another leaf."""
        if isinstance(self.leaf, Tensor):
            return str(self.leaf.dtype).removeprefix("torch.")
        return type(self.leaf).__name__

    @property
    def nbytes(self) -> int | None:
        """Size of a tensor."""
        return nbytes(self.leaf) if isinstance(self.leaf, Tensor) else None


def rows_of(
    name: str, value: Any, *, per_call: bool, counts: tuple[int, int] = (1, 0)
) -> Iterator[Row]:
    """Yields the rows of one captured value.

    Args:
        name: of the module.
        value: value of its last call, or a list of the values of calls.
        per_call: True for a list.
        counts: number of its calls, and of calls whose values were dropped for later ones.
    """
    count, dropped = counts
    calls = ""
    if dropped and not per_call:
        kept = count - dropped
        calls = f"last of {count}" if kept == 1 else f"last {kept} of {count}"
    for call, each in enumerate(value) if per_call else [(None, value)]:
        for part, leaf in leaves_by_path(each):
            yield Row(name, call, part, leaf, calls)


def _columns(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Returns the columns with their headings; without "call" and "part" if these are empty."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for row in rows:
        call = row.calls if row.call is None else str(row.call)
        nbytes = "-" if row.nbytes is None else f"{row.nbytes:,}"
        lines.append((row.name or MODEL, call, row.part, row.shape, row.dtype, nbytes))
    columns = zip(*lines, strict=True)
    return [column for column in columns if column[0] not in {"call", "part"} or any(column[1:])]


def as_text(rows: Iterable[Row]) -> str:
    """Formats rows as a table of text, whose last column is aligned on the right."""
    return text_table(zip(*_columns(rows), strict=True), right="bytes")


def text_table(lines: Iterable[Sequence[str]], *, right: str | None = "") -> str:
    """Formats lines of cells, the headings first, as text.

    Args:
        lines: as many cells in each.
        right: heading of a column of numbers, which ends on the right; None for all but the first.
    """

    def padded(place: int, column: Sequence[str]) -> list[str]:
        on_right = place > 0 if right is None else column[0] == right
        pad, width = str.rjust if on_right else str.ljust, max(map(len, column))
        return [pad(cell, width) for cell in column]

    shown = ([cell.replace("\n", "\\n") for cell in _elided(line)] for line in lines)
    columns = starmap(padded, enumerate(zip(*shown, strict=True)))
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def as_html(rows: Sequence[Row], check: Callable[[str], object]) -> str:
    """Formats rows as an HTML table with a sparkline of the norms of each tensor's positions.

    Args:
        rows: rows of the table.
        check: called with a name; raises `StaleActivationError` for a value changed in place.
    """
    shown = rows[:MOST_ROWS]
    stale = {name for name in {row.name for row in shown} if _is_stale(check, name)}
    norms = ["norms", *(STALE if row.name in stale else _sparkline(row.leaf) for row in shown)]
    table = html_table(zip(*_columns(shown), norms, strict=True))
    if len(rows) > len(shown):
        table += f"\n<p>{len(rows) - len(shown)} more rows: <code>print(acts)</code></p>"
    return table


def html_table(lines: Iterable[Sequence[str]]) -> str:
    """Formats lines of cells, the headings first, as an HTML table."""
    head, *body = map(_elided, lines)
    rows = "\n".join(_html_row("td", line) for line in body)
    thead = f"<thead>{_html_row('th', head)}</thead>"
    return f"<table>\n{thead}\n<tbody>\n{rows}\n</tbody>\n</table>"


class Printed(ABC):
    """Base of results that print themselves as a table of numbers, and show it in notebooks."""

    @abstractmethod
    def _cells(self) -> Sequence[Sequence[str]]:
        """Returns the lines of the table, the headings first."""

    def __repr__(self) -> str:
        return text_table(self._cells(), right=None)

    def _repr_html_(self) -> str:
        return html_table(self._cells())


def _elided(line: Sequence[str]) -> list[str]:
    if len(line) <= MOST_COLUMNS + 1:
        return [*line]
    half = MOST_COLUMNS // 2
    return [*line[: half + 1], GAP, *line[-half:]]


def _is_stale(check: Callable[[str], object], name: str) -> bool:
    try:
        check(name)
    except StaleActivationError:
        return True
    return False


def _html_row(tag: str, cells: Iterable[str]) -> str:
    opening = f'<{tag} style="text-align: left">'
    return f"<tr>{''.join(f'{opening}{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def values_of(leaf: Any) -> Tensor | None:
    """Returns a tensor's values in floating point; None if there are none that can be read."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        components = leaf.detach().unbind()
        width = shape_of(leaf)[-1]
        leaf = torch.cat([it.reshape(-1, 1 if width is None else width) for it in components])
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or not leaf.numel():
        return None
    if leaf.is_meta or leaf.is_quantized:
        return None
    wide = leaf.is_complex() or leaf.dtype == torch.float64
    return leaf.detach() if wide else leaf.detach().float()


def norms_of(values: Tensor) -> list[float]:
    """Returns the L2 norms of the vectors along the last dimension, by their position.

    The position is the last but one dimension; norms are averaged over all others.
    """
    norms = torch.atleast_2d(_vector_norms(values))
    averaged: list[float] = norms.flatten(0, -2).mean(0).tolist()
    return averaged


def _vector_norms(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(torch.atleast_1d(values), dim=-1)
    return norms


def _sparkline(leaf: Any) -> str:
    values = values_of(leaf)
    norms = [] if values is None else norms_of(values)
    step = math.ceil(len(norms) / MOST_BARS) or 1
    # NaN is not ordered: a bin with one is NaN.
    binned = [_largest(norms[start : start + step]) for start in range(0, len(norms), step)]
    top = max(filter(math.isfinite, binned), default=0) or 1
    return "".join(
        BARS[round(norm / top * (len(BARS) - 1))] if math.isfinite(norm) else NOT_FINITE
        for norm in binned
    )


def _largest(norms: list[float]) -> float:
    return max(norms) if all(map(math.isfinite, norms)) else math.nan


def as_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Makes a DataFrame with a line per row and statistics of the tensors.

    Raises:
        HookError: pandas is not installed.
    """
    lines = []
    for row in rows:
        line = {"name": row.name, "call": row.call or 0, "part": row.part, "dtype": row.dtype}
        if isinstance(row.leaf, Tensor):
            line |= {"shape": shape_of(row.leaf), "bytes": row.nbytes}
            line |= _statistics(row.leaf)
        lines.append(line)
    return frame(lines, [*HEADINGS, *STATISTICS])


def frame(lines: Sequence[Any], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Makes a DataFrame.

    Raises:
        HookError: pandas is not installed.
    """
    made: pd.DataFrame = imported("pandas", "to_pandas").DataFrame(lines, columns=columns)
    return made


def _statistics(tensor: Tensor) -> dict[str, float]:
    values = values_of(tensor)
    if values is None:
        return {}
    norm = _vector_norms(values).mean()
    values = values.abs() if values.is_complex() else values
    found = (norm, values.mean(), values.std(correction=0), values.min(), values.max())
    nonfinite = values.numel() - int(values.isfinite().sum())
    return dict(zip(STATISTICS, [*torch.stack(found).tolist(), nonfinite], strict=True))
