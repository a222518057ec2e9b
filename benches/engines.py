"""Wrong answers and CPU time of vllm-lens and of ferrohook, in vLLM on a CPU.

Run by the interpreter of `make vllm`: `.venv-vllm/bin/python -m benches.engines`. Each plug-in has
its own process. The reference is transformers' answer to the single request, hooked by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benches.children import Child, answer
from benches.engine_rows import HEADS, SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(__file__).parent.parent
LENS = ROOT / "target" / "vllm" / "lens"
PLUGINS = {"ferrohook": "ferrohook", "vllm-lens": "activations"}
"""Their entry points."""
NEW = 12
ROUNDS = 7


def main(rounds: int = ROUNDS) -> None:
    """Prints the table."""
    names = [*PLUGINS] if install() else ["ferrohook"]
    path = os.pathsep.join(filter(None, [str(LENS), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        children = {}
        for name in names:
            env = {"VLLM_PLUGINS": PLUGINS[name], "PYTHONPATH": path}
            child = Child("benches.engines", name, str(Path(folder, name)), env=env)
            children[name] = stack.enter_context(child)
        report({name: child.receive() for name, child in children.items()})
        for requests in (16, 64):
            race(children, requests, rounds)


def install() -> bool:
    """Puts vllm-lens beside vLLM; it names another vLLM and Python, and runs with these."""
    if (LENS / "vllm_lens").exists():
        return True
    uv = [str(ROOT / ".venv/bin/uv"), "pip", "install", "--quiet", "--no-deps", f"--target={LENS}"]
    wanted = (["--python-version=3.12", "vllm-lens==1.3.0"], ["cloudpickle", "zstandard"])
    for each in wanted:
        ran = subprocess.run(  # noqa: S603 (packages by name)
            [*uv, f"--python={sys.executable}", *each], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            print(f"SKIPPED vllm-lens: {ran.stderr.strip()}")
            return False
    return True


def report(wrong: dict[str, dict[str, list[int]]]) -> None:
    """Prints the wrong answers."""
    print(f"| wrong answers | {' | '.join(wrong)} |")
    print(f"| --- {'| ---: ' * len(wrong)}|")
    for row in next(iter(wrong.values())):
        cells = (f"{found[row][0]} of {found[row][1]}" for found in wrong.values())
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


def race(children: dict[str, Child], requests: int, rounds: int) -> None:
    """Prints CPU times of all requests steered in all layers, rounds of both by turns."""
    spent: dict[str, list[float]] = {name: [] for name in children}
    for _ in range(rounds + 1):
        for name, child in children.items():
            spent[name].append(child.ask(str(requests)))
    shown = {name: found[1:] for name, found in spent.items()}  # the first is a warm-up
    for name, found in shown.items():
        print(
            f"{requests} requests steered in all layers, {name}: {statistics.median(found):.2f} s"
        )
    if len(shown) > 1:
        ratios = sorted(ours / theirs for ours, theirs in zip(*shown.values(), strict=True))
        low, *_, high = ratios
        print(
            f"  ours / theirs: {statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})", flush=True
        )


# --- the process of a plug-in --------------------------------------------------------------------


def serve_all(name: str, folder: Path) -> None:
    """Answers with the wrong answers of a plug-in, then with the CPU seconds of rounds."""
    import support.engines  # noqa: PLC0415 (tests' own)
    from support.vllm_engine import EOS, save_model, start, stop  # noqa: PLC0415

    support.engines.EOS = EOS
    model = save_model("llama", folder / "tiny")
    wrong: dict[str, tuple[int, int]] = {}

    def count(row: str, answers: Iterable[tuple[Any, Any]], new_tokens: int = NEW) -> None:
        pairs = [*answers]
        wrong[row] = sum(is_wrong(model, *pair, new_tokens) for pair in pairs), len(pairs)

    llm = start(folder / "tiny")
    count("unsteered, after a steered one with its prompt", after_steered(name, llm))
    count("a vector at one position", one_position(name, llm))
    stop(llm)
    llm = start(folder / "tiny", num_gpu_blocks_override=14)
    count("captures of requests that were preempted", preempted(name, llm), 60)
    stop(llm)
    answers = asyncio.run(prefixes(name, str(folder / "tiny")))
    count("unsteered `userN-chat` beside a steered `userN`", answers)
    answer(wrong)
    save_model("llama", folder / "small", **SIZES, **HEADS)
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 2**28}
    llm = start(folder / "small", **sizes)
    for line in sys.stdin:
        answer(measure(name, llm, int(line)))


def is_wrong(model: Any, job: Any, given: Any, new_tokens: int) -> bool:
    """True if an answer is not the one that the request gets alone."""
    try:
        job.check(model, given, new_tokens)
    except AssertionError:
        return True
    return False


def prompt_of(number: int, length: int = 70) -> list[int]:
    """A prompt that no other request has."""
    return [3 + (number * 31 + place * 7) % 500 for place in range(length)]


def vector_of(number: int, width: int = 64) -> torch.Tensor:
    """A vector that no other request has."""
    return torch.randn(width, generator=torch.Generator().manual_seed(number))


def extra_of(name: str, job: Any) -> dict[str, Any] | None:
    """Returns a request's `extra_args` for a plug-in."""
    if name == "ferrohook":
        return None if job.plan is None else {"ferrohook": job.plan.to_json()}
    extra: dict[str, Any] = {}
    if job.changes:
        rows = torch.stack([each.hook.vector for each in job.changes])
        at = job.changes[0].at
        extra["apply_steering_vectors"] = [
            importlib.import_module("vllm_lens").SteeringVector(
                activations=rows if at is None else rows[:, None],
                layer_indices=[each.layer for each in job.changes],
                position_indices=None if at is None else [at],
            )
        ]
    if job.kept:
        extra["output_residual_stream"] = [int(path.rpartition(".")[2]) for path in job.kept]
    return extra or None


