"""llms.txt has the whole API as it is, and is short."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from support.scripts import script

MOST = 300


def generator() -> Any:
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("httpx")
    return script("llms")


def test_the_file_is_what_the_script_writes_and_is_short() -> None:
    llms = generator()
    written = llms.FILE.read_text()
    assert written == llms.text(), "run `python script/llms.py`"
    assert len(written.splitlines()) <= MOST


def test_each_public_name_has_a_line() -> None:
    llms = generator()
    content = llms.FILE.read_text()
    for front in llms.FRONTS:
        module = importlib.import_module(f"ferrohook.{front}".removesuffix("."))
        _, _, section = content.partition(f"## {module.__name__}\n")
        section = section.partition("\n## ")[0]
        named = {name for name in module.__all__ if not name.startswith("__")}
        submodules = {name for name in named if hasattr(getattr(module, name), "__path__")}
        submodules |= {name for name in named if type(getattr(module, name)).__name__ == "module"}
        assert [name for name in named - submodules if name not in section] == []


def test_a_changed_signature_is_seen() -> None:
    llms = generator()

    def capture(model: object, *, other: int = 3) -> None:
        """Does something.

        More of it.
        """

    assert llms.described("capture", capture) == ["- capture(model, *, other=3): Does something."]
