"""`ferrohook collect`: runs a model over files of inputs and stores outputs of its modules."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrohook.cli import inputs, models
from ferrohook.cli.errors import UserError, warnings_as_lines
from ferrohook.util.texts import counted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import EllipsisType

    from torch import nn

    from ferrohook import Plan

EXAMPLES = """
ferrohook collect nets:small --select 0 2 --input x.pt --store acts
ferrohook collect ./bert --select 'encoder.layer.*' --input a.txt --store acts
"""
TEXTS = 32
"""Texts per batch."""
DTYPES = ("float32", "float16", "bfloat16")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    models.add_options(parser)
    parser.add_argument(
        "--select",
        metavar="PATTERN",
        nargs="+",
        required=True,
        help="names or globs of the modules, such as 'encoder.layer.*'",
    )
    parser.add_argument(
        "--input",
        metavar="PATH",
        nargs="+",
        type=Path,
        required=True,
        help=".safetensors or .pt files, one batch each; or, if the model is a folder with a "
        "tokenizer, .txt files with one text per line",
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        help=f"number of texts per batch; {TEXTS} by default",
    )
    parser.add_argument(
        "--store",
        metavar="FOLDER",
        required=True,
        help="folder of a LocalStore, created if missing",
    )
    parser.add_argument("--run", default="run", help="name of the run; 'run' by default")
    parser.add_argument(
        "--inputs", action="store_true", help="store the modules' inputs instead of their outputs"
    )
    parser.add_argument(
        "--output-index",
        metavar="KEY",
        type=_key,
        help="part of each output: an index into a tuple, a key, or the name of an attribute",
    )
    parser.add_argument(
        "--slice",
        metavar="INDEX",
        type=_index,
        help="part of each tensor, in Python's notation: '--slice=:,0' or '--slice=...,:16'",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to cast the activations to")
    parser.add_argument(
        "--mask",
        metavar="NAME",
        help="store only the vectors where this input is not 0, such as 'attention_mask'",
    )
    parser.add_argument(
        "--plan",
        metavar="PATH",
        type=Path,
        help="a file written by Plan.to_json; the activations are stored with its changes",
    )
    parser.add_argument(
        "--tensors",
        metavar="PATH",
        type=Path,
        help="a .safetensors file with the tensors that the plan names",
    )


def _key(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdecimal() else text


def _index(text: str) -> tuple[int | slice | EllipsisType, ...]:
    """Reads an index into a tensor, as Python writes it."""

    def read(part: str) -> int | slice | EllipsisType:
        if part.strip() == "...":
            return ...
        if ":" not in part:
            return int(part)
        return slice(*(int(bound) if bound.strip() else None for bound in part.split(":")))

    try:
        return tuple(map(read, text.split(",")))
    except (ValueError, TypeError):
        msg = (
            f"expected an index of ints, slices and '...', such as ':,0' or '...,:16', got {text!r}"
        )
        raise argparse.ArgumentTypeError(msg) from None


def run(options: argparse.Namespace) -> int:
    """Stores the outputs of the batches that the run lacks, and prints their number."""
    import torch

    import ferrohook as fh

    if options.batch_size is not None:
        if options.batch_size < 1:
            msg = f"--batch-size must be at least 1, got {options.batch_size}"
            raise UserError(msg)
        if all(path.suffix != ".txt" for path in options.input):
            msg = "--batch-size only works with .txt files: a file of tensors is one batch"
            raise UserError(msg)
    plan = _plan(options)
    model = models.load(options).eval()
    batches = _Batches(model, options)
    with fh.data.LocalStore(options.store) as store, warnings_as_lines("collect"):
        done = fh.collect(
            model,
            batches,
            options.select,
            store,
            run=options.run,
            inputs=options.inputs,
            output_index=options.output_index,
            slice=options.slice,
            dtype=options.dtype and getattr(torch, options.dtype),
            mask=options.mask,
            plan=plan,
        )
    if options.json:
        print(json.dumps({"run": options.run, "stored": done.batches, "skipped": done.skipped}))
    else:
        stored = counted(done.batches, "batch")
        print(f"run {options.run!r}: {stored} stored, {done.skipped} already present")
    return 0


def _plan(options: argparse.Namespace) -> Plan | None:
    from ferrohook.plans import Plan

    if options.plan is not None:
        # Ctrl-C ends a regex that takes for ever.
        return Plan.from_json(options.plan.read_bytes(), options.tensors, regex=True)
    if options.tensors is not None:
        msg = "--tensors only works with --plan: it has the tensors that the plan names"
        raise UserError(msg)
    return None


class _Batches:
    """Inputs of the files, read as they are iterated."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        self._model = model
        self._options = options
        self._parts: list[Path | list[str]] = []
        size = options.batch_size or TEXTS
        for path in options.input:
            if path.suffix == ".txt":
                texts = [line for line in path.read_text().split("\n") if line.strip()]
                self._parts += [texts[start : start + size] for start in range(0, len(texts), size)]
            else:
                self._parts.append(path)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            source = str(part) if isinstance(part, Path) else part
            args, kwargs = inputs.read(source, self._model, self._options)
            yield kwargs or args
