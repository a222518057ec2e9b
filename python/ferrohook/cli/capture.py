"""`ferrohook capture`: runs a model on one input and saves activations of its modules."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrohook.cli import inputs, models, plans
from ferrohook.cli.errors import UserError, check_writable, describe, need, warnings_as_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    import torch
    from torch import nn

    from ferrohook import ActivationCache, Plan
    from ferrohook.plans.entries import KeepEntry
    from ferrohook.tables import Row

EXAMPLES = """
ferrohook capture nets:small --select 0 --input x.pt --out a.safetensors
ferrohook capture ./bert --plan p.json --input "A cat." --out a.safetensors
"""
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
    plans.add_options(parser, chosen)
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
    add_dtype(parser)
    models.add_device(parser)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the option for a dtype."""
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to cast the activations to")


def dtype_of(options: argparse.Namespace) -> torch.dtype | None:
    """Returns the dtype; None without `--dtype`."""
    import torch

    dtype: torch.dtype | None = options.dtype and getattr(torch, options.dtype)
    return dtype


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
    if options.json:
        rows = [
            {"name": row.name, "call": row.call, "part": row.part, **_about(row)}
            for row in acts.rows()
        ]
        print(json.dumps({"file": str(options.out), "activations": rows}))
    else:
        print(acts)
    return 0


def _about(row: Row) -> dict[str, Any]:
    return {"shape": row.shape, "dtype": row.dtype, "bytes": row.nbytes}


def _plan(options: argparse.Namespace) -> Plan | None:
    if options.plan is not None and (options.inputs or options.dtype is not None):
        msg = "--inputs and --dtype go with --select: a plan says both for each of its entries"
        raise UserError(msg)
    plan = plans.read(options)
    if plan is not None and not _kept(plan):
        msg = f"{options.plan} captures nothing: add an entry of the type keep"
        raise UserError(msg)
    return plan


def _kept(plan: Plan) -> list[KeepEntry]:
    from ferrohook.plans.entries import KeepEntry

    return [entry for entry in plan.entries if isinstance(entry, KeepEntry)]


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan | None,
    options: argparse.Namespace,
) -> ActivationCache:
    import torch

    import ferrohook as fh

    models.move(model.eval(), options.device)
    args, kwargs = models.move((args, kwargs), options.device)
    prepared = None if plan is None else plan.prepare(model)
    opened: Any = (
        fh.capture(
            model, options.select, inputs=options.inputs, device="cpu", dtype=dtype_of(options)
        )
        if prepared is None
        else prepared.open()
    )
    chosen = [options.select] if plan is None else [each.what for each in _kept(plan)]
    with (
        warnings_as_lines("capture"),
        torch.no_grad(),
        opened as entered,
        _progress(model, chosen),
    ):
        try:
            model(*args, **kwargs)
        except Exception as error:
            msg = f"the model failed on this input: {describe(error)} (--traceback shows where)"
            raise UserError(msg) from error
    acts: ActivationCache = entered if prepared is None else entered.acts
    return acts


@contextmanager
def _progress(model: nn.Module, chosen: list[Any]) -> Iterator[None]:
    """Shows a bar of the chosen modules that have run."""
    import ferrohook as fh
    from ferrohook.progress import progress_bar

    if not sys.stderr.isatty():
        yield
        return

    def count(_module: object, _args: object, _output: object) -> None:
        advance()

    with fh.scope() as scope:
        group = fh.register(model, None if None in chosen else chosen, count, scope=scope)
        with progress_bar("capture", len(group), "module") as advance:
            yield
