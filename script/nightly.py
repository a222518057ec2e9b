"""Runs every test whole, lane by lane, and prints one table for the commit.

`script/nightly.py [LANE...]`: without names, all lanes. A lane that fails stops no other. Results
are kept in `target/nightly` for the commit, so that a night may be run in parts; the exit status is
1 if a lane of the table failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
LANES = {
    "test": "make test WHOLE=1",
    "fake-cuda": "make fake-cuda",
    "loom": "make loom",
    "docs": "make docs",
    "oldest": "script/interpreters 3.11 oldest --whole",
    "3.12": "script/interpreters 3.12 newest --whole",
    "3.13": "script/interpreters 3.13 newest --whole",
    "free-threaded": "script/free-threaded --whole",
    "vllm": "script/vllm",
    "vllm-v2": "RUNNER=v2 script/vllm",
    "vllm-0.33": "RELEASE=0.33.0 script/vllm",
    "vllm-0.33-v2": "RELEASE=0.33.0 RUNNER=v2 script/vllm",
    "sglang": "script/sglang",
    "saelens": "script/saelens",
    "ecosystem": "script/ecosystem",
    "release": "script/release",
    "front-page": "script/front-page",
    "cuda": "make cuda",
}
"""Commands by lane; transformers' engine is tested by `test`."""

_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


class Result(NamedTuple):
    """Result of one lane."""

    outcome: str
    """passed, failed, or skipped with the reason."""
    counts: dict[str, int]
    seconds: float


def outcome_of(output: str, status: int) -> tuple[str, dict[str, int]]:
    """Reads the output of a lane.

    Args:
        output: its whole output.
        status: its exit status.

    Returns:
        the outcome, and the numbers of tests: passed, failed, skipped.
    """
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for line in output.splitlines():
        # The closing lines of pytest and of cargo test.
        if not re.match(r"(=+ )?\d+ \w+.* in [\d.]+s|test result: ", line):
            continue
        for number, what in _COUNT.findall(line):
            counts["failed" if what.startswith("error") else what] += int(number)
    if status:
        return "failed", counts
    if not counts["passed"] and (reason := re.search(r"^SKIPPED (.+)$", output, re.MULTILINE)):
        return f"skipped ({reason[1].partition(': ')[2] or reason[1]})", counts
    return "passed", counts


def run(lane: str, folder: Path) -> Result:
    """Runs a lane; its output goes to a log in `folder`."""
    log = folder / f"{lane}.log"
    start = monotonic()
    with log.open("w", encoding="utf-8") as file:
        command = ["bash", "-e", "-c", LANES[lane]]
        done = subprocess.run(command, check=False, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)  # noqa: S603 (a lane)
    seconds = monotonic() - start
    return Result(*outcome_of(log.read_text(encoding="utf-8"), done.returncode), seconds)


def table_of(commit: str, results: dict[str, Result]) -> Table:
    """Draws the table of a commit."""
    table = Table("lane", "outcome", "passed", "failed", "skipped", "time", title=commit)
    for lane in LANES:
        if lane in results:
            outcome, counts, seconds = results[lane]
            numbers = [str(counts[each]) for each in ("passed", "failed", "skipped")]
            table.add_row(lane, outcome, *numbers, f"{seconds / 60:.1f} min")
        else:
            table.add_row(lane, "not run", style="dim")
    return table


def read(kept: Path) -> dict[str, Result]:
    """Reads the results that were kept of a commit."""
    if not kept.exists():
        return {}
    return {lane: Result(*each) for lane, each in json.loads(kept.read_text()).items()}


def commit_here() -> str:
    """Returns the commit of the checkout, with `+` if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout  # noqa: S603

    return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(git("status", "--porcelain"))


def main(arguments: list[str] | None = None) -> int:
    """Runs lanes one after the other; returns 1 if one in the table failed."""
    parser = argparse.ArgumentParser(prog="nightly.py", description=__doc__)
    parser.add_argument("lanes", metavar="LANE", nargs="*", help=f"of {', '.join(LANES)}")
    lanes = parser.parse_args(arguments).lanes
    if unknown := [lane for lane in lanes if lane not in LANES]:
        parser.error(f"no lane is called {', '.join(unknown)}; there are {', '.join(LANES)}")
    commit = commit_here()
    folder = ROOT / "target/nightly" / commit
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.json"
    console = Console()
    results = read(kept)
    for lane in lanes or LANES:
        console.print(f"{lane}: {LANES[lane]}", markup=False)
        result = run(lane, folder)
        results = read(kept) | {lane: result}  # other parts may run at the same time
        kept.write_text(json.dumps(results))
        console.print(f"{lane}: {result.outcome}, {result.seconds:.0f} s", markup=False)
    console.print(table_of(commit, results))
    if failed := [lane for lane, each in results.items() if each.outcome == "failed"]:
        console.print(
            f"failed: {', '.join(failed)}; logs in {folder.relative_to(ROOT)}", markup=False
        )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
