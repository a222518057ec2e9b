"""`ferrohook` on the command line.

Each command is a file with `add_options` (its options) and `run` (returns the exit code). Slow
imports are made by the command that needs them.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from ferrohook import __version__
from ferrohook.cli import capture, collect, doctor, quantities, steer, tree, verify
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
    "doctor": doctor,
}
USER_ERROR = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        self.exit(USER_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


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
        sub = commands.add_parser(name, help=about, description=about)
        command.add_options(sub)
        sub.add_argument(
            "--traceback", action="store_true", help="show the Python traceback of a mistake"
        )
    return parser
