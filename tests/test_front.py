"""Names of the package, as completion and `help` list them."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import ferrohook as fh

# In a process of their own, as other tests look up lazy names.
LISTS = """
import sys, ferrohook as fh
names = dir(fh)
assert not {"torch", "ferrohook.points"} & set(sys.modules)
print(sorted(set(fh.__all__) - set(names)))
"""
COMPLETES = """
import rlcompleter, ferrohook as fh
print(rlcompleter.Completer({"fh": fh}).complete("fh.capt", 0))
"""


def printed(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True
    ).stdout.strip()


def test_dir_lists_public_names_without_importing_them() -> None:
    assert printed(LISTS) == "[]"
    assert dir(fh) == sorted(set(dir(fh)))


def test_completion_finds_lazy_names() -> None:
    assert printed(COMPLETES).startswith("fh.capture")


def test_pictures_are_imported_on_first_use_without_matplotlib() -> None:
    code = """
import sys, ferrohook as fh
assert "plot" in dir(fh) and "ferrohook.plot" not in sys.modules
print(fh.plot.__all__, {"matplotlib", "pandas"} & set(sys.modules))
"""
    names = "['difference', 'logit_lens', 'norms', 'patching', 'steering']"
    assert printed(code) == f"{names} set()"


def test_help_describes_lazy_names() -> None:
    text = pydoc.plain(pydoc.render_doc(fh))
    for shown in ("capture(model", "register(model", "run(model", "class HookedModule", "collect("):
        assert shown in text
