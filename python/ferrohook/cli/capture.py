"""`ferrohook capture`: runs a model on one input and saves activations of its modules."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrohook.cli import inputs, models
from ferrohook.cli.errors import UserError, check_writable, describe, need

if TYPE_CHECKING:
    import argparse

    from torch import nn

    from ferrohook import ActivationCache

DTYPES = ("float32", "float16", "bfloat16")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    models.add_options(parser)
    parser.add_argument(
        "--select",
        metavar="PATTERN",
        nargs="+",
        required=True,
        help="names or globs of the modules, as 'encoder.layer.*'",
    )
    inputs.add_options(parser)
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        required=True,
        help="a .safetensors file, for ferrohook.ActivationCache.load",
    )
    parser.add_argument(
        "--inputs", action="store_true", help="the modules' inputs, not their outputs"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to cast the activations to")
    parser.add_argument("--device", default="cpu", help="device of the model; cpu by default")


def run(options: argparse.Namespace) -> int:
    """Saves the activations and prints a summary."""
    check_writable(options.out, ".safetensors")
    need("torch")
    model = models.load(options.model, trust=options.trust)
    args, kwargs = inputs.read(options.input, options.model, model)

    acts = _captured(model, args, kwargs, options)
    if not acts:
        msg = "none of the selected modules ran, so there is nothing to save: select others"
        raise UserError(msg)
    acts.save(options.out)
    print(acts)
    return 0


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: argparse.Namespace
) -> ActivationCache:
    import torch

    import ferrohook as fh
    from ferrohook.tensors import map_tensors

    try:
        device = torch.device(options.device)
        model.to(device).eval()
        args, kwargs = map_tensors(lambda tensor: tensor.to(device), (args, kwargs))
    except (RuntimeError, AssertionError) as error:
        msg = f"cannot run the model on {options.device!r}: {describe(error)}"
        raise UserError(msg) from error
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    capture = fh.capture(model, options.select, inputs=options.inputs, device="cpu", dtype=dtype)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad(), capture as acts:
        warnings.simplefilter("always", fh.NeverFiredWarning)
        try:
            model(*args, **kwargs)
        except Exception as error:
            msg = f"the model failed on this input: {describe(error)} (--traceback shows where)"
            raise UserError(msg) from error
    for warning in caught:
        print(f"ferrohook capture: {warning.message}", file=sys.stderr)
    return acts
