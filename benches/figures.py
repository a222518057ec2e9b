"""Table and chart in docs/, made of `docs/benchmarks.json` by `python -m benches.figures`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benches import report
from benches.running import ROOT

if TYPE_CHECKING:
    from benches.harness import Samples
    from benches.report import Machine
    from benches.running import Results

DOCS = ROOT / "docs"
SAMPLES, PAGE, CHART = DOCS / "benchmarks.json", DOCS / "benchmarks.md", DOCS / "benchmarks.svg"
BEGIN, END = "<!-- by `make figures` -->", "<!-- end of the figures -->"
FRONT = (
    "small Llama, our hooks on every module / small Llama",
    "small Llama, our hooks on every module / small Llama, PyTorch's hooks on every module",
    "48 layers, all captured / 48 layers",
    "48 layers, kept and read by name, no_grad / 48 layers, PyTorch's hooks and a list, no_grad",
    "48 layers and hook points, run_with_cache / TransformerLens: run_with_cache",
    "48 layers, a capture opened in each call (beside nnsight) / nnsight: 48 layers, all captured",
)
"""Rows of the chart on the front page: whole models."""


def page(text: str, results: Results[Samples], machine: Machine) -> str:
    """The page with the table between its markers.

    Raises:
        ValueError: the page has no such markers.
    """
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        msg = f"expected {BEGIN} and {END} in the page"
        raise ValueError(msg)
    table = report.of_sides(results).markdown()
    return f"{before}{BEGIN}\n{table}\n\n{machine}.\n{END}{after}"


def chart(results: Results[Samples], machine: Machine) -> str:
    """The chart of the front page.

    Raises:
        KeyError: one of its rows was not measured.
    """
    lines = {str(line.row): line for line in report.lines_of(results)}
    return report.chart([lines[name] for name in FRONT], machine)


def main() -> None:
    """Writes both."""
    results, machine = report.read_json(SAMPLES)
    PAGE.write_text(page(PAGE.read_text("utf-8"), results, machine), "utf-8")
    CHART.write_text(chart(results, machine), "utf-8")


if __name__ == "__main__":
    main()
