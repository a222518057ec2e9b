"""Consistency of a release: version, Pythons, files and public CI."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

import ferrohook as fh
from support.scripts import ROOT, script

if TYPE_CHECKING:
    from pathlib import Path

yaml: Any = pytest.importorskip("yaml")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def locked_pyo3() -> str:
    packages = tomllib.loads(read("Cargo.lock"))["package"]
    (version,) = [each["version"] for each in packages if each["name"] == "pyo3"]
    return str(version)


def workflow(name: str = "ci") -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(read(f".github/workflows/{name}.yml"))["jobs"]
    return jobs


def test_the_version_has_one_source() -> None:
    version = tomllib.loads(read("Cargo.toml"))["workspace"]["package"]["version"]
    assert fh.__version__ == version == importlib.metadata.version("ferrohook")
    written = [ROOT / "Cargo.toml", ROOT / "pyproject.toml", *ROOT.glob("rust/*/Cargo.toml")]
    written += (ROOT / "python").rglob("*.py")
    found = [path.name for path in written if version in path.read_text()]
    assert found == ["Cargo.toml"]


def test_the_changelog_begins_with_the_version() -> None:
    first = re.search(r"^## (\S+?)(?:, .+)?$", read("CHANGELOG.md"), re.MULTILINE)
    assert first is not None
    assert first[1] == fh.__version__


def test_the_wheel_holds_no_benchmarks() -> None:
    assert [*(ROOT / "python").rglob("*bench*")] == []
    assert "bench" not in tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]


def test_public_ci_runs_the_targets_of_ci() -> None:
    in_ci = re.search(r"^for target in (.+); do$", read(".ci/run"), re.MULTILINE)
    assert in_ci
    jobs = workflow()
    texts = [text for job in jobs.values() for text, _ in script("workflow").commands(job)]
    makes = [text.removeprefix("make ") for text in texts if text.startswith("make ")]
    assert sorted(makes) == sorted(in_ci[1].split())
    assert {*makes} <= {*re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)}


def test_public_ci_runs_each_lane_every_night() -> None:
    lanes = workflow("nightly")["nightly"]["strategy"]["matrix"]["lane"]
    assert lanes == [lane for lane in script("nightly").LANES if lane != "cuda"]


def test_each_lane_runs_a_target_or_a_script() -> None:
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)
    for command in script("nightly").LANES.values():
        program, *words = [word for word in command.split() if "=" not in word]
        assert words[0] in targets if program == "make" else os.access(ROOT / program, os.X_OK)


def test_each_folder_with_needs_of_its_own_exists() -> None:
    folders = re.findall(r"^NEEDS_(\w+) :=", read("Makefile"), re.MULTILINE)
    assert folders
    assert [folder for folder in folders if not (ROOT / "tests" / folder).is_dir()] == []


def test_neither_ci_nor_a_test_depends_on_the_day() -> None:
    files = [ROOT / ".ci/run", ROOT / "Makefile", *(ROOT / "script").iterdir()]
    asks = re.compile(r"\bdate (-u )?\+%j|\bday of the year\b|day=")
    assert [path.name for path in files if path.is_file() and asks.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("output", "status", "outcome", "counts"),
    [
        (
            "== 12 passed, 3 skipped in 1.20s ==\n1 failed, 2 passed in 0.5s",
            1,
            "failed",
            (14, 1, 3),
        ),
        ("== 2 failed, 1 passed, 4 errors in 61.02s (0:01:01) ==", 1, "failed", (1, 6, 0)),
        (
            "test result: ok. 19 passed; 0 failed; 0 ignored; finished in 3.2s\n5 passed in 1s",
            0,
            "passed",
            (24, 0, 0),
        ),
        ("SKIPPED vllm: no wheel\n", 0, "skipped (no wheel)", (0, 0, 0)),
        ("SKIPPED chromium: none\n7 passed in 1.0s\n", 0, "passed", (7, 0, 0)),
        ("12 passed in 3.0s\nSegmentation fault", 139, "failed", (12, 0, 0)),
    ],
)
def test_a_lane_s_outcome_is_read_from_what_it_prints(
    output: str, status: int, outcome: str, counts: tuple[int, int, int]
) -> None:
    found, numbers = script("nightly").outcome_of(output, status)
    assert (found, tuple(numbers.values())) == (outcome, counts)


def test_lanes_of_a_night_add_up_and_none_stops_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nightly = script("nightly")
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "commit_here", lambda: "abc1234")
    lanes = {
        "bad": "echo 1 failed in 1.0s; false",
        "good": "echo 3 passed in 1.0s",
        "other": "true",
    }
    monkeypatch.setattr(nightly, "LANES", lanes)
    assert nightly.main(["bad", "good"]) == 1
    assert "not run" in capsys.readouterr().out
    lanes["bad"] = "echo 1 passed in 1.0s"
    assert nightly.main(["bad"]) == 0
    assert nightly.main(["other"]) == 0
    kept = json.loads((tmp_path / "target/nightly/abc1234/results.json").read_text())
    assert {lane: (each[0], each[1]["passed"]) for lane, each in kept.items()} == {
        "bad": ("passed", 1),
        "good": ("passed", 3),
        "other": ("passed", 0),
    }
    with pytest.raises(SystemExit):
        nightly.main(["elsewhere"])


def test_released_pythons_are_tested() -> None:
    jobs = workflow()
    built = re.search(r"\|\| set -- (.+)$", read("script/release"), re.MULTILINE)
    assert built is not None
    with_gil = [version for version in built[1].split() if not version.endswith("t")]
    assert jobs["test"]["strategy"]["matrix"]["python"] == with_gil
    steps = workflow("nightly")["nightly"]["steps"]
    set_up = next(step["with"] for step in steps if "with" in step)
    assert sorted(set_up["python-version"].split()) == sorted(built[1].split())
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert project["requires-python"] == f">={with_gil[0]}"


def test_private_parts_of_pyo3_are_checked_at_each_upgrade() -> None:
    fence = ROOT / "rust/py/src/cpython/trampoline.rs"
    sources = (ROOT / "rust/py/src").rglob("*.rs")
    assert [path for path in sources if "pyo3::impl_" in path.read_text()] == [fence]
    # On an upgrade, review pyo3's `impl_::trampoline` and this file, then change the version here.
    assert locked_pyo3().startswith("0.28.")


# the workflow, run here


def test_each_command_of_the_workflow_is_a_target_or_a_script_of_this_checkout() -> None:
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)
    texts = [
        text
        for jobs in (workflow(), workflow("nightly"))
        for job in jobs.values()
        for text, runs in script("workflow").commands(job)
        if runs
    ]
    assert len(texts) > 10
    for text in texts:
        program, first, *_ = text.split()
        assert first in targets if program == "make" else os.access(ROOT / program, os.X_OK), text


STEPS = """
jobs:
  good:
    strategy:
      matrix: {word: [one, two], other: [1, 2]}
    steps:
      - uses: actions/checkout@v4
      - run: echo ${{ matrix.word }}
      - run: echo once
  bad:
    steps:
      - run: false; echo never
      - run: echo never
  unknown:
    steps:
      - run: echo ${{ github.ref }}
