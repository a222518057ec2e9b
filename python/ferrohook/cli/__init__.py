"""`ferrohook` on the command line.

Each command is a file with `add_options` (its options) and `run` (returns the exit code). Slow
imports are made by the command that needs them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

from ferrohook import __version__
from ferrohook.cli import collect, completion, doctor, inspect, quantities, tree, verify
from ferrohook.cli.errors import UserError, describe, need, to_line
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "tree": tree,
    "quantities": quantities,
    "collect": collect,
    "verify": verify,
    "inspect": inspect,
    "doctor": doctor,
}
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_OPTION = re.compile(r"unrecognized arguments: (--[\w-]+)")
USER_ERROR = 2
INTERRUPTED = 130


class Help(argparse.RawDescriptionHelpFormatter):
    """Help texts whose lines do not end inside an option."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line, with the closest word that it knows."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        word, known = "", []
        if wrong := _CHOICE.search(message):
            word, known = wrong[1], re.findall(r"[\w-]+", wrong[2])
        elif wrong := _OPTION.search(message):
            word, known = wrong[1], [each for own in self._actions for each in own.option_strings]
        if closest := get_close_matches(word, known, 1):
            message += f"; did you mean {closest[0]}?"
        self.exit(USER_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0; 1 if the command found a fault; 2 after a mistake of the user, printed in
        one line; 130 after Ctrl-C.
    """
    parser, commands = _parsers()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        # argparse would ask the outer parser, which does not know the command's options.
        commands.get(options.command, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help()
        return 0
    try:
        if options.command != "doctor":
            need("torch")
        return int(COMMANDS[options.command].run(options))
    except BrokenPipeError:
        # The reader closed the pipe: keep the interpreter from flushing into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except (Exception, SystemExit) as error:
        if options.traceback:
            raise
        message = str(error)
        if not isinstance(error, UserError | HookError):
            reasons = [describe(error), *getattr(error, "__notes__", ())]
            message = f"{'; '.join(reasons)} (--traceback shows where)"
        print(f"ferrohook {options.command}: {to_line(message)}", file=sys.stderr)
        return USER_ERROR


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """Returns the parser of the command line, and the parsers of its commands by name."""
    parser = Parser(prog="ferrohook", description="Hooks for PyTorch modules on a Rust core.")
    parser.add_argument("--version", action="version", version=f"ferrohook {__version__}")
    completion.add_option(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").partition(": ")[2].partition("\n")[0]
        examples = textwrap.indent(command.EXAMPLES.strip(), "  ")
        sub = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"examples:\n{examples}",
            formatter_class=Help,
        )
        command.add_options(sub)
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        sub.add_argument(
            "--traceback", action="store_true", help="show the Python traceback of an error"
        )
    return parser, dict(commands.choices)
