"""`ferrohook` on the command line.

A file for each command, which says what its options are (`add_options`) and does it (`run`, whose
result is the exit code). What takes long to import is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from ferrohook import __version__
from ferrohook.cli import capture, doctor, tree
from ferrohook.cli.mistakes import Mistake, in_one_line, told
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {"tree": tree, "capture": capture, "doctor": doctor}
MISTAKE = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Leaves with exit code 2."""
        self.exit(MISTAKE, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0; 1 where the command found a fault; 2 after a mistake of its user, told
        in one line; 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(COMMANDS[options.command].run(options))
    except BrokenPipeError:
        # Whoever read the output has seen enough; the interpreter is not to flush into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except (Mistake, HookError, OSError) as error:
        if options.traceback:
            raise
        # What the system says of a file names it.
        message = told(error) if isinstance(error, OSError) else str(error)
        print(f"ferrohook {options.command}: {in_one_line(message)}", file=sys.stderr)
        return MISTAKE


def _parser() -> Parser:
    parser = Parser(prog="ferrohook", description="Hooks for PyTorch modules on a Rust core.")
    parser.add_argument("--version", action="version", version=f"ferrohook {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").partition(": ")[2].partition("\n")[0]
        sub = commands.add_parser(name, help=about, description=about)
        command.add_options(sub)
        sub.add_argument(
            "--traceback", action="store_true", help="show where in Python a mistake was noticed"
        )
    return parser
