"""The README runs as printed, is short, and promises what other pages do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from benches import figures
from benches.running import find_groups
from support.pages import DOCS, README, ROOT, blocks, run, same

if TYPE_CHECKING:
    from pathlib import Path

WORDS = 500


@pytest.mark.filterwarnings("ignore")
def test_the_front_page_prints_its_shown_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(README, monkeypatch, capsys, all_=True)


def test_a_wrong_output_is_seen() -> None:
    assert same("norm 1.234, hook (id 3)", "norm 1.235, hook (id 40)")
    for wrong in ("norm 1.237", "norm 1.23", "norm -1.234", "Norm 1.234", "norm 1.234 2"):
        assert not same("norm 1.234", wrong)
    assert not same("[0.0, 3]", "[0.1, 3]")
    assert not same("[0.0, 3]", "[0.0, 4]")


def test_the_front_page_is_short() -> None:
    # Code, outputs and links count; a word has a letter or a digit.
    words = [word for word in README.read_text().split() if any(map(str.isalnum, word))]
    assert len(words) <= WORDS


def test_the_front_page_begins_with_a_sentence_how_to_install_and_three_lines() -> None:
    title, sentence, install, *_ = README.read_text().split("\n\n")
    assert title == "# ferrohook"
    assert sentence.count(".") == sentence.count("nn.Module") + sentence.count("torch.compile") + 1
    assert install.startswith("```sh\npip install ")
    _setup, first, *snippets = blocks(README)
    assert len(first.code.splitlines()) == 3
    assert README.read_text().index("```\n\n![") < README.read_text().index("make demo")
    assert len(snippets) == 2
    for snippet in snippets:
        assert snippet.printed
        assert len(list(filter(None, snippet.code.splitlines()))) <= 5


def test_the_chart_has_one_base_six_bars_at_most_and_no_label_twice() -> None:
    rows = {str(row) for group in find_groups() for row in group.rows}
    assert len({*figures.FRONT.values()}) == len(figures.FRONT) <= 6
    assert {*figures.FRONT.values()} <= rows
    for row in figures.FRONT.values():
        _, base = row.split(" / ")
        assert "PyTorch" in base or base.startswith("nn.Module, ")
    texts = re.findall(r"<text[^>]*>([^<]*)", figures.CHART.read_text())
    labels = [text for text in texts if not text.endswith(" %")]
    assert len(labels) == len({*labels}) == len(figures.FRONT) + 2


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
