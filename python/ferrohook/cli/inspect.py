"""`ferrohook inspect`: lists the runs, layers and sizes of a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrohook.cli.errors import UserError, need

if TYPE_CHECKING:
    import argparse

    from ferrohook.data import LocalStore

EXAMPLES = """
ferrohook inspect acts
ferrohook inspect acts --run train --json
"""
HEADINGS = ("run", "layer", "tensor", "shape", "dtype", "batches")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a store."""
    parser.add_argument("store", metavar="STORE", help="folder of a LocalStore")
    parser.add_argument("--run", help="name of a run; all runs by default")


def run(options: argparse.Namespace) -> int:
    """Prints a line for each tensor of each layer, as the first complete batch has it."""
    need("safetensors")
    from ferrohook.util.tables import text_table

    with opened(options, read_only=True) as store:
        runs = store.runs() if options.run is None else [options.run]
        found = {name: _described(store, name) for name in runs}
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    lines = [
        (name, layer, tensor, str(tuple(each["shape"])), each["dtype"], f"{about['complete']:,}")
        for name, about in found.items()
        for layer, tensors in about["layers"].items()
        for tensor, each in tensors.items()
    ]
    print(text_table([HEADINGS, *lines], right="batches") if lines else "no complete batch")
    return 0


def opened(options: argparse.Namespace, *, read_only: bool) -> LocalStore:
    """Opens the store of a command.

    Raises:
        UserError: there is no such folder.
    """
    from ferrohook.data import LocalStore

    if not Path(options.store).is_dir():
        msg = f"the folder {options.store} does not exist"
        raise UserError(msg)
    return LocalStore(options.store, read_only=read_only)


def _described(store: LocalStore, run: str) -> dict[str, Any]:
    complete = store.completed(run)
    manifest = store.manifest(run) or {}
    layers = {
        layer: {
            name: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for name, tensor in store.get(run, complete[0], layer).items()
        }
        for layer in (store.layers(run, complete[0]) if complete else [])
    }
    return {
        "batches": len(store.batches(run)),
        "complete": len(complete),
        "layers": layers,
        "options": manifest.get("options", {}),
    }
