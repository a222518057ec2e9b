"""Processes of the systems, each in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benches.rivals import page
from benches.rivals.scenes import SCENES
from benches.rivals.systems import SYSTEMS

ROOT: Final = Path(__file__).parents[2]
ANSWER: Final = "answer "
_TOGETHER: Final = ".venv-rivals"
ENVIRONMENTS: Final = {
    "nnterp": (".venv-rivals-nnterp", ["nnterp", "nnsight<0.8", "numpy", "torch"]),
    "ferrohook": (".venv", []),
}
"""Environment of a system and its packages; the one of `make build` is there already."""
PACKAGES: Final = ["nnsight", "tdhook", "torch", "transformer-lens", "transformers"]
"""Of the environment of the others, in their newest releases."""
SECONDS: Final = 1_200
"""Time limit of a system."""


def environment_of(system: str) -> Path:
    """Returns the interpreter of a system's environment; makes the environment."""
    if system == "ferrohook":
        return Path(sys.executable)
    folder, packages = ENVIRONMENTS.get(system, (_TOGETHER, PACKAGES))
    python = ROOT / folder / "bin" / "python"
    # Written last, so that an environment that was cut off is made again.
    stamp = ROOT / folder / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(packages):
        print(f"{system}: installing {', '.join(packages)}", file=sys.stderr, flush=True)
        uv = ROOT / ".venv" / "bin" / "uv"
        for command in (
            ["venv", "--quiet", "--clear", "--python", sys.executable, folder],
            ["pip", "install", "--quiet", "--python", python, *packages],
        ):
            subprocess.run([uv, *command], cwd=ROOT, check=True)  # noqa: S603 (by name)
        stamp.write_text(" ".join(packages))
    return python


def play_all(scene: str | None) -> None:
    """Plays scenes with all systems; writes `docs/rivals.json` and its page.

    Args:
        scene: one; None or "all" for all.
    """
    known = page.read()
    for system in SYSTEMS:
        for found in play(system, scene or "all"):
            name = found.pop("scene")
            known["systems"][system] = found.pop("system")
            known["scenes"].setdefault(name, {})[system] = found
    known["scenes"] = {name: known["scenes"][name] for name in SCENES if name in known["scenes"]}
    page.JSON.write_text(json.dumps(known, indent=1) + "\n")
    page.write()


def play(system: str, scene: str) -> list[dict[str, Any]]:
    """Plays scenes with one system, in its environment."""
    python = environment_of(system)
    print(f"{system}: playing {scene}", file=sys.stderr, flush=True)
    command: list[Any] = [python, "-m", "benches.rivals", scene, system, "--json"]
    ran = subprocess.run(  # noqa: S603 (ours)
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith(ANSWER)]
    if ran.returncode:
        print(f"{system} ended with {ran.returncode} after {len(lines)} scenes", file=sys.stderr)
    return [json.loads(line.removeprefix(ANSWER)) for line in lines]
