"""`--completion`: prints a shell's completion script, made by shtab from the parser."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ferrohook.util.texts import missing_package

if TYPE_CHECKING:
    from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
FILES = ("PATH", "INPUT", "MODEL")
"""Metavars of arguments that may name a file."""
FOLDERS = ("FOLDER", "STORE")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that prints a script."""
    parser.add_argument(
        "--completion",
        action=_Print,
        choices=SHELLS,
        help="print a shell completion script; needs shtab",
    )


class _Print(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        values: Any,
        _option: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(missing_package("--completion", "shtab", extra="completion"))
        for action in _actions(parser):
            if action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        print(shtab.complete(parser, values))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                yield from _actions(command)
