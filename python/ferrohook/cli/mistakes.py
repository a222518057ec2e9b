"""What is wrong with what a user asked for, and how it is told."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Mistake(Exception):  # noqa: N818 (it is the user's, no error of ours)
    """Says in one line what is wrong and what to do."""


def in_one_line(text: str) -> str:
    """The same without line breaks."""
    return " ".join(text.split())


def told(error: BaseException) -> str:
    """Somebody else's exception: its class and the first line of what it says."""
    first, *_ = [*filter(None, map(str.strip, str(error).splitlines())), ""]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def check_writable(path: Path, suffix: str) -> None:
    """Refuses a path that cannot be written to, ahead of the work that goes into it.

    Raises:
        Mistake: it has another suffix, is a folder or lies in none.
    """
    if path.suffix != suffix:
        msg = f"{path} is to be written in the format {suffix}: give it that suffix"
        raise Mistake(msg)
    if path.is_dir():
        msg = f"cannot write {path}: it is a folder, give the name of a file"
        raise Mistake(msg)
    if not path.parent.is_dir():
        msg = f"cannot write {path}: there is no folder {path.parent}, make it first"
        raise Mistake(msg)


def need(package: str, *, extra: str | None = None) -> None:
    """Refuses to go on without a package.

    Raises:
        Mistake: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        wanted = package if extra is None else f"ferrohook[{extra}]"
        msg = f"this needs the package {package}, which is not installed: install {wanted}"
        raise Mistake(msg)
