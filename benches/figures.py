"""Table and chart in docs/, made of `docs/benchmarks.json` by `python -m benches.figures`."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from benches import report
from benches.running import ROOT

if TYPE_CHECKING:
    from benches.harness import Samples
    from benches.report import Machine
    from benches.running import Results

DOCS = ROOT / "docs"
STYLE = """
  text { font: 16px system-ui, sans-serif; fill: #24292f }
  .over { font-size: 14px; fill: #57606a }
  .bar { fill: #0969da } .one { stroke: #57606a; stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .over { fill: #9198a1 }
    .bar { fill: #4493f8 } .one { stroke: #9198a1 }
  }
"""
SAMPLES, PAGE, CHART = DOCS / "benchmarks.json", DOCS / "benchmarks.md", DOCS / "benchmarks.svg"
BEGIN, END = "<!-- by `make figures` -->", "<!-- end of the figures -->"


class Bar(NamedTuple):
    """Row of the chart."""

    row: str
    """Row of the table; PyTorch's hooks are its base."""
    calls: int
    """Hooked calls of modules that the row measures."""


LLAMA_MODULES = 108
"""Modules of the small Llama that a forward calls."""
FRONT = {
    "48 layers captured, and read by name": Bar(
        "48 layers, kept and read by name, no_grad"
        " / 48 layers, PyTorch's hooks and a list, no_grad",
        calls=48,
    ),
    "48 layers steered": Bar(
        "48 layers, Add / 48 layers, PyTorch's hooks return output + v", calls=48
    ),
    "a small Llama, a hook on every module": Bar(
        "small Llama, our hooks on every module / small Llama, PyTorch's hooks on every module",
        calls=LLAMA_MODULES,
    ),
    "a module that does nothing, one hook": Bar(
        "HookedModule, one hook / nn.Module, one hook", calls=1
    ),
    "the same, eight hooks": Bar("HookedModule, eight hooks / nn.Module, eight hooks", calls=1),
    "a hook registered and removed": Bar(
        "HookedModule, register + remove / nn.Module, register + remove", calls=1
    ),
}
"""Rows of the chart on the front page by its labels, in the order of what people do most."""


CAPTURED = "48 layers, a capture opened in each call (beside {0}) / {0}: 48 layers, all captured"
RESULTS = {
    "**Hooks cost less than PyTorch's.** A hook on every module of a small Llama takes {} of the\n"
    "  time of PyTorch's hooks there, and {} of the time of the model without hooks.": (
        FRONT["a small Llama, a hook on every module"].row,
        "small Llama, our hooks on every module / small Llama",
    ),
    "**A request's own hooks cost no more than global ones.** 48 layers kept by a plan opened for\n"
    "  each call take {} of the time of a list filled by PyTorch's hooks, and with 10,000 other\n"
    "  plans prepared a call takes {} of the time without them.": (
        "48 layers kept, a request for each call / 48 layers, a list by PyTorch's hooks",
        "48 layers, 10,000 plans prepared / 48 layers, no plans",
    ),
    "**Capturing costs less than with other libraries.** 48 layers captured, the capture opened\n"
    "  in each call, take {} of nnsight's time and {} of TransformerLens'.": (
        CAPTURED.format("nnsight"),
        CAPTURED.format("TransformerLens"),
    ),
}
"""Results at the top of the page, with the rows of their two shares."""
FIRST, SECOND = "<!-- results, by `make figures` -->", "<!-- end of the results -->"


def page(text: str, results: Results[Samples], machine: Machine) -> str:
    """The page with the results and the table between their markers.

    Raises:
        ValueError: the page has no such markers.
        KeyError: a row of the results was not measured.
    """
    ratios = {str(line.row): line.ratio.value for line in report.lines_of(results)}
    first = [
        "- " + result.format(*(f"{100 * ratios[row]:.0f} %" for row in rows))
        for result, rows in RESULTS.items()
    ]
    text = _between(text, FIRST, SECOND, "\n".join(first))
    table = report.of_sides(results).markdown()
    return _between(text, BEGIN, END, f"{table}\n\n{machine}.")


def _between(text: str, begin: str, end: str, content: str) -> str:
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        msg = f"expected {begin} and {end} in the page"
        raise ValueError(msg)
    return f"{before}{begin}\n{content}\n{end}{after}"


WIDTH, LEFT, FULL, HEIGHT, TOP = 460, 10, 320, 52, 58
"""Pixels: the picture, its margin, a bar of 100 %, a row, the titles."""


def chart(results: Results[Samples], machine: Machine) -> str:
    """Draws the chart of the front page as SVG, to be read on a phone.

    Raises:
        KeyError: one of its rows was not measured.
    """
    lines = {str(line.row): line for line in report.lines_of(results)}
    drawn = []
    for index, (label, (name, calls)) in enumerate(FRONT.items()):
        y, ratio = TOP + HEIGHT * index, lines[name].ratio
        ours, base = (f"{ns / calls / 1000:.2g}" for ns in (ratio.figure, ratio.base))
        length = f"{FULL * ratio.value:.0f}"
        drawn += [
            f'<text x="{LEFT}" y="{y + 16}">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y + 23}" width="{length}" height="18" class="bar"/>',
            f'<text x="{LEFT + FULL + 10}" y="{y + 38}">{ours} of {base} µs</text>',
        ]
    bottom, full = TOP + HEIGHT * len(FRONT), LEFT + FULL
    body = "\n".join(drawn)
    about = f"{machine.cpu}, torch {machine.torch}, {machine.when[:10]}"
    size = f'viewBox="0 0 {WIDTH} {bottom + 32}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>Time of each hooked call with ferrohook, and with PyTorch's hooks</title>
<style>{STYLE}</style>
<text x="{LEFT}" y="20">Time of each hooked call: shorter is faster</text>
<text x="{full}" y="46" text-anchor="end" class="over">PyTorch's hooks</text>
<path d="M{full} 52V{bottom}" class="one"/>
{body}
<text x="{LEFT}" y="{bottom + 20}" class="over">{escape(about)}</text>
</svg>
"""


def main() -> None:
    """Writes both."""
    results, machine = report.read_json(SAMPLES)
    PAGE.write_text(page(PAGE.read_text("utf-8"), results, machine), "utf-8")
    CHART.write_text(chart(results, machine), "utf-8")


if __name__ == "__main__":
    main()
