"""Requests with unfetched captures: open plans, results and memory of an engine stay flat.

`python -m support.unfetched vllm --requests 20000` prints a line of JSON for each tenth, in the
environment of `make vllm`, `sglang` in the one of `make sglang`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import ferrohook as fh
from support.memory import resident
from support.serving import save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Serve = Callable[[list[list[int]]], dict[str, int]]

PLAN = fh.Plan(fh.keep("model.layers.*"))
NEW = 3
LENGTH = 12
AT_ONCE = 250
RESULTS_BYTES = 2**24


def vllm(folder: Path) -> Serve:
    """Starts vLLM in this process; returns what serves prompts and gives the worker's numbers."""
    from support.vllm_engine import sampling, start, state  # noqa: PLC0415 (imports vLLM)

    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    options = {"additional_config": {"ferrohook": {"results_bytes": RESULTS_BYTES}}}
    llm = start(folder, **limits, **options)

    def serve(prompts: list[list[int]]) -> dict[str, int]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(asked, sampling(PLAN, NEW, ignore_eos=True), use_tqdm=False)
        return state(llm)

    return serve


def sglang(folder: Path) -> Serve:
    """Starts a scheduler in this process, whose answers carry the captures."""
    from support.sglang_engine import Local, request  # noqa: PLC0415 (imports SGLang)

    limits = {"max_total_tokens": 8192, "max_running_requests": 64, "chunked_prefill_size": 2048}
    local = Local(folder, **limits)
    params = {"ignore_eos": True}

    def serve(prompts: list[list[int]]) -> dict[str, int]:
        asked = [
            request(f"{number}.", prompt, PLAN, NEW, params=params)
            for number, prompt in enumerate(prompts)
        ]
        answers = local.run([asked])
        assert all(len(each["tokens"]) == NEW for each in answers.values())
        local.sent.clear()
        return {"requests": len(local.worker.requests)}

    return serve


def prompts_of(requests: int) -> Iterator[list[list[int]]]:
    """Yields different prompts, the digits of a number, many at once."""
    for first in range(0, requests, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, requests))
        yield [[3 + number // 10**place % 10 for place in range(LENGTH)] for number in numbers]


def main() -> None:
    """Serves them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--requests", type=int, default=20_000)
    found = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    save_model("llama", folder)
    serve = {"vllm": vllm, "sglang": sglang}[found.engine](folder)
    served = 0
    for prompts in prompts_of(found.requests):
        numbers = serve(prompts)
        served += len(prompts)
        if served % (found.requests // 10) < AT_ONCE:
            line = {"served": served, **numbers, "resident_mib": resident() >> 20}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
