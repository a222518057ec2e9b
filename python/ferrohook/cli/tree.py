"""`ferrohook tree`: shows the modules of a model, their hooks, shapes and parameters."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from ferrohook.cli import inputs, models

if TYPE_CHECKING:
    import argparse

    from torch import nn

EXAMPLES = """
ferrohook tree nets:small --select '*'
ferrohook tree ./llama --select 'model.layers.*' --input "A cat sleeps."
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    models.add_options(parser)
    parser.add_argument(
        "--select",
        metavar="PATTERN",
        nargs="+",
        default="**",
        help="names or globs of the modules to show, '*' for the top level; all by default",
    )
    inputs.add_options(parser, "shows output shapes and parameters: ")


def run(options: argparse.Namespace) -> int:
    """Prints the tree."""
    import ferrohook as fh
    from ferrohook.show.summary import shapes_of

    model = models.load(options)
    args, kwargs = ((), {}) if options.input is None else inputs.read(options.input, model, options)
    model.eval()
    if options.json:
        details = shapes_of(model, args, kwargs) if args or kwargs else {}
        print(json.dumps(_described(model, options, details), indent=1))
        return 0
    shown = fh.summary(model, *args, also=options.select, **kwargs)
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(shown)
    else:
        print(shown)  # lines stay whole
    return 0


def _described(
    model: nn.Module, options: argparse.Namespace, details: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Returns class, details and hooks of the selected modules, and of those with hooks."""
    import ferrohook as fh
    from ferrohook.attach.hook_info import find_registry, hooks_of
    from ferrohook.util.texts import name_of

    chosen = fh.select(model, options.select)
    described = {}
    for name, module in fh.select(model).items():
        hooks = [
            {"phase": each.phase, "hook": name_of(each.hook), "calls": each.calls}
            for each in hooks_of(find_registry(module))
        ]
        if name in chosen or hooks:
            described[name] = {
                "class": module._get_name(),
                "details": details.get(name, ""),
                "hooks": hooks,
            }
    return described
