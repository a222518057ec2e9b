"""Compares other projects' tests on plain and on instrumented models (for `script/ecosystem`).

Exits with 1 after an unknown difference, a run that was cut off, and missing tests without a known
reason.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "target" / "ecosystem" / "sources"
LIMIT_S = 1800  # for one run of one suite
SCRIPTED = "`torch.jit.script` refuses modules with hooks, as a graph cannot hold them"
UNSEEN = "it looks for hooks in `module._forward_hooks`, which has none of an instrumented module"
EXACT_TYPE = "it asks `type(module) is`, which is false for an instrumented module"
REMOVED = "it removes a backward hook before backward, and only PyTorch's own still runs then"


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of one project, and the differences that are known: a regex of ids and its reason."""

    project: str
    tests: str
    options: tuple[str, ...] = ()
    version: str | None = None  # of the tests, if not the installed one
    added: str | None = None  # a file of this folder, put among the tests
    known: dict[str, str] = dataclasses.field(default_factory=dict)
    untested: str | None = None  # reason why its distributions have no tests

    @property
    def folder(self) -> Path:
        """Folder of the unpacked distribution."""
        return SOURCES / f"{self.project}-{self.version or self.installed}"

    @property
    def installed(self) -> str:
        """Version that is tested."""
        return importlib.metadata.version(self.project)


_TIMM_MODELS = " or ".join(
    f"-{name}{end}"
    for name in ("resnet10t", "vit_tiny_patch16_224", "convnext_atto")
    for end in ("]", "-")
)
SUITES = (
    Suite("captum", "tests", version="0.3.1"),
    Suite("mi-crow", "tests", untested="none of its distributions has tests"),
    Suite(
        "nnsight",
        "tests",
        ("--ignore=tests/vllm", "--ignore=tests/tp", "--ignore=tests/performance"),
    ),
    Suite(
        "timm",
        "tests/test_layers*.py tests/test_prune.py tests/test_task.py tests/test_models.py",
        ("-k", f"not test_models or {_TIMM_MODELS}"),
        known={"torchscript": SCRIPTED},
    ),
    Suite(
        "torchlens",
        "tests/test_module_*.py tests/test_backward_*.py",
        known={"test_user_forward_hook_replacement_logged": UNSEEN},
    ),
    Suite(
        "transformer-lens",
        "tests/unit/test_hook*.py tests/unit/test_activation_cache*.py tests/unit/factored_matrix"
        " tests/unit/model_bridge/test_*hook*.py tests/unit/model_bridge/test_caching*.py",
        known={
            "test_attention_critical_hooks_fire_on_forward": EXACT_TYPE,
            "test_backward_hooks_see_the_batch_free_grad": REMOVED,
        },
    ),
    Suite("transformers", "tests/test_models.py", added="transformers_models.py"),
)


class Result(enum.StrEnum):
    """Result of one suite."""

    EQUAL = enum.auto()
    DIFFERENT = enum.auto()
    FAILED = enum.auto()
    SKIPPED = enum.auto()


class CutOffError(Exception):
    """A run that gave no report."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Outcomes of one run."""

    outcomes: dict[str, str]
    hooked_calls: int

    @property
    def passed(self) -> set[str]:
        """Ids of the tests that passed."""
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


def run(suite: Suite, tests: list[str], *, instrumented: bool) -> Run:
    """Runs tests in the folder of the suite."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir=.", "-c", os.devnull]
        command += ["-p", "no:cacheprovider", "--timeout=60", "--continue-on-collection-errors"]
        command += ["-n", "2", f"--junitxml={report.name}"]
        command += ["-p", "instrumenting"] if instrumented else []
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'script'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        log = SOURCES / f"{suite.project}-{'instrumented' if instrumented else 'plain'}.log"
        with (
            log.open("w") as output,
            subprocess.Popen(  # noqa: S603 (this interpreter, on sources fetched by the script)
                [*command, *suite.options, *tests],
                cwd=suite.folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group, workers included
            ) as process,
        ):
            try:
                process.wait(LIMIT_S)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    msg = f"cut off after {LIMIT_S} s, see {log}"
                    raise CutOffError(msg) from None
                raise
        if Path(report.name).stat().st_size == 0:
            msg = f"pytest ended with {process.returncode}, see {log}"
            raise CutOffError(msg)
        outcomes: dict[str, str] = {}
        for case in ET.parse(report.name).iter("testcase"):  # noqa: S314 (pytest's own)
            test = f"{case.get('classname')}::{case.get('name')}"
            failed = any(part.tag in {"failure", "error", "skipped"} for part in case)
            if outcomes.get(test) != "failed":
                outcomes[test] = "failed" if failed else "passed"
    calls = re.search(r"^hooked calls: (\d+)$", log.read_text(), re.MULTILINE)
    return Run(outcomes, int(calls[1]) if calls else 0)


def compare(suite: Suite) -> Result:
    """Prints the rows of a suite."""
    if suite.added and suite.folder.is_dir():
        (suite.folder / "tests/__init__.py").touch()
        shutil.copy(ROOT / "script" / suite.added, suite.folder / "tests/test_models.py")
    tests = [
        str(path.relative_to(suite.folder))
        for pattern in suite.tests.split()
        for path in sorted(suite.folder.glob(pattern))
    ]
    if not tests:
        if suite.untested and suite.folder.is_dir():
            print(f"SKIPPED {suite.project}: {suite.untested}", flush=True)
            return Result.SKIPPED
        print(f"FAILED {suite.project}: no tests in {suite.folder}", flush=True)
        return Result.FAILED
    try:
        plain = run(suite, tests, instrumented=False)
        instrumented = run(suite, tests, instrumented=True)
    except CutOffError as error:
        print(f"FAILED {suite.project}: {error}", flush=True)
        return Result.FAILED
    differing = sorted(plain.passed - instrumented.passed)
    reasons = {
        test: next((why for known, why in suite.known.items() if re.search(known, test)), None)
        for test in differing
    }
    print(
        f"| {suite.project} {suite.installed} | {len(plain.outcomes)} | {len(plain.passed)} |"
        f" {len(instrumented.passed)} | {len(differing)} | {instrumented.hooked_calls:,} |",
        flush=True,
    )
    for reason, count in collections.Counter(filter(None, reasons.values())).items():
        print(f"  {count} known: {reason}")
    unknown = [f"NEW {test}" for test, reason in reasons.items() if reason is None]
    if not plain.passed:
        unknown.append("NEW no test passes")
    if instrumented.hooked_calls == 0:
        unknown.append("NEW nothing was hooked")
    for each in unknown:
        print(f"  {each}")
    return Result.DIFFERENT if unknown else Result.EQUAL


def main() -> int:
    """Compares the suites named by the arguments, or all."""
    names = sys.argv[1:] or [suite.project for suite in SUITES]
    if unknown := {*names} - {suite.project for suite in SUITES}:
        sys.exit(f"no such project: {', '.join(sorted(unknown))}")
    print(f"torch {importlib.metadata.version('torch')}, Python {sys.version.split()[0]}")
    print("| project | tests | pass plain | pass instrumented | differences | hooked calls |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    results = collections.Counter(compare(suite) for suite in SUITES if suite.project in names)
    print(", ".join(f"{results[result]} {result}" for result in Result), flush=True)
    return 1 if results[Result.DIFFERENT] or results[Result.FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
