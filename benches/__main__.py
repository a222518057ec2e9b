"""Measures ferrohook beside PyTorch and others, on this machine: `python -m benches`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benches import report, running
from benches.harness import FULL, QUICK
from ferrohook.cli import Parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benches.harness import Group
    from benches.report import Sheet
    from benches.running import Found, Results

WIDE = 130
"""Columns of the table in a file or a log."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the selected groups.

    Returns:
        1 if a group failed. A missed bar is marked in the table and nothing more: a slow machine
        is no failure.
    """
    parser = Parser(prog="benches", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--quick", action="store_true", help="few and short repeats")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="groups with this in a row's or the file's name"
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="write all samples there")
    parser.add_argument("--plot", metavar="PATH", type=Path, help="draw the ratios there, an .svg")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument(
        "--against",
        metavar="PYTHON",
        type=Path,
        help="compare with the build of ferrohook that another interpreter has",
    )
    options = parser.parse_args(arguments)
    for path in filter(None, (options.json, options.plot)):
        if not path.parent.is_dir():
            parser.error(f"cannot write {path}: there is no folder {path.parent}, make it first")
    groups = running.find_groups(options.only)
    if not groups:
        parser.error(f"no row and no file has {options.only!r} in its name: leave --only out")

    effort = QUICK if options.quick else FULL
    machine = report.Machine.here()
    if options.against is not None:
        if options.json or options.plot:
            parser.error("--against prints a table, and writes no --json and no --plot")
        if not options.against.is_file():
            parser.error(f"there is no interpreter {options.against}")
        # Not resolved: a virtual environment finds its packages by the link.
        python = str(options.against.absolute())
        builds = _with_progress(groups, partial(running.side_by_side, effort=effort, python=python))
        return _show(report.of_builds(builds), builds, machine, markdown=options.markdown)

    results = _with_progress(groups, partial(running.alone, effort=effort))
    if options.json is not None:
        report.write_json(options.json, results, machine)
    if options.plot is not None:
        chart = report.chart(report.lines_of(results), machine)
        options.plot.write_text(chart, encoding="utf-8")
    return _show(report.of_sides(results), results, machine, markdown=options.markdown)


def _show(sheet: Sheet, results: Results[Found], machine: report.Machine, *, markdown: bool) -> int:
    """Prints the results; returns the exit code."""
    if markdown:
        print(sheet.markdown(), str(machine), sep="\n\n")  # a terminal's width does not matter
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDE)
        console.print(sheet.table())
        console.print("Medians; the spread is from the 10th to the 90th percentile.")
        console.print(str(machine), highlight=False)
    for group in results.skipped:
        print(f"not measured: {group.name}: {group.needs} is not installed", file=sys.stderr)
    for group, error in results.failed:
        print(f"FAILED: {group.name}: {error}", file=sys.stderr)
    return 1 if results.failed else 0


def _with_progress(groups: list[Group], one: Callable[[Group], Found]) -> Results[Found]:
    """Measures groups, with a bar on a terminal and a line ahead of each group elsewhere."""
    # On stderr: stdout is for the table.
    console = Console(stderr=True)
    if not console.is_terminal:
        return running.run(groups, one, _Log(len(groups)))
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[group]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(groups), group="", completed=-1)
        results = running.run(
            groups, one, lambda group: progress.update(task, advance=1, group=group.name)
        )
        progress.update(task, advance=1)
    return results


class _Log:
    """Lines for a log: the group that begins, the minutes so far and an estimate of the rest."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._begun = 0
        self._start = monotonic()

    def __call__(self, group: Group) -> None:
        minutes = (monotonic() - self._start) / 60
        times = f"{minutes:.1f} min so far"
        if self._begun:
            # Groups take unequally long, so the first estimates are rough.
            times += f", about {minutes / self._begun * (self._total - self._begun):.0f} min left"
        self._begun += 1
        print(f"{self._begun} of {self._total}, {times}: {group.name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
