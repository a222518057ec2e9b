"""`ferrohook` on the command line.

Each command is a file with `add_options` (its options) and `run` (returns the exit code). Slow
imports are made by the command that needs them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import textwrap
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

from ferrohook import __version__
from ferrohook.cli import (
    capture,
    collect,
    doctor,
    inspect,
    plot,
    quantities,
    steer,
    tree,
    verify,
)
from ferrohook.cli.errors import UserError, describe, to_line
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "tree": tree,
    "quantities": quantities,
    "capture": capture,
    "steer": steer,
    "collect": collect,
    "verify": verify,
    "inspect": inspect,
    "plot": plot,
    "doctor": doctor,
}
_WRONG = re.compile(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)")
USER_ERROR = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line, with the closest word that there is."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        for word in filter(None, itertools.chain(*_WRONG.findall(message))):
            known = COMMANDS if not word.startswith("-") else self.options()
            if closest := get_close_matches(word.partition("=")[0], known, 1):
                message += f"; did you mean {closest[0]}?"
        self.exit(USER_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")

    def options(self) -> list[str]:
        """Returns the options, those of commands included."""
        commands = [
            command
            for each in self._actions
            if isinstance(each.choices, dict)
            for command in each.choices.values()
        ]
        own = [name for each in self._actions for name in each.option_strings]
        return own + [name for command in commands for name in command.options()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0; 1 if the command found a fault; 2 after a mistake of the user, printed in
        one line; 130 after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return int(COMMANDS[options.command].run(options))
    except BrokenPipeError:
        # The reader closed the pipe: keep the interpreter from flushing into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except (UserError, HookError, OSError) as error:
        if options.traceback:
            raise
        # An OSError's own message names its file.
        message = describe(error) if isinstance(error, OSError) else str(error)
        print(f"ferrohook {options.command}: {to_line(message)}", file=sys.stderr)
        return USER_ERROR


def _parser() -> Parser:
    parser = Parser(prog="ferrohook", description="Hooks for PyTorch modules on a Rust core.")
    parser.add_argument("--version", action="version", version=f"ferrohook {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").partition(": ")[2].partition("\n")[0]
        examples = textwrap.indent(command.EXAMPLES.strip(), "  ")
        sub = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(sub)
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        sub.add_argument(
            "--traceback", action="store_true", help="show the Python traceback of a mistake"
        )
    return parser
