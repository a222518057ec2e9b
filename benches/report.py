"""What is shown of the results: tables, JSON and a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table

import ferrohook as fh

if TYPE_CHECKING:
    from ferrohook.benches.harness import Measured
    from ferrohook.benches.running import Results

GOOD, BAD = "tab:blue", "tab:red"


@dataclass(frozen=True)
class Machine:
    """Where the figures come from."""

    cpu: str
    cores: int
    load: float
    system: str
    python: str
    torch: str
    ferrohook: str
    when: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        gil = getattr(sys, "_is_gil_enabled", lambda: True)()
        return cls(
            cpu=_cpu(),
            cores=os.cpu_count() or 0,
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan"),
            system=platform.platform(terse=True),
            python=f"{platform.python_version()}{'' if gil else ' without the GIL'}",
            torch=torch.__version__,
            ferrohook=fh.__version__,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores (load {self.load:.1f}), {self.system}; "
            f"Python {self.python}, torch {self.torch}, ferrohook {self.ferrohook}; {self.when}"
        )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def table(results: Results) -> Table:
    """The results for a terminal."""
    shown = Table(caption="median of the repeats, spread from the 10th to the 90th percentile")
    shown.add_column("row", min_width=24)
    for heading in HEADINGS[1:]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for result in results.measured:
        row, *cells, ok = cells_of(result)
        shown.add_row(row, *cells, f"[green]{ok}" if result.ok else f"[red]{ok}")
    for left_out in results.skipped:
        shown.add_row(left_out.name, f"[dim]{left_out.needs} is not installed")
    for name in results.failed:
        shown.add_row(name, "[red]failed, see below")
    return shown


def markdown(results: Results, machine: Machine) -> str:
    """The results for a README."""
    lines = [
        "| " + " | ".join(HEADINGS) + " |",
        "| --- |" + " ---: |" * (len(HEADINGS) - 1),
        *("| " + " | ".join(cells_of(result)) + " |" for result in results.measured),
        "",
        f"{machine}. Medians; spread from the 10th to the 90th percentile.",
    ]
    return "\n".join(lines)


HEADINGS = ["row", "ours", "other", "ratio", "spread", "bar", "ok"]


def cells_of(result: Measured) -> list[str]:
    """One line of the table."""
    row = result.row
    low, high = result.spread
    digits = 0 if row.absolute else 3
    return [
        row.name,
        f"{result.ours:,.0f} {row.unit}",
        f"{result.other:,.0f} {row.unit}",
        f"{result.ours / result.other:.3f}" if row.absolute else f"{result.value:.3f}",
        f"{low:.{digits}f} to {high:.{digits}f}",
        row.bar_text,
        "yes" if result.ok else "NO",
    ]


def write_json(path: Path, results: Results, machine: Machine) -> None:
    """Writes all that was measured."""
    rows = [
        {
            "name": result.row.name,
            "unit": result.row.unit,
            "ours": result.ours,
            "other": result.other,
            "value": result.value,
            "spread": result.spread,
            "bar": result.row.bar,
            "at_least": result.row.at_least,
            "absolute": result.row.absolute,
            "ok": result.ok,
            "pairs": result.pairs,
        }
        for result in results.measured
    ]
    content = {
        "machine": asdict(machine),
        "rows": rows,
        "not_installed": {row.name: row.needs for row in results.skipped},
        "failed": results.failed,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, results: Results, machine: Machine) -> None:
    """Draws each row as a part of its bar, so that all fit one axis: up to 1 is good."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    measured = results.measured
    figure = Figure(figsize=(10, 1.6 + 0.35 * len(measured)), layout="constrained")
    axes = figure.add_subplot()
    longest = 1.0
    for place, result in enumerate(measured):
        row = result.row
        values = (result.value, *result.spread)
        value, *spread = [row.bar / v if row.at_least else v / row.bar for v in values]
        errors = [[value - min(spread)], [max(spread) - value]]
        axes.barh(place, value, color=GOOD if result.ok else BAD, height=0.6)
        axes.errorbar(value, place, xerr=errors, color="black", capsize=3, linewidth=1)
        figures = f"{result.value:.0f}" if row.absolute else f"{result.value:.3f}"
        beside = axes.get_yaxis_transform()  # x as a part of the axes, y as the row
        axes.text(1.01, place, f"{figures} ({row.bar_text})", transform=beside, va="center")
        longest = max(longest, value)
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(measured)), [result.row.name for result in measured])
    axes.invert_yaxis()  # the first row on top, as in the table
    axes.set_xlim(0, 1.2 * longest)
    axes.set_xlabel(
        "part of the bar that is used (dashed: the bar; lines: 10th to 90th percentile)"
    )
    axes.set_title(
        f"ferrohook {machine.ferrohook}, torch {machine.torch}, Python {machine.python}\n"
        f"{machine.cpu}, {machine.cores} cores"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
