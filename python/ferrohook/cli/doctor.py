"""`ferrohook doctor`: prints versions and checks hooks, for a bug report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

from ferrohook import __version__
from ferrohook.cli.errors import describe

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
ferrohook doctor
ferrohook doctor --json > report.json
"""
OPTIONAL = (
    "safetensors",
    "rich",
    "tqdm",
    "matplotlib",
    "pandas",
    "transformers",
    "transformer-lens",
    "nnsight",
    "mi-crow",
)
COMPILERS = ("c++", "g++", "clang++", "cl")
WORKS = "works"


def add_options(_parser: argparse.ArgumentParser) -> None:
    """Adds no options."""


def run(options: argparse.Namespace) -> int:
    """Prints the findings.

    Returns:
        1 if hooks do not work here.
    """
    found, sound = examine()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            print(f"{name:<{width}}  {value}")
    return 0 if sound else 1


def examine() -> tuple[dict[str, str], bool]:
    """Returns the findings by name, and True if hooks work."""
    found = {
        "ferrohook": __version__,
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "free-threading": _free_threading(),
        "system": platform.platform(terse=True),
    }
    sound = importlib.util.find_spec("torch") is not None
    if sound:
        found |= _torch()
        sound = found["hooks"] == WORKS
    else:
        found["torch"] = "not installed: only ferrohook._core works without it"
    for package in OPTIONAL:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found, sound


def _free_threading() -> str:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "no, this Python has the GIL"
    on = getattr(sys, "_is_gil_enabled", lambda: True)()
    return "off: PYTHON_GIL or an extension turned the GIL on" if on else "yes"


def _torch() -> dict[str, str]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    return {
        "torch": str(torch.__version__),
        "GPU": f"{', '.join(gpus)} (CUDA {torch.version.cuda})" if gpus else "none found by torch",
        "hooks": _try_hook(compiled=False),
        "hooks in torch.compile": _try_hook(compiled=True),
        "C++ compiler": compiler or "none on the PATH, but torch.compile needs one",
    }


def _add_one(_module: object, _args: object, output: Any) -> Any:
    return output + 1


def _try_hook(*, compiled: bool) -> str:
    """Runs a module with one hook; returns `WORKS` or the failure."""
    import torch
    from torch import nn

    import ferrohook as fh

    try:
        model: nn.Module = fh.HookedModule(nn.Identity())
        model.register_forward_hook(_add_one)
        if compiled:
            # The backend "eager": hooks matter only to tracing.
            model = torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[assignment]
        works = bool(model(torch.zeros(1, device="cpu")) == 1)
    except Exception as error:
        return f"failed: {describe(error)}"
    return WORKS if works else "failed: a hook did not fire"
