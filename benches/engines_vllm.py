"""CPU time of vLLM with plans, as ratios to the engine without ferrohook, in one process.

Run by the interpreter of `make vllm`: `.venv-vllm/bin/python -m benches.engines_vllm`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.children import Child, answer
from benches.engine_rows import (
    HEADS,
    MODEL,
    NEW,
    REQUESTS,
    ROUNDS,
    SIZES,
    Round,
    print_ratios,
    print_rows,
    requests_of,
    steering,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMITS = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 1280,
    "kv_cache_memory_bytes": 2**29,
}
SYSTEM = 1024
"""Tokens of a system prompt."""
COMPILED = ("no plans", "all steered in all layers", "the same, to the engine with no plans")
WRAPPED = ("_update_states", "_prepare_inputs", "_model_forward", "sample_tokens")


def main(rounds: int = ROUNDS, pairs: int = 5) -> None:
    """Prints the table."""
    from support.vllm_engine import save_model, start  # noqa: PLC0415 (tests' own)

    folder = Path(tempfile.mkdtemp())
    save_model("llama", folder, **SIZES, **HEADS, max_position_embeddings=LIMITS["max_model_len"])
    llm = start(folder, **LIMITS)
    print(f"{MODEL}; CPU time / without ferrohook")
    for requests in REQUESTS:
        print_rows(
            requests, rounds, lambda plans: measure(llm, plans), lambda run: without(llm, run)
        )
    print(f"CPU time to the first tokens behind a prompt of {SYSTEM} that is cached / no plans")
    print_first_tokens(llm, rounds)
    if pairs:
        print("compiled, by Dynamo without Inductor, to an engine without the operators")
        print_compiled(folder, pairs)


def print_first_tokens(llm: Any, rounds: int, requests: int = 16) -> None:
    """Prints ratios of the time until many requests of one system prompt have a token.

    Raises:
        RuntimeError: plans for the text change the first token, which the prompt alone tells.
    """
    import ferrohook as fh  # noqa: PLC0415

    everywhere = steering(requests)
    changes = [plan.entries[0] for plan in everywhere]
    of_texts = [fh.Plan(fh.on(it.what, it.hook, at="generated")) for it in changes]
    variants = {"steered in their texts": of_texts, "steered everywhere": everywhere}
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(1 + rounds):  # the first is a warm-up
        plain = first_tokens(llm, [None] * requests)
        for name, plans in variants.items():
            run = first_tokens(llm, plans)
            if plans is of_texts and run.texts != plain.texts:
                msg = "plans for texts change the first token"
                raise RuntimeError(msg)
            if number:
                ratios[name].append(run.seconds / plain.seconds)
    print_ratios(requests, ratios)


def first_tokens(llm: Any, plans: list[Any]) -> Round:
    """Measures the first tokens of requests of a system prompt that one without a plan has run."""
    system = [3 + place * 11 % 500 for place in range(SYSTEM)]
    llm.reset_prefix_cache()
    measure(llm, [None], system, 1)
    return measure(llm, plans, system, 1)


def print_compiled(folder: Path, pairs: int, rounds: int = 5) -> None:
    """Prints ratios of compiled engines with sites to ones without ferrohook, by turns.

    A process as a whole is up to a tenth faster or slower than its twin, so there are several
    pairs, and a ratio is the median of a pair's rounds. The last one is of one process.
    """
    env = {"VLLM_CPU_CI_ENV": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    module = "benches.engines_vllm"
    found: dict[int, list[list[float]]] = {requests: [] for requests in REQUESTS}
    for _ in range(pairs):
        with (
            Child(module, str(folder), env={**env, "VLLM_PLUGINS": "none"}) as plain,
            Child(module, str(folder), "sites", env={**env, "VLLM_PLUGINS": "ferrohook"}) as sites,
        ):
            for requests, of_pairs in found.items():
                of_pairs.append(compare_pair(plain, sites, requests, rounds))
    for requests, of_pairs in found.items():
        ratios = zip(COMPILED, zip(*of_pairs, strict=True), strict=True)
        print_ratios(requests, {name: [*column] for name, column in ratios})


def compare_pair(plain: Child, sites: Child, requests: int, rounds: int) -> list[float]:
    """Returns the medians of the ratios of `COMPILED`."""
    ratios = []
    for _ in range(1 + rounds):  # the first is a warm-up
        without = plain.ask(f"{requests} plain")
        idle, steered = (sites.ask(f"{requests} {kind}") for kind in ("plain", "steered"))
        ratios.append([idle / without, steered / without, steered / idle])
    return [statistics.median(column) for column in zip(*ratios[1:], strict=True)]


def serve_compiled(folder: Path, *, has_sites: bool) -> None:
    """Answers with the CPU seconds of a compiled engine's rounds."""
    from support.vllm_engine import start  # noqa: PLC0415 (tests' own)

    config = {"ferrohook": {"sites": "model.layers.*"}} if has_sites else {}
    llm = start(folder, enforce_eager=False, additional_config=config, **LIMITS)
    for line in sys.stdin:
        requests, kind = line.split()
        plans = steering(int(requests)) if kind == "steered" else [None] * int(requests)
        answer(measure(llm, plans).seconds)


def without(llm: Any, run: Callable[[], Round]) -> Round:
    """Runs with the runner as vLLM made it."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    taken = {name: vars(runner).pop(name) for name in WRAPPED}
    try:
        return run()
    finally:
        vars(runner).update(taken)


def measure(llm: Any, plans: list[Any], system: Sequence[int] = (), new_tokens: int = NEW) -> Round:
    """Measures the steps that serve requests with these plans, after a system prompt."""
    from ferrohook.engines.vllm import activations  # noqa: PLC0415
    from support.vllm_engine import sampling  # noqa: PLC0415

    engine = llm.llm_engine
    for number, (prompt, text) in enumerate(requests_of(plans)):
        params = sampling(text, new_tokens, ignore_eos=True)
        ids = {"prompt_token_ids": [*system, *prompt]}
        engine.add_request(f"{time.monotonic_ns()}-{number}", ids, params)
    begin = time.process_time()
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    spent = time.process_time() - begin
    finished.sort(key=lambda it: int(it.request_id.partition("-")[2].partition("-")[0]))
    for output, plan in zip(finished, plans, strict=True):
        if len(output.outputs[0].token_ids) != new_tokens:
            msg = f"{output.request_id} was cut short"
            raise RuntimeError(msg)
        if "keep" in repr(plan):
            activations(llm, output)
    return Round(spent, [[*output.outputs[0].token_ids] for output in finished])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    if len(sys.argv) > 1 and not sys.argv[1].isdigit():
        serve_compiled(Path(sys.argv[1]), has_sites="sites" in sys.argv)
    else:
        main(*map(int, sys.argv[1:]))