def params_of(name: str, job: Any, new_tokens: int) -> Any:
    """Returns a request's parameters for a plug-in."""
    from support.vllm_engine import sampling  # noqa: PLC0415

    params = sampling(None, new_tokens)
    params.extra_args = extra_of(name, job)
    return params


def serve(name: str, llm: Any, jobs: Sequence[Any], new_tokens: int = NEW) -> list[Any]:
    """Serves requests at once; returns their answers."""
    from ferrohook.engines.vllm import activations  # noqa: PLC0415
    from support.vllm_engine import Answer  # noqa: PLC0415

    prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
    params = [params_of(name, job, new_tokens) for job in jobs]
    answers = []
    for job, output in zip(jobs, llm.generate(prompts, params, use_tqdm=False), strict=True):
        acts: Any = {}
        if job.kept and name == "ferrohook":
            acts = activations(llm, output).acts
        elif job.kept:
            acts = dict(zip(job.kept, output.activations["residual_stream"], strict=True))
        answers.append(Answer([*output.outputs[0].token_ids], acts))
    return answers


def steered(number: int, at: int | None = None) -> Any:
    """A request that is steered in one layer."""
    import ferrohook as fh  # noqa: PLC0415
    from support.engines import Change, Job  # noqa: PLC0415

    return Job(prompt_of(number), (Change(1, fh.Add(vector_of(number)), at),))


def after_steered(name: str, llm: Any) -> list[tuple[Any, Any]]:
    """Unsteered requests, each after a steered one of its prompt."""
    from support.engines import Job  # noqa: PLC0415

    found = []
    for number in range(16):
        serve(name, llm, [steered(number)])
        job = Job(prompt_of(number))
        found.append((job, *serve(name, llm, [job])))
    return found


def one_position(name: str, llm: Any) -> list[tuple[Any, Any]]:
    """Requests with a vector at the first position."""
    jobs = [steered(100 + number, at=0) for number in range(16)]
    return [*zip(jobs, serve(name, llm, jobs), strict=True)]


def preempted(name: str, llm: Any) -> list[tuple[Any, Any]]:
    """Captures of an engine whose blocks are for few requests."""
    from support.engines import Job  # noqa: PLC0415

    kept = ("model.layers.0", "model.layers.1", "model.layers.2")
    jobs = [Job(prompt_of(200 + number, 40), (), kept) for number in range(8)]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, times = scheduler._preempt_request, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        times.append(args)
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    answers = serve(name, llm, jobs, 60)
    if not times:
        msg = "no request was preempted"
        raise RuntimeError(msg)
    return [*zip(jobs, answers, strict=True)]


async def prefixes(name: str, folder: str) -> list[tuple[Any, Any]]:
    """Unsteered requests, each beside a steered one whose id theirs begins with."""
    from support.engines import Job  # noqa: PLC0415
    from support.vllm_engine import Answer  # noqa: PLC0415

    sizes = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 2**26}
    options: Any = {"dtype": "float32", "enforce_eager": True, "block_size": 32, **sizes}
    arguments = importlib.import_module("vllm").AsyncEngineArgs(model=folder, **options)
    module = importlib.import_module("vllm.v1.engine.async_llm")
    engine = module.AsyncLLM.from_engine_args(arguments)

    async def serve_one(request_id: str, job: Any) -> Any:
        params = params_of(name, job, NEW)
        output: Any = None
        prompt: Any = {"prompt_token_ids": job.prompt}
        async for output in engine.generate(prompt, params, request_id):  # noqa: B007 (the last)
            pass
        return Answer([*output.outputs[0].token_ids], {})

    try:
        found = []
        for number in range(8):
            plain = Job(prompt_of(300 + number))
            both = [serve_one(f"user{number}", steered(400 + number))]
            both.append(serve_one(f"user{number}-chat", plain))
            found.append((plain, (await asyncio.gather(*both))[1]))
        return found
    finally:
        engine.shutdown()


def measure(name: str, llm: Any, requests: int) -> float:
    """Returns the CPU seconds of requests that are each steered in all layers by their vector."""
    import ferrohook as fh  # noqa: PLC0415
    from support.engines import Change, Job  # noqa: PLC0415

    width, layers = SIZES["hidden_size"], SIZES["num_hidden_layers"]
    jobs = []
    for number in range(requests):
        hook = fh.Add(vector_of(number, width) * 0.1)
        changes = tuple(Change(layer, hook, None) for layer in range(layers))
        jobs.append(Job(prompt_of(number, 16), changes))
    params = [params_of(name, job, 48) for job in jobs]
    for each in params:
        each.ignore_eos = True
    prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
    run: Callable[..., Any] = llm.generate
    begin = time.process_time()
    run(prompts, params, use_tqdm=False)
    return time.process_time() - begin


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    if len(sys.argv) > 2:  # noqa: PLR2004 (a plug-in and a folder)
        serve_all(sys.argv[1], Path(sys.argv[2]))
    else:
        main(*map(int, sys.argv[1:]))
