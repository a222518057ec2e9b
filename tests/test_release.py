"""Consistency of a release: version, Pythons and public CI."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import ferrohook as fh

yaml: Any = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text()


def workflow() -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
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


def test_public_ci_runs_each_lane_once() -> None:
    script = read(".ci/run")
    lanes = re.search(r"^for lane in (.+); do$", script, re.MULTILINE)
    in_turn = re.search(r"^slow=\((.+)\)$", script, re.MULTILINE)
    assert lanes
    assert in_turn
    expected = lanes[1].replace('"${slow[turn]}"', in_turn[1]).split()
    makes = [
        step["run"].removeprefix("make ")
        for job in workflow().values()
        for step in job["steps"]
        if step.get("run", "").startswith("make ")
    ]
    assert sorted(makes) == sorted(expected)
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)
    assert set(makes) <= set(targets)


def test_released_pythons_are_tested() -> None:
    jobs = workflow()
    built = re.search(r"^for version in (.+); do$", read("script/wheels"), re.MULTILINE)
    assert built is not None
    with_gil = [version for version in built[1].split() if not version.endswith("t")]
    assert jobs["test"]["strategy"]["matrix"]["python"] == with_gil
    set_up = next(step["with"] for step in jobs["wheels"]["steps"] if "with" in step)
    assert sorted(set_up["python-version"].split()) == sorted(built[1].split())
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert project["requires-python"] == f">={with_gil[0]}"


def test_private_parts_of_pyo3_are_checked_at_each_upgrade() -> None:
    fence = ROOT / "rust/py/src/cpython/trampoline.rs"
    sources = (ROOT / "rust/py/src").rglob("*.rs")
    assert [path for path in sources if "pyo3::impl_" in path.read_text()] == [fence]
    packages = tomllib.loads(read("Cargo.lock"))["package"]
    (version,) = [each["version"] for each in packages if each["name"] == "pyo3"]
    # On an upgrade, review pyo3's `impl_::trampoline` and this file, then change the version here.
    assert version.startswith("0.28.")
