"""The script that compares other projects' tests on plain and on instrumented models."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "script" / "compare_suites.py"
PROJECT = "pytest"  # any installed distribution

ALIKE = """
import torch
def test_forward():
    assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
"""
DIFFERING = """
import torch
def test_class():
    assert type(torch.nn.Linear(2, 2)) is torch.nn.Linear
"""
HANGING = """
import threading
def test_hangs():
    threading.Event().wait()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_suites", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_suites", module)  # for its dataclasses
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SOURCES", tmp_path)
    return module


def exit_code(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *suites: Any) -> int:
    monkeypatch.setattr(script, "SUITES", suites)
    monkeypatch.setattr(sys, "argv", ["compare_suites.py"])
    return script.main()


def suite(script: ModuleType, *tests: str, **options: Any) -> Any:
    made = script.Suite(PROJECT, "tests/test_*.py", **options)
    (made.folder / "tests").mkdir(parents=True)
    for number, test in enumerate(tests):
        (made.folder / "tests" / f"test_{number}.py").write_text(test)
    return made


def test_an_unknown_difference_fails_and_a_known_one_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"test_1::test_class": "the class is another"}
    in_process = ("-n", "0")  # each worker takes seconds to import torch
    different = suite(script, ALIKE, DIFFERING, DIFFERING, known=known, options=in_process)
    assert exit_code(script, monkeypatch, different) == 1
    printed = capsys.readouterr().out
    assert "| 3 | 3 | 1 | 2 | 2 |" in printed
    assert "1 known: the class is another" in printed
    assert "NEW tests.test_2::test_class" in printed
    assert "NEW tests.test_1" not in printed
    assert "0 equal, 1 different, 0 failed, 0 skipped" in printed


def test_a_suite_that_hangs_is_cut_off(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "LIMIT_S", 0.1)
    assert exit_code(script, monkeypatch, suite(script, HANGING)) == 1
    printed = capsys.readouterr().out
    assert f"FAILED {PROJECT}: cut off after 0.1 s" in printed
    assert "0 equal, 0 different, 1 failed, 0 skipped" in printed


def test_missing_tests_fail_unless_the_reason_is_known(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = script.Suite(PROJECT, "tests", untested="it has none")
    assert exit_code(script, monkeypatch, missing) == 1
    assert f"FAILED {PROJECT}: no tests in " in capsys.readouterr().out
    missing.folder.mkdir()
    assert exit_code(script, monkeypatch, missing) == 0
    printed = capsys.readouterr().out
    assert f"SKIPPED {PROJECT}: it has none" in printed
    assert "0 equal, 0 different, 0 failed, 1 skipped" in printed
    assert exit_code(script, monkeypatch, script.Suite(PROJECT, "tests")) == 1


def test_an_unknown_project_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_suites.py", "nowhere"])
    with pytest.raises(SystemExit, match="no such project: nowhere"):
        script.main()
