"""`ferrohook tree`: shows the modules of a model and their hooks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ferrohook.cli import models
from ferrohook.cli.errors import need

if TYPE_CHECKING:
    import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    models.add_options(parser)
    parser.add_argument(
        "--select",
        metavar="PATTERN",
        nargs="+",
        default="**",
        help="names or globs of the modules to show, '*' for those at the top; all if left out",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the tree."""
    need("rich")
    need("torch")

    from rich.console import Console

    import ferrohook as fh

    shown = fh.summary(models.load(options.model, trust=options.trust), options.select)
    if sys.stdout.isatty():
        Console().print(shown)
    else:
        print(shown)  # lines stay whole
    return 0
