"""`UserError`: a mistake of the user, printed in one line."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ferrohook.util.texts import missing_package

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class UserError(Exception):
    """A mistake of the user; its message states the fault and the remedy in one line."""


def to_line(text: str) -> str:
    """Joins the lines of a text."""
    return " ".join(text.split())


def describe(error: BaseException) -> str:
    """Formats a foreign exception: its class and the first line of its message."""
    first, *_ = [*filter(None, map(str.strip, str(error).splitlines())), ""]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextmanager
def failing_as(
    what: str, hint: str = "", *, own: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raises a foreign exception of a block as a `UserError`: what failed, why, and a hint.

    Args:
        what: what failed.
        hint: end of the message.
        own: exceptions that say themselves what failed; they pass.
    """
    try:
        yield
    except (UserError, *own):  # type: ignore[misc]  # (mypy has no unpacking here)
        raise
    except (Exception, SystemExit) as error:
        reasons = "; ".join([describe(error), *getattr(error, "__notes__", ())])
        msg = f"{what}: {reasons}{hint}"
        raise UserError(msg) from error


def check_writable(path: Path, suffix: str) -> None:
    """Validates an output path before the work starts.

    Raises:
        UserError: the path has another suffix, is a folder or lies in none.
    """
    if path.suffix != suffix:
        msg = f"{path} is written in the format {suffix}: give it that suffix"
        raise UserError(msg)
    if path.is_dir():
        msg = f"cannot write {path}: it is a folder, give the name of a file"
        raise UserError(msg)
    if not path.parent.is_dir():
        msg = f"cannot write {path}: there is no folder {path.parent}, make it first"
        raise UserError(msg)


def need(package: str) -> None:
    """Requires a package.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(missing_package("this", package))


@contextmanager
def warnings_as_lines(command: str) -> Iterator[None]:
    """Prints ferrohook's warnings of a block on stderr, in one line each."""
    from ferrohook.errors import NeverFiredWarning, UnverifiedWarning

    with warnings.catch_warnings(record=True) as caught:
        for category in (NeverFiredWarning, UnverifiedWarning):
            warnings.simplefilter("always", category)
        yield
    for warning in caught:
        print(f"ferrohook {command}: {to_line(str(warning.message))}", file=sys.stderr)
