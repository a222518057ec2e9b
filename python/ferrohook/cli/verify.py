"""`ferrohook verify`: compares the files of a store with their checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ferrohook.cli.errors import UserError, need, warnings_as_lines

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
ferrohook verify acts
ferrohook verify acts --run train --repair
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("store", metavar="STORE", help="folder of a LocalStore")
    parser.add_argument("--run", help="name of a run; all runs if left out")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="remove damaged batches, so that collect makes them again",
    )


def run(options: argparse.Namespace) -> int:
    """Prints damaged batches and a count.

    Returns:
        1 if there are damaged batches, 0 once they are removed.
    """
    need("torch")
    import ferrohook as fh

    if not Path(options.store).is_dir():
        msg = f"there is no folder {options.store}"
        raise UserError(msg)
    opened = fh.data.LocalStore(options.store, read_only=not options.repair)
    with opened as store, warnings_as_lines("verify"):
        check = store.repair if options.repair else store.verify
        damaged = check(options.run, progress=True)
        runs = store.runs() if options.run is None else [options.run]
        batches = sum(len(store.batches(each)) for each in runs)
    if options.json:
        rows = [each._asdict() for each in damaged]
        print(json.dumps({"batches": batches, "damaged": rows, "removed": options.repair}))
    else:
        for name, number, problem in damaged:
            print(f"run {name}, batch {number}: {problem}")
        done = "damaged and removed" if options.repair else "damaged"
        print(f"{batches} batches, {len(damaged)} {done}")
    return 1 if damaged and not options.repair else 0
