"""Draws the pictures of docs/plotting.md: runs the code of the page and saves its axes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plotting.md"
CODE = re.compile(r"^```python\n(.*?)^```(?:\n\n!\[.*?\]\((.*?)\))?", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Writes the files beside the page."""
    mpl.use("svg")
    # The same file for the same picture, with its text as text.
    mpl.rcParams |= {"svg.hashsalt": PAGE.stem, "svg.fonttype": "none"}
    sys.path.insert(0, str(ROOT))
    names: dict[str, Any] = {}
    for code, picture in CODE.findall(PAGE.read_text()):
        exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102 (our own page)
        if picture:
            path = PAGE.with_name(picture)
            names["ax"].figure.savefig(path, metadata={"Date": None})
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
