"""ARCHITECTURE.md: its rooms and its arrows from Rust to Python, checked against the sources."""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import inspect
import logging
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils._device import _device_constructors

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "python"
FRONT = "ferrohook"
NATIVE = f"{FRONT}._core"

Arrows = dict[str, set[str]]
"""Files used by each file, by module name."""


def rooms(root: str) -> list[str]:
    """Rooms below a folder, in the order of ARCHITECTURE.md: each imports only those before it."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    (table,) = re.findall(rf"^`{root}`[^\n]*:\n\n((?:\|[^\n]*\n)+)", page, flags=re.MULTILINE)
    listed = re.findall(r"^\| `([\w/]+)` \| [^|]*\w[^|]* \|$", table, flags=re.MULTILINE)
    assert len(listed) == table.count("\n") - len(["header", "rule"]), "a row without a sentence"
    return listed


def folders(root: Path, suffix: str) -> dict[str, list[Path]]:
    """Folders with sources below a root, by path, and the files and folders in each."""
    files = [path for path in root.rglob(f"*{suffix}") if path.is_file()]
    found: dict[str, list[Path]] = {}
    for path in files:
        for each in [path, *path.parents]:
            if each == root:
                break
            inside = found.setdefault(str(each.parent.relative_to(root)), [])
            if each not in inside:
                inside.append(each)
    return found


def find_cycle(arrows: Arrows) -> list[str]:
    """Files of one import cycle, or an empty list."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def wrong_arrows(arrows: Arrows, units: Mapping[str, str], order: Sequence[str]) -> list[str]:
    """Arrows to a room that comes after the user's own."""
    return [
        f"{user} -> {used}"
        for user, targets in arrows.items()
        for used in sorted(targets)
        if order.index(units[user]) < order.index(units[used])
    ]


def names_of_others() -> set[str]:
    """Names of torch's and Python's own objects."""
    known: list[object] = [torch, torch.Tensor, torch.nn.Module(), torch.autograd, dict, slice]
    # Methods of nested tensors.
    known += [torch.nested.as_nested_tensor([torch.ones(1, 1)], layout=torch.jagged)]
    known += [functools, builtins, BaseException, logging.Logger, collections.namedtuple("N", "")]  # noqa: PYI024 (its methods)
    return {name for each in known for name in dir(each)}


# --- Python --------------------------------------------------------------------------------------


def python_sources() -> dict[str, str]:
    """Sources of the package by module name; a stub's belong to its module."""
    sources: dict[str, str] = {}
    for path in sorted((PYTHON / FRONT).rglob("*.py*")):
        if path.suffix in {".py", ".pyi"}:
            module = ".".join(path.relative_to(PYTHON).with_suffix("").parts)
            module = module.removesuffix(".__init__")
            sources[module] = sources.get(module, "") + path.read_text()
    return sources


def imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[tuple[str, str | None, str]]:
    """Imports of the package's modules: the module, the imported name, the local name.

    Imports inside functions and for type checkers count, and those by string.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if of_the_package(alias.name):
                    yield alias.name, None, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names if of_the_package(node.module) else ():
                module = f"{node.module}.{alias.name}"
                name = None if module in modules else alias.name
                yield module if name is None else str(node.module), name, alias.asname or alias.name
    for module in imported_by_string(tree, modules):
        yield module, None, module


def of_the_package(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == FRONT


def imported_by_string(tree: ast.AST, modules: Iterable[str]) -> set[str]:
    """Modules that `import_module` may mean; a name's values are strings of the file."""
    nodes = [*ast.walk(tree)]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            parts = name.values if isinstance(name, ast.JoinedStr) else [name]
            pattern = "".join(
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"([\w.]+)"
                for part in parts
            )
            for module in modules:
                match = re.fullmatch(pattern, module)
                if match and strings.issuperset(match.groups()):
                    found.add(module)
    return found


def python_arrows() -> Arrows:
    sources = python_sources()
    return {
        user: {used for used, *_ in imported(ast.parse(source), sources)} - {user}
        for user, source in sources.items()
    }


def python_unit(module: str) -> str:
    """Room of a module: a folder with all in it, or a file beside the front."""
    return module.split(".")[1] if "." in module else module


def private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__")


