"""Layers of ARCHITECTURE.md, checked against the imports of the sources."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "python"
FRONT = "ferrohook"
NATIVE = f"{FRONT}._core"

Arrows = dict[str, set[str]]
"""Files used by each file, by module name."""


def layers(language: str) -> dict[str, int]:
    """Layer number of each unit (a file or a folder), from ARCHITECTURE.md."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    (block,) = re.findall(
        rf"^```layers-{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL
    )
    numbered = [
        (unit, number) for number, line in enumerate(block.splitlines()) for unit in line.split()
    ]
    found = dict(numbered)
    assert len(found) == len(numbered), "a unit stands in the layers twice"
    return found


def find_cycle(arrows: Arrows) -> list[str]:
    """Files of one import cycle, or an empty list."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def upward_arrows(arrows: Arrows, units: Mapping[str, str], levels: Mapping[str, int]) -> list[str]:
    """Arrows to another unit that do not point down."""
    return [
        f"{user} -> {used}"
        for user, targets in arrows.items()
        for used in sorted(targets)
        if units[user] != units[used] and levels[units[user]] <= levels[units[used]]
    ]


# --- Python --------------------------------------------------------------------------------------


def python_files() -> dict[str, Path]:
    """Files of the package by module name, including the extension's stub."""
    files = {}
    for path in (PYTHON / FRONT).rglob("*.py*"):
        if path.suffix in {".py", ".pyi"}:
            module = ".".join(path.relative_to(PYTHON).with_suffix("").parts)
            files[module.removesuffix(".__init__")] = path
    return files


def imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[tuple[str, str | None, str]]:
    """Imports of the package's modules: the module, the imported name, the local name.

    Imports inside functions and for type checkers count.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == FRONT:
                    yield alias.name, None, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            if node.module is not None and node.module.split(".")[0] == FRONT:
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    if module in modules:
                        yield module, None, alias.asname or alias.name
                    else:
                        yield node.module, alias.name, alias.asname or alias.name


def python_arrows() -> Arrows:
    files = python_files()
    return {
        user: {used for used, *_ in imported(ast.parse(path.read_text()), files)} - {user}
        for user, path in files.items()
    }


def python_unit(module: str) -> str:
    """Unit of a module: a file beside the front, or a whole folder."""
    return module.split(".")[1] if "." in module else module


def private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__")


def imported_private_names(source: str, modules: Iterable[str]) -> list[str]:
    """Names with a leading underscore that a file uses from other files, the extension excepted."""
    tree = ast.parse(source)
    taken, bound = [], {}
    for module, name, local in imported(tree, modules):
        if name is None:
            bound[local] = module
        elif private(name) and module != NATIVE:
            taken.append(f"{module}.{name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            module = bound.get(ast.unparse(node.value), NATIVE)
            if module != NATIVE:
                taken.append(f"{module}.{node.attr}")
    return taken


def test_python_has_no_import_cycle() -> None:
    assert find_cycle(python_arrows()) == []


def test_python_imports_only_lower_layers() -> None:
    arrows, levels = python_arrows(), layers("python")
    units = {module: python_unit(module) for module in arrows}
    assert set(units.values()) == set(levels), "the files and the layers of ARCHITECTURE.md"
    assert upward_arrows(arrows, units, levels) == []


def test_no_private_name_is_used_across_files() -> None:
    files = python_files()
    taken = {
        module: names
        for module, path in files.items()
        if (names := imported_private_names(path.read_text(), files))
    }
    assert taken == {}


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("from ferrohook.module import _describe", ["ferrohook.module._describe"]),
        ("def f():\n    from ferrohook.module import _a as b", ["ferrohook.module._a"]),
        ("from ferrohook import shards\nshards._library()", ["ferrohook.shards._library"]),
        ("import ferrohook.shards\nferrohook.shards._x", ["ferrohook.shards._x"]),
        ("import ferrohook.shards as s\ns._x", ["ferrohook.shards._x"]),
        ("from ferrohook._core import _x", []),
        ("from ferrohook import _core\n_core._x", []),
        ("from ferrohook import __version__", []),
        ("from ferrohook.module import describe as _describe", []),
        ("from torch.nn import _x", []),
    ],
)
def test_private_names_are_found(source: str, taken: list[str]) -> None:
    modules = {FRONT, f"{FRONT}.module", f"{FRONT}.shards", NATIVE}
    assert imported_private_names(source, modules) == taken


def test_wrong_arrows_are_found() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert set(find_cycle(arrows)) == {"a", "b", "c"}
    assert find_cycle({"a": {"b"}, "b": set()}) == []
    units = {name: name for name in "abcd"}
    found = upward_arrows({"a": {"b"}, "b": {"c"}}, units, {"a": 0, "b": 0, "c": 1})
    assert found == ["a -> b", "b -> c"]


# --- Rust ----------------------------------------------------------------------------------------

RUST = ROOT / "rust"
# Line by line: a string of ours has no `//` in it that a path stands behind.
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# They stand at the end, and their `super` is the file itself.
INLINE_TESTS = re.compile(r"#\[cfg\(test\)\]\s*mod \w+ \{.*", re.DOTALL)
PATH = re.compile(r"\b(?P<root>crate|super(?:::super)*|ferrohook_\w+)::(?P<path>[\w:]*)")


def rust_files() -> dict[str, Path]:
    """The files of all crates by their names: `py`, `py::call`, `py::recording::call`."""
    files = {}
    for source in RUST.glob("*/src"):
        for path in source.rglob("*.rs"):
            parts = [*path.relative_to(source).with_suffix("").parts]
            if parts[-1] in {"lib", "mod"}:
                parts.pop()
            files["::".join([source.parent.name, *parts])] = path
    return files


def rust_paths(source: str) -> Iterator[tuple[str, list[str]]]:
    """Each path that a file names: the root of it, and the segments; those of a list one by one."""
    source = INLINE_TESTS.sub("", COMMENT.sub("", source))
    for found in PATH.finditer(source):
        segments = [segment for segment in found["path"].split("::") if segment]
        if source[found.end()] == "{":
            for listed in in_braces(source, found.end()):
                yield found["root"], segments + listed
        else:
            yield found["root"], segments


def in_braces(source: str, begin: int) -> list[list[str]]:
    """The paths of a list such as `{a::B, c::{self, D}}`, which begins at its brace."""
    paths: list[list[str]] = []
    around: list[list[str]] = []
    path: list[str] = []
    for each in re.findall(r"\w+|[{},]", source[begin:]):
        if each == "{":
            around.append(path)
        elif each in {"}", ","}:
            paths.append(path)
            path = around.pop() if each == "}" else around[-1]
        else:
            path = [*path, each]
        if not around:
            break
    return paths


def rust_arrows(files: Mapping[str, str]) -> Arrows:
    """The files that each file of these sources uses; what is in none of them is in the front."""
    arrows: Arrows = {}
    for user, source in files.items():
        crate, *inside = user.split("::")
        used = arrows[user] = set()
        for root, segments in rust_paths(source):
            if root == "crate":
                path = [crate, *segments]
            elif root.startswith("super"):
                up = root.count("super")
                if up > len(inside):
                    continue  # of a module inside of the front
                path = [crate, *inside[: len(inside) - up], *segments]
            else:
                path = [root.removeprefix("ferrohook_"), *segments]
            while "::".join(path) not in files:
                path.pop()
            used.add("::".join(path))
        # A folder's `mod.rs` is what its files share.
        arrows[user] = {each for each in used if not f"{user}::".startswith(f"{each}::")}
    return arrows


def rust_unit(module: str) -> str:
    """A file of the binding or a folder with all in it, `lib` for its front; another crate."""
    crate, *inside = module.split("::")
    return crate if crate != "py" else inside[0] if inside else "lib"


@pytest.mark.parametrize(
    ("source", "arrows"),
    [
        ("use crate::a::B;", {"py::a"}),
        ("use crate::a;", {"py::a"}),
        ("use crate::a::b::{self, C};", {"py::a::b"}),
        ("use crate::{a::{b::D, E}, c};", {"py::a", "py::a::b", "py::c"}),
        ("let x = crate::c::f(1);", {"py::c"}),
        ("// use crate::c;\n/* use crate::a; */", set()),
        ("use ferrohook_core::{Phase, state::State};", {"core", "core::state"}),
        ("use super::c;\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}", {"py::c"}),
    ],
)
def test_paths_of_rust_are_found(source: str, arrows: set[str]) -> None:
    files = dict.fromkeys(["py", "py::a", "py::a::b", "py::c", "core", "core::state"], "")
    assert rust_arrows(files | {"py::user": source})["py::user"] == arrows


def test_rust_uses_what_stands_below_and_has_no_circle() -> None:
    arrows = rust_arrows({module: path.read_text() for module, path in rust_files().items()})
    levels = layers("rust")
    units = {module: rust_unit(module) for module in arrows}
    assert find_cycle(arrows) == []
    assert set(units.values()) == set(levels), "the files and the layers of ARCHITECTURE.md"
    assert upward_arrows(arrows, units, levels) == []


def test_rust_imports_the_modules_of_the_page() -> None:
    sources = "".join(path.read_text() for path in rust_files().values())
    imports = set(re.findall(r'(?<!module = )"(ferrohook\.(?!_)\w+)"', sources))
    page = (ROOT / "ARCHITECTURE.md").read_text()
    listed = set(re.findall(r"^\| `(ferrohook\.\w+)` \|", page, flags=re.MULTILINE))
    assert imports == listed
