"""Pages for people who come from other libraries: names that they look for."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_each_public_name_of_transformers_module_is_named() -> None:
    pytest.importorskip("transformers")
    spec = importlib.util.find_spec("transformers.utils.output_capturing")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    page = (DOCS / "migrating-from-transformers.md").read_text()
    assert "maybe_install_capturing_hooks" in names
    assert [name for name in names if name not in page] == []


@pytest.mark.parametrize(
    "name",
    ["TransformerBridge", "decompose_resid", "transformer_lens.patching", "get_act_name"],
)
def test_the_page_of_transformerlens_names_what_there_is_not(name: str) -> None:
    page = (DOCS / "migrating-from-transformerlens.md").read_text()
    assert name in page.partition("## Not included")[2].partition("\n## ")[0]


def test_no_page_and_no_error_installs_the_package_by_a_name_that_no_registry_has() -> None:
    root = DOCS.parent
    files = [root / "README.md", *DOCS.rglob("*.md"), *(root / "python").rglob("*.py")]
    texts = {file: file.read_text() for file in files}
    wrong = ("ferrohook[", "install ferrohook")
    found = {file.name for file, text in texts.items() if any(word in text for word in wrong)}
    assert found <= {"texts.py"}  # its comment says why not
