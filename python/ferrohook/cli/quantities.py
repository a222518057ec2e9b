"""`ferrohook quantities`: finds the quantities of a model, and proves them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ferrohook.cli import inputs, models
from ferrohook.cli.errors import UserError

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
ferrohook quantities ./llama
ferrohook quantities ./llama --out quantities.json
ferrohook quantities ./llama --check quantities.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    models.add_options(parser)
    inputs.add_options(parser, "example, for models without input_ids: ")
    parser.add_argument(
        "--out", metavar="PATH", type=Path, help="write the table to a .json file, for --check"
    )
    parser.add_argument(
        "--check",
        metavar="PATH",
        type=Path,
        help="compare the model with a .json file written by --out",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    import ferrohook as fh

    if (out := options.out) is not None and (out.is_dir() or not out.parent.is_dir()):
        msg = f"cannot write {out}: pass a file name in an existing folder"
        raise UserError(msg)
    former = None if options.check is None else fh.Quantities.from_json(options.check.read_text())
    model = models.load(options)
    args, kwargs = ((), {}) if options.input is None else inputs.read(options.input, model, options)
    table = fh.quantities(model, *args, **kwargs)
    print(table.to_json() if options.json else table)
    if out is not None:
        out.write_text(table.to_json())
    if former is not None:
        former.verify(model, *args, **kwargs)
        if not options.json:
            print(f"all {len(former)} quantities of {options.check} are proved at the same places")
    return 0
