"""The code of the README and of the documentation runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [page for page in (ROOT / "docs").glob("*.md") if "```python" in page.read_text()]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = blocks(README)


def test_there_is_code() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_block_runs(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore")
def test_page_runs(page: Path) -> None:
    # One block after the other, as somebody would who reads it.
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        if "transformers" in block:
            pytest.importorskip("transformers")
        exec(compile(block, str(page), "exec"), names)


def test_there_are_pages() -> None:
    assert PAGES
