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
MOST_SHAPES = 3
"""Shapes that a line of the tree lists."""


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
    inputs.add_options(parser, "shows shapes of outputs, and parameters: ")


def run(options: argparse.Namespace) -> int:
    """Prints the tree."""
    import ferrohook as fh

    model = models.load(options)
    details = {} if options.input is None else _details(model, options)
    if options.json:
        print(json.dumps(_described(model, options, details), indent=1))
        return 0
    shown = fh.summary(model, options.select, details=details)
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


def _details(model: nn.Module, options: argparse.Namespace) -> dict[str, str]:
    """Runs the model; returns the shapes of outputs and the number of parameters by module."""
    import torch

    import ferrohook as fh
    from ferrohook.util.tensors import tensors_by_path

    args, kwargs = inputs.read(options.input, model.eval(), options)
    seen: dict[nn.Module, set[tuple[int, ...]]] = {}

    def note(module: nn.Module, _args: object, output: object) -> None:
        shapes = seen.setdefault(module, set())
        tensors = (tensor for _, tensor in tensors_by_path(output))
        shapes.update(tuple(each.shape) for each in tensors if not each.is_nested)

    hooks = fh.register(model, None, note)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        hooks.remove()
    details = {}
    for name, module in fh.select(model).items():
        shapes = [*map(str, sorted(seen.get(module, ())))]
        if len(shapes) > MOST_SHAPES:
            shapes[MOST_SHAPES:] = [f"{len(shapes) - MOST_SHAPES} more"]
        count = sum(each.numel() for each in module.parameters())
        parameters = [f"{count:,} parameters"] if count else []
        details[name] = ", ".join([*shapes, *parameters])
    return details
