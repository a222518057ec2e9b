"""Names of the package, as completion and `help` list them."""

from __future__ import annotations

import pydoc
import rlcompleter
import subprocess
import sys

import ferrohook as fh

# In a process of its own, as other tests import the names that this one has not looked up yet.
FRESH = """
import sys, ferrohook as fh
names = dir(fh)
assert not {"torch", "ferrohook.points"} & set(sys.modules)
print(*set(fh.__all__) - set(names))
"""


def test_dir_lists_public_names_without_importing_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == ""
    assert dir(fh) == sorted(set(dir(fh)))


def test_completion_finds_lazy_names() -> None:
    completer = rlcompleter.Completer({"fh": fh})
    found = completer.complete("fh.capt", 0)
    assert found is not None
    assert found.startswith("fh.capture")


def test_help_describes_lazy_names() -> None:
    text = pydoc.plain(pydoc.render_doc(fh))
    for shown in ("capture(model", "register(model", "run(model", "class HookedModule", "collect("):
        assert shown in text
