"""Type checkers take the pages' code as it is printed, in the environment of `make lint`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.pages import DOCS, ROOT, blocks

if TYPE_CHECKING:
    from pathlib import Path

PAGES = ("tutorial", "hooked-module")
WRONG = {"        linear.register_forward_hook(wrong)"}
"""Lines that a page shows to be refused."""
MYPY = (
    "--check-untyped-defs",
    "--ignore-missing-imports",
    # Lists that begin empty, as people write them.
    "--disable-error-code=var-annotated",
    "--disable-error-code=has-type",
)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for page in PAGES:
        taken = [each.code for each in blocks(DOCS / f"{page}.md") if each.language == "python"]
        (tmp_path / f"{page.replace('-', '_')}.py").write_text("\n".join(taken))
    return tmp_path


def refused(folder: Path, output: str, pattern: str) -> set[str]:
    """Lines of code that a checker refuses."""
    found = re.findall(pattern, output)
    return {(folder / name).read_text().splitlines()[int(line) - 1] for name, line in found}


def test_mypy_takes_the_pages(code: Path) -> None:
    pytest.importorskip("mypy")
    files = sorted(map(str, code.glob("*.py")))
    command = [sys.executable, "-m", "mypy", "--config-file=", *MYPY, *files]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert refused(code, done.stdout, r"(\w+\.py):(\d+): error") == WRONG, done.stdout


def test_pyright_takes_the_pages(code: Path) -> None:
    pytest.importorskip("pyright")
    settings = {"extraPaths": [str(ROOT / "python")], "typeCheckingMode": "basic"}
    (code / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(code)]
    done = subprocess.run(command, cwd=code, check=False, capture_output=True, text=True)
    assert refused(code, done.stdout, r"(\w+\.py):(\d+):\d+ - error") == WRONG, done.stdout
