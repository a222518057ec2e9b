"""Runs the benchmarks: `python -m benches --help`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import benches
from benches import report
from benches.harness import FULL, QUICK, Effort, Measured, Row, WrongResultError, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).with_name("results")


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Leaves with exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rows asked for.

    Returns:
        1 if a result was wrong. A ratio over its bar is marked in the table and nothing more:
        how fast a machine is today is no reason to fail.
    """
    parser = Parser(prog="benches", description="Benchmarks of ferrohook against PyTorch.")
    parser.add_argument("--quick", action="store_true", help="few and short repeats")
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="rows with this in their name or file's name"
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="where the figures go")
    parser.add_argument("--plot", metavar="PATH", type=Path, help="where the plot goes, a PNG")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table as markdown, for the README"
    )
    options = parser.parse_args(arguments)
    for path in (options.json, options.plot):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"cannot write {path}: it is a directory or lies in none")
    if options.plot is not None and options.plot.suffix != ".png":
        parser.error(f"the plot is a PNG, got {options.plot}")
    rows = find_rows(options.only)
    if not rows:
        parser.error(f"no row and no file has {options.only!r} in its name")

    machine = report.Machine.here()
    results, errors = run(rows, QUICK if options.quick else FULL)

    # Wide enough for the table where nobody told how wide: in a file or a log.
    console = Console(width=None if sys.stdout.isatty() else 130)
    if options.markdown:
        print(report.markdown(results, machine))  # as it is: a terminal's width does not matter
    else:
        console.print(report.table(results))
        console.print(str(machine), highlight=False)

    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    if options.json is None or options.plot is None:
        RESULTS.mkdir(exist_ok=True)
    json_path = options.json or RESULTS / f"{stamp}.json"
    report.write_json(json_path, results, errors, machine)
    written = [json_path]
    if results:
        written.append(options.plot or RESULTS / f"{stamp}.png")
        report.write_plot(written[-1], results, machine)
    print("written:", *written, file=sys.stderr)
    for name, error in errors.items():
        print(f"WRONG RESULT: {name}: expected {error}", file=sys.stderr)
    return 1 if errors else 0


def find_rows(pattern: str) -> list[Row]:
    """The rows of all files here that have `pattern` in their name or in their file's."""
    pattern = pattern.casefold()
    found: list[Row] = []
    for info in pkgutil.iter_modules(benches.__path__):
        if info.name == "__main__":
            continue
        rows: list[Row] = getattr(importlib.import_module(f"benches.{info.name}"), "ROWS", [])
        found += [row for row in rows if pattern in info.name or pattern in row.name.casefold()]
    return found


def run(rows: list[Row], effort: Effort) -> tuple[list[Measured], dict[str, str]]:
    """Measures the rows; the second result is what was wrong, by the row's name."""
    results, errors = [], {}
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # On stderr, and gone at the end: stdout is for the table.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(rows))
        for row in rows:
            progress.update(task, description=row.name)
            try:
                results.append(measure(row, effort))
            except WrongResultError as error:
                errors[row.name] = str(error)
            progress.advance(task)
    return results, errors


if __name__ == "__main__":
    sys.exit(main())
