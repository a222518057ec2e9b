"""Tables, JSON and a chart of results."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table

import ferrohook as fh
from benches.harness import Ratio, Row, Samples
from benches.running import Results, find_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

NANOSECONDS = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}


@dataclass(frozen=True)
class Machine:
    """Origin of the figures."""

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
        """Describes this machine and the time."""
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


@dataclass(frozen=True)
class Line:
    """A measured row."""

    row: Row
    unit: str
    ratio: Ratio

    @property
    def ok(self) -> bool:
        """Tells if the row keeps to its bar."""
        value = self.ratio.figure if self.row.absolute else self.ratio.value
        return value >= self.row.bar if self.row.at_least else value <= self.row.bar

    @property
    def bar(self) -> str:
        """The bar with its direction and, if it limits a figure, its unit."""
        unit = f" {self.unit}" if self.row.absolute else ""
        return f"{'≥' if self.row.at_least else '≤'} {self.row.bar:g}{unit}"


def lines_of(results: Results[Samples]) -> list[Line]:
    """The rows of all measured groups."""
    return [
        Line(row, group.unit, Ratio(samples[row.name], samples[row.over]))
        for group, samples in results.measured
        for row in group.rows
    ]


def figure(value: float, unit: str) -> str:
    """A figure with its unit, to three digits or to whole numbers."""
    if unit == "ns":
        sizes = [name for name, size in NANOSECONDS.items() if abs(value) >= size]
        unit = sizes[0] if sizes else unit
        value /= NANOSECONDS[unit]
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0  # noqa: PLR2004
    return f"{value:,.{digits}f} {unit}"


def ratios(ratio: Ratio) -> list[str]:
    """The cells of the ratio and its spread."""
    low, high = ratio.spread
    return [f"{ratio.value:.3f}", f"{low:.2f} to {high:.2f}"]


@dataclass(frozen=True)
class Sheet:
    """A table as text; left-aligned words in its first column, figures in the others."""

    headings: Sequence[str]
    cells: list[list[str]]

    def table(self) -> Table:
        """The sheet for a terminal."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(self.headings[0], overflow="fold")
        for heading in self.headings[1:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for cells in self.cells:
            table.add_row(*cells)
        return table

    def markdown(self) -> str:
        """The sheet for a page."""
        rule = ["---"] + ["---:"] * (len(self.headings) - 1)
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.headings, rule, *self.cells))


def of_sides(results: Results[Samples]) -> Sheet:
    """Each row: both sides, their ratio, its spread and its bar."""
    cells = [
        [
            str(line.row),
            figure(line.ratio.figure, line.unit),
            figure(line.ratio.base, line.unit),
            *ratios(line.ratio),
            line.bar,
            "yes" if line.ok else "NO",
        ]
        for line in lines_of(results)
    ]
    left_out = [(group, f"{group.needs} is not installed") for group in results.skipped]
    left_out += [(group, "failed") for group, _ in results.failed]
    cells += [[f"{row}: {reason}"] for group, reason in left_out for row in group.rows]
    return Sheet(["", "first", "second", "ratio", "spread", "bar", "ok"], cells)


def of_builds(results: Results[dict[str, Ratio]]) -> Sheet:
    """Each side: its figures with both builds, their ratio and its spread."""
    cells = [
        [
            side,
            figure(ratio.figure, group.unit),
            figure(ratio.base, group.unit),
            *ratios(ratio),
        ]
        for group, sides in results.measured
        for side, ratio in sides.items()
    ]
    return Sheet(["", "here", "there", "ratio", "spread"], cells)


def write_json(path: Path, results: Results[Samples], machine: Machine) -> None:
    """Writes all samples, and the rows made of them."""
    rows = [
        {
            "name": line.row.name,
            "over": line.row.over,
            "unit": line.unit,
            "figure": line.ratio.figure,
            "base": line.ratio.base,
            "ratio": line.ratio.value,
            "spread": line.ratio.spread,
            "bar": line.bar,
            "ok": line.ok,
        }
        for line in lines_of(results)
    ]
    samples = {
        group.name: {side: [float(f"{one:.5g}") for one in every] for side, every in found.items()}
        for group, found in results.measured
    }
    content = {
        "machine": asdict(machine),
        "rows": rows,
        "not_installed": {group.name: group.needs for group in results.skipped},
        "failed": {group.name: error for group, error in results.failed},
        "samples": samples,
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> tuple[Results[Samples], Machine]:
    """Reads the samples that `write_json` wrote.

    Raises:
        KeyError: a group was renamed since.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    groups = {group.name: group for group in find_groups()}
    results = Results[Samples](
        [(groups[name], found) for name, found in content["samples"].items()]
    )
    return results, Machine(**content["machine"])


STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .over { font-size: 11px; fill: #57606a }
  .bar { fill: #0969da } .spread, .one { stroke: #57606a } .one { stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .over { fill: #9198a1 }
    .bar { fill: #4493f8 } .spread, .one { stroke: #9198a1 }
  }
"""
LETTER, SCALE, VALUES, HEIGHT, TOP = 7, 300, 70, 40, 34
"""Pixels: a letter, a bar of 100 %, room for numbers, a row, the title."""
LONGEST = 1.3
"""Bars are cut there."""


def chart(lines: Sequence[Line], machine: Machine) -> str:
    """Draws the ratios as SVG: a bar is the share of the second side's time that the first takes.

    Rows with a bar for a figure instead of the ratio are left out.
    """
    lines = [line for line in lines if not line.row.absolute]
    bottom = TOP + HEIGHT * len(lines)
    left = 20 + max(LETTER * len(name) for line in lines for name in (line.row.name, line.row.over))
    width, one = int(left + SCALE * LONGEST + VALUES), left + SCALE
    drawn = []
    for index, line in enumerate(lines):
        y = TOP + HEIGHT * index
        shares = [line.ratio.value, *line.ratio.spread]
        if line.row.at_least:  # a speed
            shares = [1 / share for share in shares]
        percent = 100 * shares[0]
        share, low, high = (SCALE * min(max(share, 0), LONGEST) for share in shares)
        label = f'<text x="{left - 10}" text-anchor="end" y="{y}"'
        name, over = escape(line.row.name), escape(line.row.over)
        drawn += [
            f'{label} dy="15">{name}</text>',
            f'{label} dy="30" class="over">{over} = 100 %</text>',
            f'<rect x="{left}" y="{y + 6}" width="{share:.0f}" height="22" class="bar"/>',
            f'<path d="M{left + low:.0f} {y + 31}H{left + high:.0f}" class="spread"/>',
            f'<text x="{max(left + share, one) + 8:.0f}" y="{y + 22}">{percent:.0f} %</text>',
        ]
    body = "\n".join(drawn)
    about = f"{machine.cpu}, torch {machine.torch}, {machine.when[:10]}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 30}">
<style>{STYLE}</style>
<text x="{left}" y="20">Time taken: shorter is faster</text>
{body}
<path d="M{one} {TOP}V{bottom}" class="one"/>
<text x="{left}" y="{bottom + 20}" class="over">{escape(about)}</text>
</svg>
"""
