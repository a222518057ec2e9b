"""Code of the README and the documentation runs as printed."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from benches import __main__ as benches
from ferrohook.cli import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(
    r"^```(python|bash)(?: title=\"(.+)\")?\n(.*?)^```(?:\n\n```text\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
PROCESSES = 2
NEEDED = {
    "transformers": "transformers",
    "fastapi": "fastapi",
    "fh.plot": "matplotlib",
    "to_pandas": "pandas",
}
WORDS = 500
COMMANDS = {"ferrohook": main, "python -m benches": benches.main}


class Block(NamedTuple):
    """Code block of a page, and its output if the page shows it."""

    language: str
    title: str
    code: str
    printed: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found.groups(default="")) for found in BLOCK.finditer(page.read_text())]


PAGES = [page for page in (README, *sorted((ROOT / "docs").glob("*.md"))) if blocks(page)]
BY_TORCHRUN = [page for page in PAGES if "torchrun" in page.read_text()]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _skip_what_cannot_run(code: str) -> None:
    for words, package in NEEDED.items():
        if words in code:
            pytest.importorskip(package)
    if "torch.compile" in code:
        if sysconfig.get_config_var("Py_GIL_DISABLED") and sys.version_info < (3, 14):
            pytest.skip("torch.compile does not support free-threaded CPython 3.13")
        torch.compiler.reset()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in BY_TORCHRUN], ids=lambda page: page.stem
)
@pytest.mark.filterwarnings("ignore")
def test_page_runs_and_prints_its_shown_output(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Blocks run in order and share their names, as for a reader.
    names: dict[str, object] = {"__name__": page.stem}
    for language, title, code, printed in blocks(page):
        _skip_what_cannot_run(code)
        capsys.readouterr()
        if language == "bash":
            for line in filter(None, code.splitlines()):
                (command,) = (name for name in COMMANDS if line.startswith(f"{name} "))
                assert COMMANDS[command](shlex.split(line.removeprefix(command))) == 0, line
        elif title:
            Path(title).write_text(code)
            monkeypatch.syspath_prepend(Path.cwd())
            runpy.run_path(title, run_name="__main__")
        else:
            exec(compile(code, str(page), "exec"), names)
        if printed or page == README:
            assert capsys.readouterr().out == printed, code


@pytest.mark.parametrize("page", BY_TORCHRUN, ids=lambda page: page.stem)
def test_page_runs_on_several_processes(page: Path) -> None:
    # Skips C++ destructors: gloo's abort a process now and then, with plain PyTorch too.
    ending = "import os; os._exit(0)"
    Path("page.py").write_text("\n".join([*(block.code for block in blocks(page)), ending]))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{PROCESSES}"}
    running = [
        subprocess.Popen(
            [sys.executable, "page.py"],
            env={**os.environ, **torchrun, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
        )
        for rank in range(PROCESSES)
    ]
    try:
        assert [process.wait(timeout=110) for process in running] == PROCESSES * [0]
    finally:
        for process in running:
            process.kill()


def test_pages_with_code_are_found() -> None:
    assert README in PAGES
    assert len(PAGES) > len(BY_TORCHRUN) > 0


def test_the_front_page_is_short() -> None:
    # Code, outputs and links count; a word has a letter or a digit.
    words = [word for word in README.read_text().split() if any(map(str.isalnum, word))]
    assert len(words) <= WORDS


def test_the_front_page_shows_the_output_of_its_snippets() -> None:
    setup, *snippets = blocks(README)
    assert not setup.printed
    assert len(snippets) == 4
    for snippet in snippets:
        assert snippet.printed
        assert len(list(filter(None, snippet.code.splitlines()))) <= 5


def test_pages_promise_the_same_of_removal() -> None:
    pages = [README, ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    texts = {page.stem: " ".join(page.read_text().split()) for page in pages}
    promise = "is not started any more"
    assert {"README", "CHANGELOG", "contract", "threads"} <= {
        page for page, text in texts.items() if promise in text
    }
    assert not [page for page, text in texts.items() if "never fires after" in text]


def test_the_front_page_links_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
