"""`ferrohook quantities`: finds the quantities of a model, and proves them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ferrohook.cli import inputs, models
from ferrohook.cli.errors import UserError, check_writable, need

if TYPE_CHECKING:
    import argparse

    from ferrohook import Quantities

EXAMPLES = """
ferrohook quantities ./llama
ferrohook quantities ./llama --out quantities.json
ferrohook quantities ./llama --check quantities.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    models.add_options(parser)
    inputs.add_options(parser, required=False, purpose="example, for models without input_ids: ")
    parser.add_argument(
        "--out", metavar="PATH", type=Path, help="a .json file for the table, for --check"
    )
    parser.add_argument(
        "--check",
        metavar="PATH",
        type=Path,
        help="a .json file of --out, to compare the model with",
    )
    models.add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    if options.out is not None:
        check_writable(options.out, ".json")
    need("torch")
    import ferrohook as fh

    former = None if options.check is None else _read(options.check)
    model = models.move(models.load(options.model, trust=options.trust), options.device)
    args, kwargs = (), {}
    if options.input is not None:
        read = inputs.read(options.input, options.model, model)
        args, kwargs = models.move(read, options.device)
    table = fh.quantities(model, *args, **kwargs)
    print(table.to_json() if options.json else table)
    if options.out is not None:
        options.out.write_text(table.to_json())
    if former is not None:
        former.verify(model, *args, **kwargs)
        if not options.json:
            print(f"all {len(former)} quantities of {options.check} are proved at their places")
    return 0


def _read(path: Path) -> Quantities:
    import ferrohook as fh

    try:
        return fh.Quantities.from_json(path.read_text())
    except ValueError as error:
        msg = f"{path}: {error}"
        raise UserError(msg) from error
