"""The README runs as printed, is short, and promises what other pages do."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from benches import figures
from benches.rows import models
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
    assert same("norm 1.234, registered at a.py:3", "norm 1.235, registered at b.py:40")
    for wrong in ("norm 1.237", "norm 1.23", "norm -1.234", "Norm 1.234", "norm 1.234 2"):
        assert not same("norm 1.234", wrong)
    assert not same("[0.0, 3]", "[0.1, 3]")
    assert not same("[0.0, 3]", "[0.0, 4]")


def test_the_front_page_is_short() -> None:
    # Links count, code and outputs do not; a word has a letter or a digit.
    text = re.sub(r"^```.*?^```", "", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len([word for word in text.split() if any(map(str.isalnum, word))]) <= WORDS


def test_the_front_page_begins_with_a_sentence_how_to_install_and_three_lines() -> None:
    title, sentence, install, *_ = README.read_text().split("\n\n")
    assert title == "# ferrohook"
    assert sentence.count(".") == sentence.count("nn.Module") + sentence.count("torch.compile") + 1
    assert install.startswith("```sh\n")
    assert "\npip install '.[" in install
    _setup, look, change, module = blocks(README)
    assert len(look.code.splitlines()) == len(module.code.splitlines()) == 3
    assert README.read_text().index("```\n\n![") < README.read_text().index("make demo")
    plain, steered = change.printed.splitlines()
    assert plain != steered
    assert module.printed


@pytest.mark.parametrize("page", [README, DOCS / "tutorial.md"], ids=lambda page: page.stem)
def test_the_printed_install_lines_bring_each_import(page: Path) -> None:
    lines = re.findall(r"^pip install ([^#\n]*)", page.read_text(), re.MULTILINE)
    given = {name for line in lines for name in line.split() if not name.startswith("-")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {
        name for given_ in given if given_.strip("'").startswith(".") for name in extras(given_)
    }
    needs = [
        *project["dependencies"],
        *(each for name in asked for each in project["optional-dependencies"][name]),
    ]
    brought = {"ferrohook", *map(module_of, [*needs, *(given - {"."})])}
    imported = set()
    for block in blocks(page):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
        imported |= {*re.findall(r'find_spec\("(\w+)"\)', block.code)}
        if "fh.plot." in block.code or ".plot()" in block.code:
            imported.add("matplotlib")
        if "gguf_file" in block.code:
            imported |= {"accelerate", "gguf"}  # by transformers
    assert imported - brought - sys.stdlib_module_names == set()


def extras(requirement: str) -> list[str]:
    _, _, names = requirement.strip("'").partition("[")
    return [name for name in names.removesuffix("]").split(",") if name]


def module_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0].replace("-", "_")


def test_the_chart_has_one_base_six_bars_at_most_and_no_label_twice() -> None:
    rows = {str(row) for group in find_groups() for row in group.rows}
    drawn = {bar.row for bar in figures.FRONT.values()}
    assert len(drawn) == len(figures.FRONT) <= 6
    assert drawn <= rows
    for row in drawn:
        _, base = row.split(" / ")
        assert "PyTorch" in base or base.startswith("nn.Module, ")
    texts = re.findall(r"<text[^>]*>([^<]*)", figures.CHART.read_text())
    labels = [text for text in texts if not text.endswith(" µs")]
    assert len(labels) == len({*labels}) == len(figures.FRONT) + 3


def test_the_chart_divides_by_the_modules_that_a_forward_calls() -> None:
    pytest.importorskip("transformers")
    model, ids = models.llama()
    called = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: called.append(module))
    model(ids)
    assert len(called) == figures.LLAMA_MODULES
    assert figures.FRONT["48 layers steered"].calls == models.LAYERS


def test_pages_promise_the_same_of_removal() -> None:
    pages = [README, ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]
    texts = {page.stem: " ".join(page.read_text().split()) for page in pages}
    promise = "never starts again"
    assert {"README", "CHANGELOG", "contract", "threads"} <= {
        page for page, text in texts.items() if promise in text
    }
    assert not [page for page, text in texts.items() if "never fires after" in text]


def test_the_front_page_links_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
