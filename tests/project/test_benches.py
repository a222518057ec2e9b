"""The benchmarks: groups, two builds side by side, tables, and the figures of docs/."""

from __future__ import annotations

import io
import json
import re
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

import ferrohook as fh
from benches import cuda, figures, report, running
from benches.__main__ import main
from benches.harness import QUICK, Effort, Group, Ratio, Row, Sampler, expect, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]


def sides() -> dict[str, Sampler]:
    return {"fast": lambda _: 1.0, "PyTorch": lambda _: 2.0}


def wrong() -> dict[str, Sampler]:
    expect(False, "the right result")
    return sides()


def outdated() -> dict[str, Sampler]:
    msg = "its interface changed"
    raise AttributeError(msg)


def group(
    setup: Callable[[], dict[str, Sampler]] = sides,
    name: str = "toy",
    bar: float = 1,
    needs: str | None = None,
) -> Group:
    row = Row(name="fast", over="PyTorch", bar=bar)
    return Group(name=name, setup=setup, rows=[row], needs=needs)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Groups that the command finds, measured in this process: workers find only real groups."""
    groups: list[Group] = []

    def alone(group: Group, effort: Effort) -> dict[str, list[float]]:
        if group.needs is not None:
            raise running.NotInstalledError(group.needs)
        return measure(group, effort, group.setup())

    monkeypatch.setattr(running, "find_groups", lambda _pattern: groups)
    monkeypatch.setattr(running, "alone", alone)
    return groups


# groups


def test_every_group_and_side_has_a_name_of_its_own() -> None:
    groups = running.find_groups()
    sides = [side for group in groups for side in group.sides]
    assert len({group.name for group in groups}) == len(groups) > 10
    assert len(set(sides)) == len(sides)
    assert len([row for group in groups for row in group.rows]) > 20


def test_a_group_names_its_rival() -> None:
    groups = running.find_groups()
    rivals = {"nnsight": "nnsight", "TransformerLens": "transformer_lens", "mi-crow": "mi_crow"}
    assert {group.needs for group in groups} - {None} == {*rivals.values(), "transformers"}
    for rival, module in rivals.items():
        named = [group for group in groups if any(rival in side for side in group.sides)]
        assert named == [group for group in groups if group.needs == module]


def test_the_sides_of_a_group_alternate() -> None:
    clock = count()
    samplers = {side: lambda _: float(next(clock)) for side in ("fast", "PyTorch")}
    samples = measure(group(), Effort(3, 0.0), samplers)
    assert samples == {"fast": [0, 2, 4], "PyTorch": [1, 3, 5]}


def test_a_ratio_is_the_quotient_of_the_figures() -> None:
    ratio = Ratio([1.0, 2.0, 6.0], [2.0, 4.0, 2.0])
    assert (ratio.figure, ratio.base, ratio.value) == (2, 2, 1)
    assert ratio.spread == pytest.approx((0.5, 2.5))


def test_the_groups_of_a_gpu_compute_the_right_results_on_a_cpu_too() -> None:
    pytest.importorskip("transformers")
    for each in cuda.groups("cpu"):
        samplers = each.setup()
        assert {*samplers} >= {*each.sides}
        assert all(sample(0.0) > 0 for sample in samplers.values())


# the command


def test_the_command_writes_table_json_and_plot(
    capsys: pytest.CaptureFixture[str], found: list[Group]
) -> None:
    found += [group(), group(name="slow", bar=0.1)]
    found += [group(name="other", needs="no_such_rival")]
    assert main(["--json", "b.json", "--plot", "b.svg"]) == 0
    told = capsys.readouterr()
    assert re.search(r"fast / PyTorch.*0\.500.*≤ 1.*yes", told.out)
    assert re.search(r"fast / PyTorch.*0\.500.*≤ 0.1.*NO", told.out)
    assert re.search(r"fast / PyTorch: no_such_rival is not", told.out)
    assert "not measured: other: no_such_rival is not installed" in told.err
    written = json.loads(Path("b.json").read_text())
    assert [row["ok"] for row in written["rows"]] == [True, False]
    assert written["not_installed"] == {"other": "no_such_rival"}
    assert written["samples"]["toy"] == {"fast": 21 * [1.0], "PyTorch": 21 * [2.0]}
    assert Path("b.svg").read_text().count("50 %") == 2


def test_without_a_terminal_each_group_has_a_line_with_an_estimate(
    capsys: pytest.CaptureFixture[str], found: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    found += [group(name="one"), group(name="two"), group(name="three")]
    seconds = count(0, 90)
    monkeypatch.setattr("benches.__main__.monotonic", lambda: next(seconds))
    assert main(["--quick"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "1 of 3, 1.5 min so far: one",
        "2 of 3, 3.0 min so far, about 6 min left: two",
        "3 of 3, 4.5 min so far, about 2 min left: three",
    ]


def test_a_failed_group_is_reported_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str], found: list[Group]
) -> None:
    found += [group(setup, setup.__name__) for setup in (wrong, outdated)]
    found += [group()]
    assert main(["--quick", "--markdown"]) == 1
    told = capsys.readouterr()
    assert "FAILED: wrong: wrong result, expected the right result" in told.err
    assert "FAILED: outdated: AttributeError: its interface changed" in told.err
    assert "| fast / PyTorch | 1.00 ns | 2.00 ns | 0.500 | 0.50 to 0.50 | ≤ 1 | yes |" in told.out


MISTAKES = {
    "--only zebra": "no row and no file has 'zebra' in its name",
    "--json there/x.json": "there is no folder there, make it first",
    "--plot there/x.svg": "there is no folder there, make it first",
    "--quick 3": "3",
    "--against nowhere/python": "there is no interpreter nowhere/python",
    f"--against {sys.executable} --json x.json": "no --json",
}


@pytest.mark.parametrize("argv", MISTAKES)
def test_a_user_error_is_one_line_on_stderr(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(argv.split())
    told = capsys.readouterr()
    assert (leaving.value.code, told.out) == (2, "")
    assert re.fullmatch(r"benches: .+\n", told.err)
    assert MISTAKES[argv] in told.err


@pytest.mark.parametrize("width", [80, 130])
def test_the_table_fits_its_width(width: int) -> None:
    results, _ = report.read_json(figures.SAMPLES)
    for sheet in (
        report.of_sides(results),
        report.of_builds(
            running.Results(
                [
                    (group, {side: Ratio(found[side], found[side]) for side in group.sides})
                    for group, found in results.measured
                ]
            )
        ),
    ):
        shown = io.StringIO()
        Console(file=shown, width=width).print(sheet.table())
        assert "…" not in shown.getvalue()
        assert max(map(len, shown.getvalue().splitlines())) <= width
        for cells in sheet.cells:
            assert all(cell in shown.getvalue() for cell in cells[1:])


# processes


def test_a_real_group_is_measured_in_a_process_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--quick", "--markdown", "--only", "register + remove"]) == 0
    row = r"\| HookedModule, register \+ remove / .+ \| [\d.]+ .s \| [\d.]+ .s \| 0\.\d"
    assert re.search(row, capsys.readouterr().out)


def test_a_worker_without_its_group_is_reported() -> None:
    one = partial(running.alone, effort=QUICK)
    results = running.run([group(name="in no file")], one, begin=lambda group: None)
    ((_, error),) = results.failed
    assert "not enough values" in error


def test_a_killed_worker_raises() -> None:
    (real,) = running.find_groups("register + remove")
    with running.Worker(real) as worker:
        worker._process.kill()
        with pytest.raises((running.FailedError, BrokenPipeError)):
            worker.sample(real.sides[0], 0.001)


def test_two_builds_are_measured_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []

    class Watched(running.Worker):
        def __init__(self, group: Group, python: str = sys.executable) -> None:
            made.append(python)
            super().__init__(group, python)

    monkeypatch.setattr(running, "Worker", Watched)
    monkeypatch.setattr(running, "ROUNDS", 1)
    # Another path to the same interpreter counts as another build; it has the package under test.
    there = tmp_path / "python"
    package = Path(fh.__file__).parent.parent
    there.write_text(
        f'#!/bin/sh\nPYTHONPATH="{package}:$PYTHONPATH" exec "{sys.executable}" "$@"\n'
    )
    there.chmod(0o755)
    argv = ["--quick", "--markdown", "--only", "register + remove", "--against", str(there)]
    assert main(argv) == 0
    assert made == [sys.executable, str(there)]
    row = r"\| (.+), register \+ remove \| [\d.]+ .s \| [\d.]+ .s \| [\d.]+ \| [\d.]+ to "
    assert re.findall(row, capsys.readouterr().out) == ["nn.Module", "HookedModule"]


# docs/


def test_the_page_and_the_chart_agree_with_the_samples() -> None:
    results, machine = report.read_json(figures.SAMPLES)
    page = figures.PAGE.read_text("utf-8")
    assert page == figures.page(page, results, machine), "run `python -m benches.figures`"
    assert figures.CHART.read_text("utf-8") == figures.chart(results, machine)


def test_a_page_without_markers_is_refused() -> None:
    page = figures.PAGE.read_text("utf-8")
    for marker in (figures.FIRST, figures.SECOND, figures.BEGIN, figures.END):
        with pytest.raises(ValueError, match=re.escape(marker)):
            figures.page(page.replace(marker, ""), *report.read_json(figures.SAMPLES))


SIZES = {"ns": 1.0, "µs": 1e3, "ms": 1e6}


def table() -> Iterator[tuple[str, str, str, str, str]]:
    """Rows of the page: both sides, their figures and the ratio."""
    page = figures.PAGE.read_text("utf-8")
    for line in page[page.index(figures.BEGIN) : page.index(figures.END)].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and " / " in cells[0]:
            yield *cells[0].split(" / "), *cells[1:4]  # type: ignore[misc]


def number(figure: str) -> float:
    value, _, unit = figure.partition(" ")
    return float(value.replace(",", "")) * SIZES.get(unit, 1.0)


def test_a_side_has_one_figure_and_the_ratio_is_the_quotient() -> None:
    shown: dict[str, str] = {}
    rows = 0
    for name, over, first, second, ratio in table():
        rows += 1
        assert shown.setdefault(name, first) == first
        assert shown.setdefault(over, second) == second
        assert float(ratio) == pytest.approx(number(first) / number(second), rel=0.02, abs=0.002)
    assert rows > 20