def private_members(tree: ast.AST) -> set[str]:
    """Private names that the classes and functions of a file have."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if private(name)}


def folder(module: str) -> str:
    """A folder below the package, whose files may share private members; else the file itself."""
    return module.rpartition(".")[0] if module.count(".") > 1 else module


def shared_private_members(sources: Mapping[str, str]) -> list[str]:
    """Private members that a file uses of objects whose classes stand in another folder."""
    trees = {module: ast.parse(source) for module, source in sources.items() if module != NATIVE}
    owners: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for name in private_members(tree):
            owners.setdefault(name, set()).add(folder(module))
    native = private_members(ast.parse(sources[NATIVE]))
    foreign = names_of_others()
    return sorted(
        f"{module}: {node.attr}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) not in {"self", "cls"}
        and node.attr in owners.keys() - native - foreign
        and folder(module) not in owners[node.attr]
    )


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


def test_a_python_room_imports_only_those_before_it() -> None:
    arrows, listed = python_arrows(), rooms("python/ferrohook")
    units = {module: python_unit(module) for module in arrows}
    inside = folders(PYTHON / FRONT, ".py").keys() - {"."}
    assert sorted(listed) == sorted({*units.values(), *inside}), "rooms and ARCHITECTURE.md"
    assert wrong_arrows(arrows, units, listed) == []


@pytest.mark.parametrize(
    ("root", "suffix"),
    [
        ("python/ferrohook", ".py"),
        *((f"rust/{each}/src", ".rs") for each in ("core", "py", "statistics")),
    ],
)
def test_a_folder_has_two_to_fifteen_files(root: str, suffix: str) -> None:
    found = folders(ROOT / root, suffix)
    few = {folder for folder, inside in found.items() if len(inside) < 2}
    many = {
        folder: len(inside)
        for folder, inside in found.items()
        if sum(path.is_file() for path in inside) > 15
    }
    assert (few, many) == (set(), {})


def test_few_python_files_stand_at_the_root() -> None:
    files = {path.name for path in (PYTHON / FRONT).glob("*.py*") if path.suffix in {".py", ".pyi"}}
    public = {"__init__.py", "__init__.pyi", "errors.py", "typing.py"}
    assert files == {*public, "__main__.py", "_core.pyi"}


def test_no_room_takes_the_name_of_a_public_function() -> None:
    # Importing the room would set an attribute of the package, in the function's place.
    taken = [name for name in fh.__all__ if (PYTHON / FRONT / name).is_dir()]
    assert [name for name in taken if not inspect.ismodule(getattr(fh, name))] == []


def test_no_private_name_is_used_across_files() -> None:
    sources = python_sources()
    taken = {
        module: names
        for module, source in sources.items()
        if (names := imported_private_names(source, sources))
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


def test_no_private_member_is_used_across_folders() -> None:
    assert shared_private_members(python_sources()) == []


@pytest.mark.parametrize(
    ("user", "source", "found"),
    [
        ("ferrohook.b", "def f(x):\n    return x._a", ["ferrohook.b: _a"]),
        ("ferrohook.b", "class B(A):\n    def f(self):\n        self._a()", []),
        ("ferrohook.b", "class B:\n    _a = 1\n    def f(self, x):\n        x._a", []),
        ("ferrohook.b", "x._native, x._version, x.__a__", []),
        ("ferrohook.c.b", "x._c", []),
        ("ferrohook.b", "x._c", ["ferrohook.b: _c"]),
    ],
)
def test_private_members_of_others_are_found(user: str, source: str, found: list[str]) -> None:
    sources = {
        "ferrohook.a": "class A:\n    def _a(self): ...\n    def _native(self): ...",
        "ferrohook.c.a": "class C:\n    def __init__(self):\n        self._c = 1",
        NATIVE: "class N:\n    def _native(self): ...",
    }
    assert shared_private_members({**sources, user: source}) == found


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ('import_module("ferrohook.a")', ["ferrohook.a"]),
        ('importlib.import_module("torch.nn")', []),
        ('X = {"b"}\nimport_module(f"ferrohook.{x}")', ["ferrohook.b"]),
        ('X = "c.d"\nimport_module(f"{package}.{x}")', []),
    ],
)
def test_imports_by_string_are_found(source: str, module: list[str]) -> None:
    modules = {"ferrohook.a", "ferrohook.b", "ferrohook.c.d"}
    assert [used for used, *_ in imported(ast.parse(source), modules)] == module


def test_wrong_arrows_are_found() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert set(find_cycle(arrows)) == {"a", "b", "c"}
    assert find_cycle({"a": {"b"}, "b": set()}) == []
    units = {name: name for name in "abcd"}
    assert wrong_arrows({"a": {"b"}, "c": {"a", "b"}}, units, "abcd") == ["a -> b"]


# --- Rust ----------------------------------------------------------------------------------------

RUST = ROOT / "rust"
# Line by line: no string of ours has a path after `//`.
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
    """Each path that a file names: the root of it, and the segments; a list's items one by one."""
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
    """The files that each file of these sources uses; an unknown name is in the front."""
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


