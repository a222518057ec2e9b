"""The code of the guide to migrating runs as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
GUIDE = Path(__file__).parent.parent / "docs" / "migration.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def test_there_is_code() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
@pytest.mark.filterwarnings("ignore")
def test_block_runs(block: str) -> None:
    if "transformers" in block:
        pytest.importorskip("transformers")
    exec(compile(block, str(GUIDE), "exec"), {"__name__": "guide"})