"""


@pytest.fixture
def run_workflow(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs jobs of a made-up workflow; returns the status and the output."""
    path = tmp_path / "ci.yml"
    path.write_text(STEPS)

    def run(*argv: str) -> tuple[int, list[str]]:
        status = script("workflow").main(["--file", str(path), *argv])
        return status, capfd.readouterr().out.splitlines()

    return run


def test_commands_run_once_for_each_text_and_actions_are_listed(run_workflow: Any) -> None:
    uses = "good: not run: uses actions/checkout@v4"
    commands = ["good: echo one", "one", "good: echo once", "once", "good: echo two", "two"]
    assert run_workflow("good") == (0, [uses, *commands])
    assert run_workflow("good", "--list") == (0, [uses, *commands[::2]])


def test_a_command_that_fails_ends_its_job_and_no_other(run_workflow: Any) -> None:
    status, printed = run_workflow("bad", "good")
    assert status == 1
    assert printed[0] == "bad: false; echo never"
    assert "never" not in printed
    assert printed[-1] == "two"


def test_commands_that_only_the_public_ci_can_run_are_refused(run_workflow: Any) -> None:
    with pytest.raises(ValueError, match="not one of the matrix"):
        run_workflow("unknown")
    with pytest.raises(SystemExit):
        run_workflow("nowhere")


