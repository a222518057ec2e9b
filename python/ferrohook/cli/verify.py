"""`ferrohook verify`: compares the files of a store with their checksums."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ferrohook.cli.errors import UserError, need, warnings_as_lines

if TYPE_CHECKING:
    import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("store", metavar="STORE", help="folder of a LocalStore")
    parser.add_argument("--run", help="name of a run; all runs if left out")


def run(options: argparse.Namespace) -> int:
    """Prints damaged batches and a count.

    Returns:
        1 if there are damaged batches.
    """
    need("torch")
    import ferrohook as fh

    if not Path(options.store).is_dir():
        msg = f"there is no folder {options.store}"
        raise UserError(msg)
    with fh.data.LocalStore(options.store, read_only=True) as store, warnings_as_lines("verify"):
        damaged = store.verify(options.run, progress=True)
        runs = store.runs() if options.run is None else [options.run]
        batches = sum(len(store.batches(each)) for each in runs)
    for name, number, problem in damaged:
        print(f"run {name}, batch {number}: {problem}")
    print(f"{batches} batches, {len(damaged)} damaged")
    return 1 if damaged else 0
