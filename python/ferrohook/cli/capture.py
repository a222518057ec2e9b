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

    from ferrohook import ActivationCache, Plan

DTYPES = ("float32", "float16", "bfloat16")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    models.add_options(parser)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--select",
        metavar="PATTERN",
        nargs="+",
        help="names or globs of the modules, as 'encoder.layer.*'",
    )
    chosen.add_argument(
        "--plan", metavar="PATH", type=Path, help="a file of Plan.to_json, with what it changes"
    )
    parser.add_argument(
        "--tensors",
        metavar="PATH",
        type=Path,
        help="a .safetensors file with the tensors that the plan names",
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
    plan = _plan(options)
    model = models.load(options.model, trust=options.trust)
    args, kwargs = inputs.read(options.input, options.model, model)

    acts = _captured(model, args, kwargs, plan, options)
    if not acts:
        msg = "none of the selected modules ran, so there is nothing to save: select others"
        raise UserError(msg)
    acts.save(options.out)
    print(acts)
    return 0


def _plan(options: argparse.Namespace) -> Plan | None:
    path: Path | None = options.plan
    if path is None:
        if options.tensors is not None:
            msg = "--tensors has the tensors that a plan names: pass --plan too"
            raise UserError(msg)
        return None
    if options.inputs or options.dtype is not None:
        msg = "--inputs and --dtype go with --select: a plan says both for each of its entries"
        raise UserError(msg)
    if options.tensors is not None:
        need("safetensors")
    from ferrohook.plans import Plan
    from ferrohook.plans.entries import KeepEntry

    try:
        # Ctrl-C ends a regex that takes for ever.
        plan = Plan.from_json(path.read_bytes(), options.tensors, regex=True)
    except ValueError as error:
        msg = f"cannot read {path}: {error}"
        raise UserError(msg) from error
    if not any(isinstance(entry, KeepEntry) for entry in plan.entries):
        msg = f"{path} captures nothing: add an entry of the type keep"
        raise UserError(msg)
    return plan


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan | None,
    options: argparse.Namespace,
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
    prepared = None if plan is None else plan.prepare(model)
    opened: Any = (
        fh.capture(model, options.select, inputs=options.inputs, device="cpu", dtype=dtype)
        if prepared is None
        else prepared.open()
    )
    with warnings.catch_warnings(record=True) as caught, torch.no_grad(), opened as entered:
        warnings.simplefilter("always", fh.NeverFiredWarning)
        try:
            model(*args, **kwargs)
        except Exception as error:
            msg = f"the model failed on this input: {describe(error)} (--traceback shows where)"
            raise UserError(msg) from error
    for warning in caught:
        print(f"ferrohook capture: {warning.message}", file=sys.stderr)
    acts: ActivationCache = entered if prepared is None else entered.acts
    return acts
