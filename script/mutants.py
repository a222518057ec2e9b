"""Breaks a sample of the product's lines, one at a time, and counts how many the tests catch.

`script/mutants.py [--part 1/20] [--only FOLDER...] [--minutes N] [--commit C]` draws a fixed sample
by seed: from the list of `cargo mutants` for the Rust sources, and from mutations of the Python
sources by the operators of `mutmut` (all but string changes). Neither tool can run these tests,
so each mutant is applied here, to a worktree of the commit below `target/mutants`. There the
extension is built, the tests of the mutated room run first and all others after them, up to the
first failure. A mutant that takes three times as long as the commit itself is caught: it loops. One
that does not compile is not counted.

Results are kept in `target/mutants/COMMIT.json`, so a sample may be run in parts; `--record` writes
them to `docs/mutants.json`, with which a run of that commit starts elsewhere. `--room` leaves
mutants that the tests of their room do not catch open; a run without it goes on with them. The
tests of the engines vLLM and SGLang are no part of this.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "target/mutants"
TREE = FOLDER / "tree"
BUILD = FOLDER / "build"
RECORD = ROOT / "docs/mutants.json"

SEED = 42
RUST, PYTHON = 200, 100
"""Sizes of the two samples."""

ROOMS = {
    "rust/core": ["hooks", "threads", "lifetimes"],
    "rust/statistics": ["detectors"],
    "rust/py/src": ["hooks"],
    "rust/py/src/attach": ["attach", "lifetimes", "rows"],
    "rust/py/src/call": ["hooks", "attach"],
    "rust/py/src/capture": ["captures", "plans", "rows"],
    "rust/py/src/contexts": ["registration", "threads"],
    "rust/py/src/cpython": ["hooks", "attach", "lifetimes"],
    "rust/py/src/gates": ["gates"],
    "rust/py/src/hooks": ["hooks"],
    "rust/py/src/effects": ["effects", "plans", "rows"],
    "rust/py/src/effects/detectors": ["detectors"],
    "rust/py/src/rows": ["rows"],
    "rust/py/src/torch": ["hooks", "captures", "attach", "rows"],
    "python/ferrohook/engines": ["engines"],
    "python/ferrohook/plans": ["plans"],
    "python/ferrohook/rows": ["rows"],
    "python/ferrohook/names/places.py": ["names", "plans"],
    "python/ferrohook/names/spelling.py": ["quantity"],
    "python/ferrohook/names/select.py": ["names"],
}
"""Folders of tests by the sources that they test; the longest name that fits counts."""

CRATES = {"rust/core": "ferrohook-core", "rust/statistics": "ferrohook-statistics"}
"""Packages whose own tests run before those in Python."""

WITHOUT_ENGINES = [f"--ignore=tests/engines/{each}_plugin" for each in ("vllm", "sglang")]
LEAST = 30
"""Seconds that tests may take however fast they are without a mutant."""
MEMORY = 12 << 30
"""Bytes that a process may allocate: an endless loop would take all there are."""


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    line: int
    what: str
    """Description without the line."""
    diff: str

    @property
    def key(self) -> str:
        """Name in the results."""
        return f"{self.file}:{self.line}: {self.what}"


class Result(NamedTuple):
    """Outcome of a mutant."""

    outcome: str
    """caught, timeout, survived, unbuildable, or open: not caught by the tests of its room."""
    by: str = ""
    """First test that failed, or what ran too long."""
    seconds: float = 0.0


def sample(mutants: Iterable[tuple[str, T]], count: int, seed: int = SEED) -> list[T]:
    """Draws mutants by the seed and their names; a change of the others changes little.

    Args:
        mutants: names and mutants. Equal names are told apart by their order.
        count: how many to draw.
        seed: the seed.
    """
    seen: Counter[str] = Counter()
    ranked = []
    for name, mutant in mutants:
        seen[name] += 1
        rank = hashlib.sha256(f"{seed} {name} {seen[name]}".encode()).digest()
        ranked.append((rank, mutant))
    return [mutant for _, mutant in sorted(ranked, key=lambda each: each[0])[:count]]


def rust_mutants() -> Iterator[tuple[str, Mutant]]:
    """Lists the mutants of the Rust sources, by names without lines."""
    command = ["cargo", "mutants", "--list", "--json", "--diff", "--workspace"]
    for each in json.loads(output_of(command, tree=TREE)):
        file = each["file"]
        what = re.sub(r"^\S+:\d+:\d+: ", "", each["name"])
        # cargo-mutants does not know PyResult for a Result: none of its values would compile.
        if file != "rust/py/src/tests.rs" and "with PyResult::" not in what:
            yield f"{file} {what}", Mutant(file, each["span"]["start"]["line"], what, each["diff"])


def python_files() -> Iterator[str]:
    """Lists the Python files of rooms, without vLLM's and SGLang's."""
    for room in ROOMS:
        if room.startswith("python"):
            found = [TREE / room] if room.endswith(".py") else sorted((TREE / room).rglob("*.py"))
            for path in found:
                if not {"vllm", "sglang"}.intersection(path.parts):
                    yield str(path.relative_to(TREE))


@functools.cache
def python_changes(code: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """Parses a source; returns it with all that mutmut changes: nodes and what replaces them."""
    import libcst  # noqa: PLC0415 (the tests of this script do without)
    from mutmut.mutation.mutators import mutation_operators  # noqa: PLC0415

    changes = []

    class Visitor(libcst.CSTVisitor):
        def on_visit(self, node: libcst.CSTNode) -> bool:
            if isinstance(node, libcst.Annotation | libcst.BaseString | libcst.Decorator):
                return False
            for kind, operator in mutation_operators:
                if isinstance(node, kind):
                    changes.extend((node, changed) for changed in operator(node))
            return True

    source = libcst.parse_module(code)
    source.visit(Visitor())
    return source, changes


def python_mutants() -> Iterator[tuple[str, tuple[str, int]]]:
    """Lists the mutants of the Python sources, each the number of a change in a file."""
    for file in python_files():
        _, changes = python_changes((TREE / file).read_text())
        for number in range(len(changes)):
            yield file, (file, number)


def python_mutant(file: str, number: int) -> Mutant:
    """Makes one of `python_mutants`."""
    code = (TREE / file).read_text()
    source, changes = python_changes(code)
    return between(file, code, source.deep_replace(*changes[number]).code)


def between(file: str, before: str, after: str) -> Mutant:
    """Returns the change of a file as a mutant."""
    lines, others = before.splitlines(keepends=True), after.splitlines(keepends=True)
    changed = list(difflib.unified_diff(lines, others, n=0))
    removed, added = (
        " ".join(" ".join(line[1:] for line in changed[2:] if line[0] == sign).split())
        for sign in "-+"
    )
    line = int(changed[2].removeprefix("@@ -").split(",")[0].split()[0])
    diff = "".join(difflib.unified_diff(lines, others, file, file))
    return Mutant(file, line, f"`{removed}` becomes `{added}`", diff)


class Tests(NamedTuple):
    """Tests that run as one command."""

    name: str
    command: list[str]


def tests_of(file: str, workers: str, *, rest: bool) -> list[Tests]:
    """Returns the tests of a source file, its room's first.

    Args:
        file: path of the source file in the repository.
        workers: number of test processes, or `auto`.
        rest: whether all other tests follow.
    """
    room = max((each for each in ROOMS if f"{file}/".startswith(f"{each}/")), key=len)
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    pytest += ["-n", workers, "--maxprocesses=4", "--dist=worksteal", *WITHOUT_ENGINES]
    folders = [f"tests/{each}" for each in ROOMS[room]]
    found = [Tests(" ".join(folders), [*pytest, *folders])]
    if room in CRATES:
        command = ["cargo", "test", "--quiet", "--package", CRATES[room]]
        found.insert(0, Tests(" ".join(command), command))
    if rest:
        others = [f"--ignore={each}" for each in folders]
        found.append(Tests(f"all but {' '.join(folders)}", [*pytest, *others, "tests"]))
    return found


class Runner:
    """Runs tests on mutants of the worktree."""

    def __init__(self, workers: str, baselines: dict[str, float]) -> None:
        self._workers = workers
        self._baselines = baselines
        self._environment = os.environ | {
            "CARGO_TARGET_DIR": str(BUILD),
            # Fast to build.
            "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
            "CARGO_PROFILE_RELEASE_INCREMENTAL": "true",
            "CARGO_PROFILE_RELEASE_LTO": "off",
            "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYO3_PYTHON": sys.executable,
            # A mutant may have the size and the time of its original.
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(str(TREE / each) for each in ("python", "tests", "")),
        }

    def result(self, mutant: Mutant, *, rest: bool) -> Result:
        """Applies a mutant and runs tests until one fails.

        Args:
            mutant: the mutant.
            rest: whether the tests of other rooms run too.
        """
        tests = tests_of(mutant.file, self._workers, rest=rest)
        for each in tests:
            if each.name not in self._baselines:
                self._baselines[each.name] = self._baseline(each)
        start = monotonic()
        output_of(["patch", "--quiet", mutant.file], tree=TREE, given=mutant.diff)
        try:
            outcome, by = self._outcome(tests) if self._build() else ("unbuildable", "")
        finally:
            output_of(["git", "checkout", "--quiet", "--", mutant.file], tree=TREE)
        if outcome == "survived" and not rest:
            outcome = "open"
        return Result(outcome, by, round(monotonic() - start, 1))

    def _baseline(self, tests: Tests) -> float:
        """Returns the seconds that tests take without a mutant."""
        start = monotonic()
        if not self._build() or self._run(tests.command) != 0:
            message = f"{tests.name} fails without a mutant: {FOLDER / 'output'}"
            raise RuntimeError(message)
        return monotonic() - start

    def _outcome(self, tests: Sequence[Tests]) -> tuple[str, str]:
        for each in tests:
            status = self._run(each.command, max(LEAST, 3 * self._baselines[each.name]))
            if status is None:
                return "timeout", each.name
            if status:
                output = (FOLDER / "output").read_text(errors="replace")
                failed = re.search(r"^(?:FAILED|ERROR|test) (\S+)", output, re.MULTILINE)
                return "caught", failed[1] if failed else each.name
        return "survived", ""

    def _build(self) -> bool:
        """Builds the extension into the worktree; returns whether it compiles."""
        if self._run(["cargo", "build", "--quiet", "--release", "--package", "ferrohook-py"]):
            return False
        name = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
        shutil.copy(BUILD / "release/lib_core.so", TREE / "python/ferrohook" / name)
        return True

    def _run(self, command: list[str], seconds: float | None = None) -> int | None:
        """Runs a command; returns its status, or None if it took longer than it may."""
        with (FOLDER / "output").open("w") as output:
            started = subprocess.Popen(  # noqa: S603 (tests of this commit)
                command,
                cwd=TREE,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return started.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait()


def scores(drawn: Iterable[Mutant], results: dict[str, Result]) -> dict[str, dict[str, int]]:
    """Counts the mutants of each folder: drawn, caught, survived and open."""
    counts: dict[str, dict[str, int]] = {}
    for mutant in drawn:
        folder = str(Path(mutant.file).parent)
        count = counts.setdefault(folder, dict.fromkeys(("drawn", "caught", "survived", "open"), 0))
        count["drawn"] += 1
        outcome = results[mutant.key].outcome if mutant.key in results else ""
        outcome = "caught" if outcome == "timeout" else outcome
        if outcome in count:
            count[outcome] += 1
    return dict(sorted(counts.items()))


def table_of(commit: str, counts: dict[str, dict[str, int]]) -> Table:
    """Draws the scores of a commit."""
    table = Table("folder", "drawn", "caught", "survived", "open", "score", title=commit)
    for folder, count in counts.items():
        ended = count["caught"] + count["survived"]
        score = f"{count['caught'] / ended:.0%}" if ended else ""
        table.add_row(folder, *map(str, count.values()), score)
    return table


def output_of(command: Sequence[str], *, tree: Path = ROOT, given: str = "") -> str:
    """Runs a command in a checkout with a text as its input; returns its output."""
    options = {"cwd": tree, "input": given, "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(command, check=True, **options)  # noqa: S603 (of this script)
    return done.stdout


def check_out(commit: str) -> None:
    """Makes the worktree, or takes it to a commit."""
    if TREE.exists():
        output_of(["git", "checkout", "--quiet", "--force", "--detach", commit], tree=TREE)
    else:
        output_of(["git", "worktree", "add", "--quiet", "--force", "--detach", str(TREE), commit])


def draw() -> list[Mutant]:
    """Draws the samples of the worktree."""
    python = [python_mutant(*each) for each in sample(python_mutants(), PYTHON)]
    return sample(rust_mutants(), RUST) + python


def chosen(drawn: Sequence[Mutant], part: str, only: Sequence[str]) -> list[Mutant]:
    """Returns a part of the drawn mutants.

    Args:
        drawn: all of them.
        part: which of how many parts, as 1/20.
        only: prefixes of their files; empty for all.
    """
    number, parts = map(int, part.split("/"))
    found = [each for each in drawn if each.file.startswith(tuple(only) or "")]
    return found[number - 1 :: parts]


def main(arguments: list[str] | None = None) -> None:
    """Runs mutants one after the other, then prints the scores and what survived."""
    parser = argparse.ArgumentParser(prog="mutants.py", description=__doc__)
    parser.add_argument("--part", default="1/1", help="which of how many parts, as 1/20")
    parser.add_argument("--only", nargs="+", default=[], metavar="FOLDER", help="of these files")
    parser.add_argument("--count", type=int, help="at most so many")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--room", action="store_true", help="run the tests of the room only")
    parser.add_argument("--workers", default="auto", help="test processes")
    parser.add_argument("--commit", default="HEAD", help="whose sources are changed")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    end = monotonic() + 60 * options.minutes

    commit = output_of(["git", "rev-parse", "--short=8", options.commit]).strip()
    FOLDER.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    check_out(commit)
    file = FOLDER / f"{commit}.json"
    kept = json.loads(file.read_text()) if file.exists() else {"drawn": draw(), "results": {}}
    drawn = [Mutant(*each) for each in kept["drawn"]]
    results = {key: Result(*each) for key, each in kept["results"].items()}
    if RECORD.exists() and (recorded := json.loads(RECORD.read_text()))["commit"] == commit:
        results = {key: Result(*each) for key, each in recorded["results"].items()} | results
    baselines = kept.setdefault("baselines", {})
    runner = Runner(options.workers, baselines)

    todo = [
        each
        for each in chosen(drawn, options.part, options.only)
        if each.key not in results or (results[each.key].outcome == "open" and not options.room)
    ]
    for mutant in todo[: options.count]:
        if monotonic() > end:
            break
        results[mutant.key] = result = runner.result(mutant, rest=not options.room)
        print(f"{result.outcome} {mutant.key}  {result.by} {result.seconds} s", flush=True)
        text = json.dumps({"drawn": drawn, "results": results, "baselines": baselines}, indent=1)
        file.write_text(text + "\n")

    counts = scores(drawn, results)
    Console().print(table_of(commit, counts))
    survived = [key for key, each in results.items() if each.outcome in {"survived", "open"}]
    for key in survived:
        print(f"{results[key].outcome} {key}")
    if options.record:
        outcomes = {key: (each.outcome, each.by) for key, each in sorted(results.items())}
        record = {"commit": commit, "seed": SEED, "folders": counts, "results": outcomes}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
