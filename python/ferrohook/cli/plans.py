"""Reads a plan from a file of `Plan.to_json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrohook.cli.errors import UserError, need

if TYPE_CHECKING:
    import argparse

    from ferrohook import Plan


def add_options(parser: argparse.ArgumentParser, others: Any) -> None:
    """Adds the options for a plan.

    Args:
        parser: parser of the command.
        others: group of options, of which one is required.
    """
    others.add_argument(
        "--plan", metavar="PATH", type=Path, help="a file of Plan.to_json, with what it changes"
    )
    parser.add_argument(
        "--tensors",
        metavar="PATH",
        type=Path,
        help="a .safetensors file with the tensors that the plan names",
    )


def read(options: argparse.Namespace) -> Plan | None:
    """Reads the plan; None without `--plan`.

    Raises:
        UserError: the file cannot be read, or there are tensors without a plan.
    """
    path: Path | None = options.plan
    if path is None:
        if options.tensors is not None:
            msg = "--tensors has the tensors that a plan names: pass --plan too"
            raise UserError(msg)
        return None
    if options.tensors is not None:
        need("safetensors")
    from ferrohook.plans import Plan

    try:
        # Ctrl-C ends a regex that takes for ever.
        return Plan.from_json(path.read_bytes(), options.tensors, regex=True)
    except ValueError as error:
        msg = f"cannot read {path}: {error}"
        raise UserError(msg) from error
