"""Rows a second that vLLM runs and stores, in one process: three ways by turns, and ratios.

Run by the interpreter of `make vllm`: `.venv-vllm/bin/python -m benches.engine_harvest`, with
`VLLM_CPU_OMP_THREADS_BIND=nobind`, so that the writing thread has a separate core. A folder
of a model may follow (default: a random Llama of 8 layers and width 1,024), then numbers of rounds
and of prompts.
"""

from __future__ import annotations

import importlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 2**28}
LAYERS = "model.layers.*"
LENGTH = 128


class Ways:
    """Ways of running prompts.

    Args:
        llm: the engine.
        folder: where stores are written.
        prompts: number of prompts.
    """

    def __init__(self, llm: Any, folder: Path, prompts: int) -> None:
        self._llm = llm
        self._number = prompts
        self._folder = folder
        self._seed = 0

    def _prompts(self) -> list[list[int]]:
        """Returns prompts that no cache has."""
        self._seed += 1
        rng = random.Random(self._seed)  # noqa: S311 (no secret)
        return [[rng.randrange(3, 500) for _ in range(LENGTH)] for _ in range(self._number)]

    def _generate(self, prompts: list[list[int]], plan: fh.Plan | None) -> list[Any]:
        from ferrohook.engines.vllm import extra_args  # noqa: PLC0415 (takes seconds)

        extra = None if plan is None else extra_args(plan)
        params = importlib.import_module("vllm").SamplingParams(
            max_tokens=1, temperature=0, extra_args=extra
        )
        inputs = [{"prompt_token_ids": each} for each in prompts]
        found: list[Any] = self._llm.generate(inputs, params, use_tqdm=False)
        return found

    def plain(self) -> float:
        """Runs prompts without plans, and writes nothing; returns seconds."""
        prompts = self._prompts()
        begin = time.monotonic()
        self._generate(prompts, None)
        return time.monotonic() - begin

    def client(self) -> float:
        """Fetches captures, which the client stores."""
        from ferrohook.engines.vllm import activations  # noqa: PLC0415

        prompts, plan = self._prompts(), fh.Plan(fh.keep(LAYERS))
        begin = time.monotonic()
        with fh.data.LocalStore(self._folder) as store:
            for start in range(0, self._number, 16):
                outputs = self._generate(prompts[start : start + 16], plan)
                for number, output in enumerate(outputs, start):
                    for name, rows in activations(self._llm, output).acts.items():
                        store.put("run", number, name, {"output": rows}, copy=False)
                    store.complete("run", number)
        return self._ended(begin)

    def worker(self) -> float:
        """Makes the worker store its captures."""
        prompts = self._prompts()
        begin = time.monotonic()
        with fh.data.LocalStore(self._folder) as store:
            fh.collect(self._llm, prompts, LAYERS, store, progress=False)
        return self._ended(begin)

    def _ended(self, begin: float) -> float:
        seconds = time.monotonic() - begin
        store = fh.data.LocalStore(self._folder, read_only=True)
        batches = store.completed("run")
        layer = store.layers("run", batches[0])[-1]
        rows = sum(len(store.get("run", each, layer)["output"]) for each in batches)
        if rows != self._number * LENGTH:
            msg = f"{rows} rows were stored, of {self._number * LENGTH}"
            raise RuntimeError(msg)
        shutil.rmtree(self._folder)
        return seconds


def main(model: str = "", rounds: int = 7, prompts: int = 96) -> None:
    """Prints the table."""
    from support.vllm_engine import save_model, start  # noqa: PLC0415 (tests' own)

    folder = Path(tempfile.mkdtemp())
    if not model:
        model = str(folder / "model")
        save_model("llama", Path(model), **SIZES, **HEADS)
    options = {"ferrohook": {"capture_bytes": 2**50, "results_bytes": 2**50}}
    llm = start(Path(model), **LIMITS, additional_config=options)
    ways = Ways(llm, folder / "store", prompts)
    sides: dict[str, Callable[[], float]] = {
        "no plans, nothing written": ways.plain,
        "fetched, and stored by the client": ways.client,
        "stored by the worker": ways.worker,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1 + rounds):  # the first is a warm-up
        for name, run in sides.items():
            took = run()
            if number:
                seconds[name].append(took)
    plain, client, worker = seconds.values()
    for name, each in seconds.items():
        rates = sorted(prompts * LENGTH / it for it in each)
        middle = statistics.median(rates)
        print(f"{name}: {middle:,.0f} rows/s ({rates[0]:,.0f} to {rates[-1]:,.0f})")
    for name, over in {"no plans": plain, "the client": client}.items():
        ratios = sorted(mine / other for mine, other in zip(worker, over, strict=True))
        middle = statistics.median(ratios)
        print(f"time of the worker / {name}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    shutil.rmtree(folder)


if __name__ == "__main__":
    of_model, *numbers = sys.argv[1:] or [""]
    main(of_model, *map(int, numbers))
