"""`ferrohook tree`: shows the modules of a model, their hooks, shapes and parameters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ferrohook.cli import inputs, models
from ferrohook.cli.errors import UserError, describe, need

if TYPE_CHECKING:
    import argparse

    from torch import nn

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
    inputs.add_options(parser, required=False, purpose="shows shapes of outputs, and parameters: ")
    models.add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the tree."""
    need("rich")
    need("torch")

    from rich.console import Console

    import ferrohook as fh

    model = models.load(options.model, trust=options.trust)
    details = None if options.input is None else _details(model, options)
    shown = fh.summary(model, options.select, details=details)
    if sys.stdout.isatty():
        Console().print(shown)
    else:
        print(shown)  # lines stay whole
    return 0


def _details(model: nn.Module, options: argparse.Namespace) -> dict[str, str]:
    """Runs the model; returns the shapes of outputs and the number of parameters by module."""
    import torch

    import ferrohook as fh

    args, kwargs = inputs.read(options.input, options.model, model)
    models.move(model.eval(), options.device)
    args, kwargs = models.move((args, kwargs), options.device)
    detector = fh.detectors.ShapeDetector()
    hooks = fh.register(model, None, detector)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        msg = f"the model failed on this input: {describe(error)} (--traceback shows where)"
        raise UserError(msg) from error
    finally:
        hooks.remove()
    seen = {name: each.snapshot() for name, each in detector.modules.items()}
    details = {}
    for name, module in fh.select(model).items():
        shapes = [*map(str, sorted(seen[name]["shapes"]))] if name in seen else []
        if len(shapes) > MOST_SHAPES:
            shapes[MOST_SHAPES:] = [f"{len(shapes) - MOST_SHAPES} more"]
        count = sum(each.numel() for each in module.parameters())
        parameters = [f"{count:,} parameters"] if count else []
        details[name] = ", ".join([*shapes, *parameters])
    return details
