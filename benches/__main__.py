"""`ferrohook bench`: measures ferrohook beside PyTorch and others, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ferrohook.cli.mistakes import Mistake, check_writable, need

if TYPE_CHECKING:
    import argparse

    from ferrohook.benches.harness import Effort, Row
    from ferrohook.benches.running import Results

WIDE = 130
"""Columns that fit the table, where nobody told how wide: in a file or a log."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument("--quick", action="store_true", help="few and short repeats")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="rows with this in their name or file's name"
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="write all figures there")
    parser.add_argument("--plot", metavar="PATH", type=Path, help="draw them there, a .png")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")


def run(options: argparse.Namespace) -> int:
    """Runs the rows asked for.

    Returns:
        1 if a row failed. A ratio over its bar is marked in the table and nothing more: how fast
        a machine is today is no reason to fail.
    """
    if options.json is not None:
        check_writable(options.json, ".json")
    if options.plot is not None:
        check_writable(options.plot, ".png")
        need("matplotlib", extra="bench")
    need("rich", extra="bench")
    need("torch")

    from rich.console import Console

    from ferrohook.benches import report
    from ferrohook.benches.harness import FULL, QUICK
    from ferrohook.benches.running import find_rows

    rows = find_rows(options.only)
    if not rows:
        msg = f"no row and no file has {options.only!r} in its name: leave --only out to see all"
        raise Mistake(msg)

    machine = report.Machine.here()
    results = _with_progress(rows, QUICK if options.quick else FULL)
    if options.markdown:
        print(report.markdown(results, machine))  # as it is: a terminal's width does not matter
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDE)
        console.print(report.table(results))
        console.print(str(machine), highlight=False)
    if options.json is not None:
        report.write_json(options.json, results, machine)
    if options.plot is not None:
        report.write_plot(options.plot, results, machine)
    for row in results.skipped:
        print(f"not measured: {row.name}: {row.needs} is not installed", file=sys.stderr)
    for name, error in results.failed.items():
        print(f"FAILED: {name}: {error}", file=sys.stderr)
    return 1 if results.failed else 0


def _with_progress(rows: list[Row], effort: Effort) -> Results:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from ferrohook.benches import running

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[row]}"),
    )
    # On stderr, and gone at the end: stdout is for the table.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(rows), row="", completed=-1)
        results = running.run(
            rows, effort, lambda row: progress.update(task, advance=1, row=row.name)
        )
        progress.update(task, advance=1)
    return results
