"""Refusal of an old torch at import."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ferrohook.util import torch_version
from support.interpreters import run_fresh

ROOT = Path(__file__).parents[2]


def stand_in(folder: Path, version: str, *, installed: bool) -> str:
    """Makes a torch of this version, installed or only importable; returns code that finds it."""
    if installed:
        metadata = folder / f"torch-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    else:
        (folder / "torch.py").write_text(f"__version__ = {version!r}\n")
    found = f"sys.path.insert(0, {str(folder)!r})\n"
    return found if installed else f"{found}import torch\n"


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("version", ["2.6.0", "1.13.1+cpu", "2.10.0a0+git1234567"])
def test_an_old_torch_is_refused_in_one_sentence(
    tmp_path: Path, version: str, *, installed: bool
) -> None:
    done = run_fresh(f"{stand_in(tmp_path, version, installed=installed)}import ferrohook")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"ImportError: ferrohook needs torch \d\.\d+ or later, found {re.escape(version)}: "
        r"pip install --upgrade 'torch>=\d\.\d+'",
        done.stderr.splitlines()[-1],
    )


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    "version", ["2.13.0", "2.13.0.dev20260401+cu130", "2.100.0", "3.0", "main"]
)
def test_other_versions_are_imported_beside(
    tmp_path: Path, version: str, *, installed: bool
) -> None:
    code = stand_in(tmp_path, version, installed=installed)
    done = run_fresh(
        f"{code}import ferrohook; print(len(sys.modules) > 0, 'torch._C' in sys.modules)"
    )
    assert done.stdout == "True False\n", done.stderr


def test_the_oldest_torch_has_one_number() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newer, free_threaded = (
        ".".join(map(str, version))
        for version in (torch_version.OLDEST, torch_version.OLDEST_FREE_THREADED)
    )
    assert project["dependencies"][:2] == [
        f"torch>={newer}; python_version != '3.13'",
        f"torch>={free_threaded}; python_version == '3.13'",
    ]
    assert f"torch {newer} or later" in (ROOT / "docs" / "tutorial.md").read_text()
