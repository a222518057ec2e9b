"""Draws the pictures of the pages: runs the code of each page that has some and saves its axes.

`python script/plots.py recipes/steer` draws the pictures of one page.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DARK = """
 <style>
  @media (prefers-color-scheme: dark) {
    #title text, [id^="matplotlib.axis"] text, [id^="legend"] text { fill: #e6edf3 }
    [style*="stroke: #000000"] { stroke: #e6edf3 !important }
    [style*="stroke: #808080"] { stroke: #9198a1 !important }
  }
 </style>"""
"""Second palette of a picture, for dark pages."""
CODE = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?(?:\n!\[.*?\]\((.*?)\))?",
    re.DOTALL | re.MULTILINE,
)


def main() -> int:
    """Writes the files beside their pages."""
    mpl.use("svg")
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    wanted = [DOCS / f"{name}.md" for name in sys.argv[1:]]
    # The start page has extracts of README, whose code is whole.
    wanted = wanted or [ROOT / "README.md", *sorted({*DOCS.rglob("*.md")} - {DOCS / "index.md"})]
    for page in wanted:
        blocks = CODE.findall(page.read_text())
        if any(picture for _, picture in blocks):
            draw(page, blocks)
    return 0


def draw(page: Path, blocks: list[tuple[str, str]]) -> None:
    """Runs the code of a page."""
    # The same file for the same picture, with its text as text.
    mpl.rcParams |= {"svg.hashsalt": page.stem, "svg.fonttype": "none"}
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code, picture in blocks:
            exec(compile(code, str(page), "exec"), names)  # noqa: S102 (our own page)
            if picture and "ax = " in code:
                names["ax"].title.set_gid("title")
                path = page.parent / picture
                names["ax"].figure.savefig(path, metadata={"Date": None}, transparent=True)
                path.write_text(path.read_text().replace("</metadata>", f"</metadata>{DARK}", 1))
                print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
