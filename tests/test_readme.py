"""Code of the README and the documentation runs as printed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import DOCS, README, ROOT, blocks, run, same

PROCESSES = 2
WORDS = 500
PAGES = [page for page in (README, *sorted(DOCS.glob("*.md"))) if blocks(page)]
BY_TORCHRUN = [page for page in PAGES if "torchrun" in page.read_text()]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in BY_TORCHRUN], ids=lambda page: page.stem
)
@pytest.mark.filterwarnings("ignore")
def test_page_runs_and_prints_its_shown_output(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(page, monkeypatch, capsys, all_=page == README)


def test_a_wrong_output_is_seen() -> None:
    assert same("norm 1.234, hook (id 3)", "norm 1.235, hook (id 40)")
    for wrong in ("norm 1.237", "norm 1.23", "norm -1.234", "Norm 1.234", "norm 1.234 2"):
        assert not same("norm 1.234", wrong)
    assert not same("[0.0, 3]", "[0.1, 3]")
    assert not same("[0.0, 3]", "[0.0, 4]")


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
    pages = [README, ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]
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
