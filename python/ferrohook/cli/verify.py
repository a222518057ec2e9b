"""`ferrohook verify`: compares the files of a store with their checksums."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ferrohook.cli import inspect
from ferrohook.util.texts import counted

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
ferrohook verify acts
ferrohook verify acts --run train --repair
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    inspect.add_options(parser)
    parser.add_argument(
        "--repair",
        action="store_true",
        help="remove damaged batches, so that collect creates them again",
    )


def run(options: argparse.Namespace) -> int:
    """Prints damaged batches and a count.

    Returns:
        1 if there are damaged batches, 0 once they are removed.
    """
    with inspect.opened(options, read_only=not options.repair) as store:
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
        print(f"{counted(batches, 'batch')}, {len(damaged)} {done}")
    return 1 if damaged and not options.repair else 0
