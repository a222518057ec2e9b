"""`ferrohook plot`: draws the norms of saved activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ferrohook.cli.errors import UserError, check_writable, need

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

EXAMPLES = """
ferrohook plot acts.safetensors --out acts.svg
ferrohook plot acts.safetensors --select 'layers.*' --out acts.png
"""
FORMATS = (".svg", ".png", ".pdf")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("file", metavar="FILE", help="activations that `ferrohook capture` saved")
    parser.add_argument(
        "--select", metavar="PATTERN", default="**", help="name or glob of the modules to draw"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help=f"picture: {', '.join(FORMATS)}"
    )


def run(options: argparse.Namespace) -> int:
    """Writes a heat map: a row for each module, a column for each position."""
    for package in ("torch", "safetensors", "matplotlib"):
        need(package)
    import matplotlib as mpl

    import ferrohook as fh

    if options.out.suffix not in FORMATS:
        msg = f"{options.out} is a picture: give it one of the suffixes {', '.join(FORMATS)}"
        raise UserError(msg)
    check_writable(options.out, options.out.suffix)
    if not Path(options.file).is_file():
        msg = f"there is no file {options.file}"
        raise UserError(msg)
    acts = fh.ActivationCache.load(options.file)
    mpl.use(options.out.suffix[1:] if options.out.suffix != ".png" else "agg")
    figure = cast("Figure", fh.plot.norms(acts, options.select).figure)
    figure.savefig(options.out, bbox_inches="tight")
    print(json.dumps({"picture": str(options.out)}) if options.json else options.out)
    return 0
