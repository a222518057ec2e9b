"""Compares other projects' tests on plain and on instrumented models (for `script/ecosystem`)."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "target" / "ecosystem" / "sources"
SCRIPTED = "`torch.jit.script` refuses modules with hooks, as a graph cannot hold them"


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of one project, and the differences that are known: a regex of ids and its reason."""

    project: str
    tests: str
    options: tuple[str, ...] = ()
    version: str | None = None  # of the tests, if not the installed one
    added: str | None = None  # a file of this folder, put among the tests
    known: dict[str, str] = dataclasses.field(default_factory=dict)

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
    Suite("torchlens", "tests/test_module_*.py tests/test_backward_*.py"),
    Suite(
        "transformer-lens",
        "tests/unit/test_hook*.py tests/unit/test_activation_cache*.py tests/unit/factored_matrix",
    ),
    Suite("transformers", "tests/test_models.py", added="transformers_models.py"),
)


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
            "PYTHONPATH": str(ROOT / "script"),
        }
        done = subprocess.run(  # noqa: S603 (this interpreter, on sources fetched by the script)
            [*command, *suite.options, *tests],
            cwd=suite.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        log = SOURCES / f"{suite.project}-{'instrumented' if instrumented else 'plain'}.log"
        log.write_text(done.stdout)
        if Path(report.name).stat().st_size == 0:
            sys.exit(f"{suite.project}: pytest ended with {done.returncode}, see {log}")
        outcomes: dict[str, str] = {}
        for case in ET.parse(report.name).iter("testcase"):  # noqa: S314 (pytest's own)
            test = f"{case.get('classname')}::{case.get('name')}"
            failed = any(part.tag in {"failure", "error", "skipped"} for part in case)
            if outcomes.get(test) != "failed":
                outcomes[test] = "failed" if failed else "passed"
    calls = re.search(r"^hooked calls: (\d+)$", done.stdout, re.MULTILINE)
    return Run(outcomes, int(calls[1]) if calls else 0)


def compare(suite: Suite) -> bool:
    """Prints the rows of a suite; returns true if no difference is unknown."""
    if not suite.folder.is_dir():
        print(f"SKIPPED {suite.project}: the package registry gave no tests of it", flush=True)
        return True
    if suite.added:
        (suite.folder / "tests/__init__.py").touch()
        shutil.copy(ROOT / "script" / suite.added, suite.folder / "tests/test_models.py")
    tests = [
        str(path.relative_to(suite.folder))
        for pattern in suite.tests.split()
        for path in sorted(suite.folder.glob(pattern))
    ]
    plain = run(suite, tests, instrumented=False)
    instrumented = run(suite, tests, instrumented=True)
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
    unknown = [test for test, reason in reasons.items() if reason is None]
    for test in unknown:
        print(f"  NEW {test}")
    if instrumented.hooked_calls == 0:
        print("  NEW nothing was hooked")
    return not unknown and instrumented.hooked_calls > 0


def main() -> int:
    """Compares the suites named by the arguments, or all."""
    names = sys.argv[1:] or [suite.project for suite in SUITES]
    print(f"torch {importlib.metadata.version('torch')}, Python {sys.version.split()[0]}")
    print("| project | tests | pass plain | pass instrumented | differences | hooked calls |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    compared = [compare(suite) for suite in SUITES if suite.project in names]
    return 0 if all(compared) else 1


if __name__ == "__main__":
    sys.exit(main())
