"""Which rows there are, and what comes of running them."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ferrohook.benches
from ferrohook.benches.harness import Measured, Row, WrongResultError, measure

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.benches.harness import Effort


@dataclass
class Results:
    """What came of some rows.

    Attributes:
        measured: rows with their figures.
        skipped: rows whose other side is not installed.
        failed: what went wrong in the others, by the row's name.
    """

    measured: list[Measured] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def find_rows(pattern: str = "") -> list[Row]:
    """The rows of all files here that have `pattern` in their name or in their file's."""
    pattern = pattern.casefold()
    package = ferrohook.benches
    found: list[Row] = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        rows: list[Row] = getattr(module, "ROWS", [])
        found += [row for row in rows if pattern in info.name or pattern in row.name.casefold()]
    return found


def alone(row: Row, effort: Effort) -> Measured:
    """Measures a row in a process of its own, so that it depends on no row before it.

    What else was imported, and where memory is free, moves a model's call by as much as a hook.

    Raises:
        WrongResultError: ours does not do what PyTorch does.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return Measured(row, process.submit(_pairs, row.name, effort).result())


def _pairs(name: str, effort: Effort) -> list[tuple[float, float]]:
    (row,) = (row for row in find_rows(name) if row.name == name)
    return measure(row, effort).pairs


def run(rows: list[Row], effort: Effort, begin: Callable[[Row], object]) -> Results:
    """Measures the rows one by one, and calls `begin` ahead of each."""
    results = Results()
    for row in rows:
        begin(row)
        if row.needs is not None and importlib.util.find_spec(row.needs) is None:
            results.skipped.append(row)
            continue
        try:
            results.measured.append(alone(row, effort))
        except WrongResultError as error:
            results.failed[row.name] = f"wrong result, expected {error}"
        except Exception as error:  # noqa: BLE001 (another release of the other side, say)
            results.failed[row.name] = f"{type(error).__name__}: {error}"
    return results
