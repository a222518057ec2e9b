"""Tables of an engine's features on its page, against the tests of the engine."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]


def check_features(engine: str, tests: Mapping[str, str], refused: Mapping[str, str]) -> None:
    """Asserts that each row of a table is served or refused, and tested.

    Args:
        engine: as its page is named.
        tests: test of each row, as "file::function".
        refused: the features that the engine refuses by name.
    """
    page = (ROOT / "docs" / f"engines-{engine}.md").read_text()
    (_, _, table) = page.partition("\n## Features of ")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table.partition("\n## ")[0], re.MULTILINE)
    found = dict(rows[2:])  # after the head
    assert found.keys() == tests.keys()
    for name, state in found.items():
        file, _, function = tests[name].partition("::")
        tree = ast.parse((ROOT / "tests" / "engines" / f"{engine}_plugin" / file).read_text())
        assert function in {it.name for it in tree.body if isinstance(it, ast.FunctionDef)}, name
        assert state.partition(":")[0] in {"served", "refused"}, (name, state)
        if state == "refused":
            assert name in refused
