"""The script that counts the mutants of the sources that tests catch."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from support.scripts import ROOT, script

if TYPE_CHECKING:
    from pathlib import Path

mutants = script("mutants")
NAMES = [(f"file {number % 50}", number) for number in range(500)]

BEFORE = "def both(a, b):\n    return a and b\n"
AFTER = "def both(a, b):\n    return a or b\n"
MUTANT = mutants.between("product.py", BEFORE, AFTER)


def test_a_sample_is_a_function_of_seed_and_list() -> None:
    drawn = mutants.sample(NAMES, 100)
    assert drawn == mutants.sample(iter(NAMES), 100)
    assert len(set(drawn)) == 100
    assert drawn != mutants.sample(NAMES, 100, seed=mutants.SEED + 1)


def test_a_sample_changes_little_with_the_list() -> None:
    drawn = mutants.sample(NAMES, 100)
    without = mutants.sample([each for each in NAMES if each[1] != drawn[0]], 100)
    assert len(set(drawn).intersection(without)) >= 90


def test_parts_make_up_the_sample() -> None:
    drawn = [mutants.Mutant(f"rust/{name}/a.rs", 1, "", "") for name in "abcabcab"]
    parts = [mutants.chosen(drawn, f"{number}/3", []) for number in (1, 2, 3)]
    assert sorted(each for part in parts for each in part) == sorted(drawn)
    assert {each.file for each in mutants.chosen(drawn, "1/1", ["rust/b"])} == {"rust/b/a.rs"}


def test_each_source_has_a_room_and_each_room_tests() -> None:
    for room, folders in mutants.ROOMS.items():
        assert (ROOT / room).exists(), room
        assert all((ROOT / "tests" / each).is_dir() for each in folders), room
    sources = [*ROOT.glob("rust/*/src/**/*.rs"), ROOT / "python/ferrohook/names/select.py"]
    for source in sources:
        first, *rest = mutants.tests_of(str(source.relative_to(ROOT)), "auto", rest=True)
        assert rest, source
        crate = source.relative_to(ROOT).parts[1]
        assert first.command[0].endswith("cargo") == (crate in {"core", "statistics"}), source


def test_the_changes_of_a_python_source() -> None:
    pytest.importorskip("mutmut")
    source, changes = mutants.python_changes('x: int | None = f("text", 1)\n')
    texts = {source.deep_replace(*change).code for change in changes}
    assert "x: int | None = None\n" in texts
    assert 'x: int | None = f("text", 2)\n' in texts
    assert all(text.startswith("x: int | None = ") for text in texts)
    assert not any("XX" in text for text in texts)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one file instead of the worktree; nothing is built."""
    (tmp_path / "product.py").write_text(BEFORE)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm a"):
        mutants.output_of(["git", *command.split()], tree=tmp_path)
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    monkeypatch.setattr(mutants, "FOLDER", tmp_path / ".git")
    monkeypatch.setattr(mutants.Runner, "_build", lambda self: True)
    return tmp_path


PASSING = "from product import both; assert both(1, 1)"
FAILING = "from product import both; assert not both(0, 1)"
LOOPING = "from product import both\nwhile both(0, 1): pass"


@pytest.mark.parametrize(
    ("codes", "rest", "outcome"),
    [
        ([PASSING], False, ("open", "")),
        ([PASSING, PASSING], True, ("survived", "")),
        ([PASSING, FAILING], True, ("caught", "tests 1")),
        ([LOOPING, PASSING], True, ("timeout", "tests 0")),
    ],
)
def test_what_becomes_of_a_mutant(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: list[str],
    rest: bool,
    outcome: tuple[str, str],
) -> None:
    tests = [
        mutants.Tests(f"tests {number}", [sys.executable, "-c", code])
        for number, code in enumerate(codes)
    ]
    monkeypatch.setattr(mutants, "tests_of", lambda *_, **__: tests)
    if LOOPING in codes:
        monkeypatch.setattr(mutants, "LEAST", 1)
    baselines: dict[str, float] = {}
    found = mutants.Runner("0", baselines).result(MUTANT, rest=rest)
    assert found[:2] == outcome
    assert [*baselines] == [each.name for each in tests]
    assert (repository / "product.py").read_text() == BEFORE


def test_a_failure_without_a_mutant_is_none(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [mutants.Tests("failing", [sys.executable, "-c", "1 / 0"])]
    monkeypatch.setattr(mutants, "tests_of", lambda *_, **__: tests)
    with pytest.raises(RuntimeError, match="failing fails without a mutant"):
        mutants.Runner("0", {}).result(MUTANT, rest=False)


def test_the_score_of_a_folder_leaves_out_what_tells_nothing() -> None:
    outcomes = ["caught", "timeout", "caught", "survived", "open", "unbuildable", None]
    drawn = [mutants.Mutant("a/b.py", line, "", "") for line in range(len(outcomes))]
    results: dict[str, Any] = {
        mutant.key: mutants.Result(outcome)
        for mutant, outcome in zip(drawn, outcomes, strict=True)
        if outcome
    }
    counts = mutants.scores(drawn, results)
    assert counts == {"a": {"drawn": 7, "caught": 3, "survived": 1, "open": 1}}
    console = Console(file=io.StringIO(), width=100)
    console.print(mutants.table_of("abc1234", counts))
    assert "75%" in console.file.getvalue()  # type: ignore[attr-defined]
