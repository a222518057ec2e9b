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


class UserError(Exception):
    """A mistake of the user; its message states the fault and the remedy in one line."""


def to_line(text: str) -> str:
    """Joins the lines of a text."""
    return " ".join(text.split())


def describe(error: BaseException) -> str:
    """Formats a foreign exception: its class and the first line of its message."""
    first, *_ = [*filter(None, map(str.strip, str(error).splitlines())), ""]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


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
