"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_there_is_code() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_block_runs(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})