# scripts


def find_python(version: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "script" / "find-python", version],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_an_interpreter_is_found_by_its_variable_or_not_at_all() -> None:
    found = find_python("3.99", PYTHON399=sys.executable)
    assert found.stdout == f"{sys.executable}\n"
    missing = find_python("3.99")
    assert (missing.returncode, missing.stdout) == (1, "")


def test_the_gpus_tests_are_reported_as_skipped_without_one() -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "script" / "cuda"], check=True, capture_output=True, text=True, env=hidden
    )
    assert done.stdout == "SKIPPED cuda: no torch here sees a GPU\n"


def test_what_the_gpus_tests_lack_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    # Sees a GPU, and nothing that is installed.
    python.write_text(
        f"""#!/usr/bin/env bash
case "$*" in *cuda.is_available*) exit 0 ;; esac
exec {sys.executable} -S "$@"
"""
    )
    python.chmod(0o755)
    checkout = tmp_path / "checkout"
    (checkout / "script").mkdir(parents=True)
    script = shutil.copy(ROOT / "script" / "cuda", checkout / "script")

    def last_line() -> str:
        done = subprocess.run(
            [script],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHON": str(python)},
        )
        assert done.returncode == 1
        return done.stderr.splitlines()[-1]

    free_threaded = "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    version = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    tag = f"{version}-{version}{free_threaded}"
    no_wheel = f"cuda: dist/ has no wheel of {tag}: bring the dist/ of `make release`"
    assert last_line() == no_wheel
    (checkout / "dist").mkdir()
    with zipfile.ZipFile(checkout / f"dist/ferrohook-0.1.0-{tag}-any.whl", "w") as wheel:
        wheel.writestr("ferrohook/__init__.py", "")
    no_tools = f"cuda: {python} lacks these packages, and dist/ has no test-tools.zip: "
    assert last_line() == no_tools + "bring that of `make release`"


# files of a release


SBOM = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.5",
    "metadata": {"component": {"version": "1.2"}},
    "components": [{"name": "pyo3", "bom-ref": f"path+file://{ROOT}/rust/py"}],
}


def make_wheel(folder: Path, *, version: str = "", unwinder: str = "libgcc_s.so.1") -> Path:
    """Writes a wheel with an extension and, with the version of a crate, an SBOM."""
    path = folder / "ferrohook-1.2-cp312-cp312-manylinux_2_28_x86_64.whl"
    sbom = {**SBOM, "components": [{**SBOM["components"][0], "version": version}]}  # type: ignore[index]
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("ferrohook/_core.so", unwinder)
        if version:
            files.writestr(
                "ferrohook-1.2.dist-info/sboms/ferrohook.cyclonedx.json", json.dumps(sbom)
            )
    return path


def test_a_release_has_checksums_and_the_crates_of_its_wheels(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, version=locked_pyo3())
    script("release_files").main(tmp_path)
    sbom = json.loads((tmp_path / "ferrohook-1.2.cdx.json").read_text())
    assert sbom["components"][0]["bom-ref"] == "path+file:///ferrohook/rust/py"
    sums = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert [line.split()[1] for line in sums] == [wheel.name, "ferrohook-1.2.cdx.json"]
    assert sums[0].split()[0] == hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no SBOM"),
        ({"version": "0.0.1"}, "not in Cargo.lock: .*pyo3"),
        ({"unwinder": "libunwind"}, "not linked to libgcc_s"),
    ],
)
def test_a_wheel_that_is_not_as_it_should_be_is_refused(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    make_wheel(tmp_path, **options)  # type: ignore[arg-type]
    release_files = script("release_files")
    with pytest.raises(release_files.ReleaseError, match=message):
        release_files.main(tmp_path)
