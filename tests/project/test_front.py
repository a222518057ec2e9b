"""Names of the package, as completion and `help` list them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
from pathlib import Path

import pytest

import ferrohook as fh
from support.interpreters import assert_ends_well, run_fresh, run_with_torch

ROOT = Path(__file__).parents[2]
# In separate processes, as other tests look up lazy names.
LISTS = """
import ferrohook as fh
names = dir(fh)
assert not {"torch", "ferrohook.plans"} & set(sys.modules)
print(names == sorted(fh.__all__))
"""
COMPLETES = """
import rlcompleter
print(rlcompleter.Completer({"fh": fh}).complete("fh.capt", 0))
"""


def test_dir_lists_public_names_without_importing_them() -> None:
    assert_ends_well(run_fresh(LISTS), "True\n")
    assert dir(fh) == sorted(set(fh.__all__))


@pytest.mark.parametrize(
    "name", [name for name in fh.__all__ if inspect.ismodule(getattr(fh, name))]
)
def test_dir_of_a_public_module_lists_its_public_names(name: str) -> None:
    module = getattr(fh, name)
    assert dir(module) == sorted(module.__all__)


def test_each_line_of_the_stub_is_a_public_name() -> None:
    stub = ast.parse((ROOT / "python/ferrohook/__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert stub.body == imports
    names = [alias.asname for node in imports for alias in node.names]
    assert sorted(map(str, names)) == fh.__all__
    for node in imports:
        for alias in node.names:
            module = importlib.import_module(str(node.module))
            assert getattr(fh, alias.name) is getattr(module, alias.name)


def test_all_names_are_imported_without_the_packages_of_services() -> None:
    code = """
sys.modules["fastapi"] = None
from ferrohook import *
import inspect
print(*(name for name, _ in inspect.getmembers(fh) if name not in globals()))
"""
    assert_ends_well(run_with_torch(code), "\n")


def test_completion_finds_lazy_names() -> None:
    assert_ends_well(run_with_torch(COMPLETES), "fh.capture(\n")


def test_pictures_are_imported_on_first_use_without_matplotlib() -> None:
    code = """
assert "plot" in dir(fh) and "ferrohook.plot" not in sys.modules
print(fh.plot.__all__, {"matplotlib", "pandas"} & set(sys.modules))
"""
    names = "['attention', 'difference', 'logit_lens', 'norms', 'patching', 'steering']"
    assert_ends_well(run_with_torch(code), f"{names} set()\n")


def test_a_scope_shows_public_names_alone() -> None:
    names = {name for name in dir(fh.Scope) if not name.startswith("_")}
    assert names == {"activate", "close", "closed", "error", "expire", "fail", "failed", "wrap"}


def test_editors_find_lazy_names_and_their_types() -> None:
    jedi = pytest.importorskip("jedi")

    def completed(code: str) -> set[str]:
        return {each.name for each in jedi.Script(f"import ferrohook as fh\n{code}").complete()}

    assert set(fh.__all__) <= completed("fh.")
    assert {"norms", "steering"} <= completed("fh.plot.")
    assert {"to_pandas"} <= completed("fh.run(model, capture='x').acts.to_")
    assert {"to_pandas"} <= completed("with fh.capture(model) as acts:\n    acts.to_")


def test_help_describes_lazy_names() -> None:
    text = pydoc.plain(pydoc.render_doc(fh))
    for shown in ("capture(model", "register(model", "run(model", "class HookedModule", "collect("):
        assert shown in text
