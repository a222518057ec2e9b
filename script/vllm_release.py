"""Lays the Python files of a release of vLLM over the CPU build of another.

The wheels for CPUs come later than the ones for GPUs. The compiled parts stay the build's.

    .venv/bin/python script/vllm_release.py 0.33.0 .venv-vllm-0.33.0
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "target" / "vllm"


def fetched(release: str) -> Path:
    """Returns the folder with the Python files of a release; downloads its wheel once."""
    folder = TARGET / release
    if folder.exists():
        return folder
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", scratch, f"vllm=={release}"], check=True)  # noqa: S603 (pip, of a release that the caller names)
        (wheel,) = Path(scratch).glob("*.whl")
        made = Path(scratch, "made")
        with zipfile.ZipFile(wheel) as files:
            names = [name for name in files.namelist() if name.startswith("vllm/")]
            files.extractall(made, [name for name in names if name.endswith(".py")])
        made.rename(folder)
    return folder


def lay(folder: Path, package: Path) -> int:
    """Replaces the Python files of a package by those in a folder; returns how many there are."""
    # Not written in place: other environments may have links to the same files.
    for old in package.rglob("*.py"):
        old.unlink()
    files = sorted(folder.rglob("*.py"))
    for file in files:
        place = package / file.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return len(files)


def main() -> None:
    """Lays the release that is the first argument over the environment that is the second."""
    release, environment = sys.argv[1:]
    (package,) = Path(environment).glob("lib/python*/site-packages/vllm")
    print(f"vllm {release}: {lay(fetched(release) / 'vllm', package):,} files laid over {package}")
    # vLLM looks for "cpu" in the version of its distribution.
    named = package.with_name(f"vllm-{release}+cpu.dist-info")
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Name: vllm\nVersion: {release}+cpu\n")


if __name__ == "__main__":
    main()