def test_a_rust_room_uses_only_those_before_it() -> None:
    arrows = rust_arrows({module: path.read_text() for module, path in rust_files().items()})
    listed = rooms("rust")
    units = {module: rust_unit(module) for module in arrows}
    inside = folders(RUST / "py/src", ".rs").keys() - {"."}
    assert find_cycle(arrows) == []
    assert sorted(listed) == sorted({*units.values(), *inside}), "rooms and ARCHITECTURE.md"
    assert wrong_arrows(arrows, units, listed) == []


# What Rust asks Python objects for by name, and the names in any file of the package.
ASKED = re.compile(
    r'(?:intern!\(\s*[\w.()]+,\s*|\b(?:get|set)attr\(\s*|\bcall_method[01]?\(\s*|"ferrohook\.[\w.]+",\s*)"(\w+)"'
)
NATIVE_NAMES = set(
    re.findall(r'pyo3\(name = "(\w+)"', "".join(p.read_text() for p in RUST.rglob("*.rs")))
)


def python_names() -> set[str]:
    """Names that the package's files define."""
    names: set[str] = set()
    for path in (PYTHON / FRONT).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def test_the_page_lists_what_rust_asks_of_python() -> None:
    sources = "".join(COMMENT.sub("", path.read_text()) for path in rust_files().values())
    page = (ROOT / "ARCHITECTURE.md").read_text()
    page = page[page.index("Arrows from Rust to Python") : page.index("## Invariants")]
    modules = set(re.findall(r'(?<!module = )"(ferrohook\.(?!_)[\w.]+)"', sources))
    assert modules == set(re.findall(r"^\| `(ferrohook\.[\w.]+)` \|", page, flags=re.MULTILINE))
    asked = {name for name in ASKED.findall(sources) if not name.startswith("__")}
    listed = set(re.findall(r"`(\w+)`", page))
    assert listed - asked == set(), "names that Rust does not ask for"
    missing = asked & python_names() - names_of_others() - NATIVE_NAMES - listed
    assert missing == set(), "names of the package that the page leaves out"


def test_a_class_name_is_defined_once() -> None:
    files: dict[str, set[str]] = {}
    for path in sorted((ROOT / "python").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    twice = {name: sorted(found) for name, found in files.items() if len(found) > 1}
    twice.pop("HookError")  # mi_crow's own class of that name is part of its interface
    assert not twice


def test_tensors_that_the_package_makes_are_on_a_named_device() -> None:
    makers = {each.__name__ for each in _device_constructors()}
    unnamed = [
        f"{module}:{call.lineno}"
        for module, source in python_sources().items()
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in {f"torch.{each}" for each in makers}
        and not {"device", None} & {each.arg for each in call.keywords}
    ]
    assert not unnamed, "torch.set_default_device would move them"


def test_what_is_taken_from_a_module_by_its_name_is_there() -> None:
    taken = re.compile(r'import_module\("(ferrohook[\w.]*)"\)\.(\w+)')
    sources = [path.read_text() for path in (ROOT / "python/ferrohook").rglob("*.py")]
    found = {match for source in sources for match in taken.findall(source)}
    assert found
    for module, name in found:
        path = ROOT / "python" / f"{module.replace('.', '/')}.py"
        names = [getattr(node, "name", "") for node in ast.parse(path.read_text()).body]
        assert name in names, f"{module} has no {name}"
