"""Engines of vLLM on a CPU, and requests that arrive at random."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

import ferrohook as fh
from ferrohook.engines import vllm
from ferrohook.engines.gate_events import AnswerGates
from ferrohook.engines.wire import GATES, Captured
from ferrohook.gates.streaming import numbers_of
from support.quantity_plans import NEW, dictionaries
from support.serving import CONFIGS as CONFIGS
from support.serving import EOS as EOS
from support.serving import LAYERS as LAYERS
from support.serving import VOCABULARY as VOCABULARY
from support.serving import WIDTH as WIDTH
from support.serving import Answer as Answer
from support.serving import Arrivals
from support.serving import random_jobs as random_jobs
from support.serving import save_model as save_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from support.engines import Job

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@functools.cache
def patience() -> float:
    """Seconds within which a test ends, on a machine as fast and as busy as this one."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import vllm"], check=True, capture_output=True)
    return max(600.0, 60 * (time.monotonic() - begin))


def end_children(but: set[psutil.Process]) -> None:
    """Kills the processes that this one has started, but some."""
    children = {*psutil.Process().children(recursive=True)} - but
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs([*children], timeout=60)


def start(folder: Path, **options: Any) -> Any:
    """Starts an engine in this process; one that fails or takes too long leaves no process."""
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM  # noqa: PLC0415 (reads its settings as it is imported)

    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 2**26,
        "block_size": 32,
        # Of V2's kernels, which Triton's interpreter has no use for.
        "kernel_config": {"enable_jit_warmup": False},
    }
    if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
        # vLLM looks for kernels in the values of all modules; this one's has no attributes.
        ffi.lib._fntab["__dict__"] = {}
    before = {*psutil.Process().children(recursive=True)}
    try:
        return LLM(model=str(folder), **(defaults | options))
    except BaseException:
        end_children(before)
        raise


@contextlib.contextmanager
def scheduling_ahead() -> Iterator[None]:
    """Starts engines that schedule asynchronously, which vLLM does on GPUs only."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    check = CpuPlatform.check_and_update_config

    def checking(_platform: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(checking))
        yield


def start_compiled(folder: Path, **options: Any) -> Any:
    """Starts an engine that runs Dynamo's graph, without Inductor and a warm-up.

    Without oneDNN: on some processors the second compiled engine of a process computes other
    products with it, without ferrohook too.
    """
    custom_ops = importlib.import_module("vllm._custom_ops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_ops, "_supports_onednn", value=False)
        patch.setenv("VLLM_CPU_CI_ENV", "1")
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        return start(folder, enforce_eager=False, **options)


def stop(llm: Any) -> None:
    """Ends an engine of this process, so that another can start."""
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def serve_plans(
    llm: Any, asked: Sequence[tuple[list[int], str]]
) -> list[tuple[list[int], Mapping[str, torch.Tensor]]]:
    """Serves requests of `quantity_plans` at once; returns their texts and captures."""
    vllm.put_dictionaries(llm, dictionaries().values())
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    params = [sampling(plan, NEW, ignore_eos=True) for _, plan in asked]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [([*each.outputs[0].token_ids], vllm.activations(llm, each).acts) for each in outputs]


def sampling(plan: Any = None, new_tokens: int = 12, **changes: Any) -> Any:
    """Greedy parameters unless they have a temperature, with a plan."""
    from vllm import SamplingParams  # noqa: PLC0415

    if isinstance(plan, fh.Plan):
        plan = plan.to_json()
    extra = None if plan is None else {"ferrohook": plan}
    options = {"temperature": 0, "max_tokens": new_tokens, "extra_args": extra} | changes
    return SamplingParams(**options)


def texts_of(llm: Any, prompts: Any, params: Any, plan: fh.Plan | None = None) -> list[list[int]]:
    """Texts that an engine generates with a plan; each prompt has its own seed, if there is one."""
    asked = []
    for number in range(len(prompts)):
        own = params.clone()
        own.extra_args = None if plan is None else {"ferrohook": plan.to_json()}
        if own.seed is not None:
            own.seed += number
        asked.append(own)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, asked, use_tqdm=False)
    return [[*each.outputs[0].token_ids] for each in outputs]


def serve_at_once(
    llm: Any, plans: Mapping[str, Any], *, prompt: list[int], new_tokens: int = 12
) -> dict[str, Any]:
    """Serves requests of one prompt by their plans; returns the outputs by id."""
    engine = llm.llm_engine
    for name, plan in plans.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling(plan, new_tokens))
    finished: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        finished |= {it.request_id: it for it in engine.step() if it.finished}
    assert finished.keys() == plans.keys()
    return finished


def serve(
    llm: Any, jobs: Sequence[Job], seed: int, new_tokens: int = 12, aborted: float = 0.0
) -> dict[int, Answer]:
    """Sends requests between steps at random, cancels some; returns the answers by number.

    The values of gates are read along, as a stream does.
    """
    from ferrohook.engines.vllm import (  # noqa: PLC0415
        activations,
        drop_dictionaries,
        put_dictionaries,
    )
    from ferrohook.engines.vllm.requests import streams  # noqa: PLC0415

    dictionaries = {name: it for job in jobs for name, it in job.dictionaries.items()}
    put_dictionaries(llm, dictionaries.values())
    read = {f"stream-{number}": AnswerGates() for number, job in enumerate(jobs) if job.gated}
    streams.update(read)
    engine = llm.llm_engine
    arrivals = Arrivals(jobs, seed, aborted)
    running = arrivals.running
    answers = {}
    while arrivals.waiting or engine.has_unfinished_requests():
        arrived, cancelled = arrivals.step()
        for name, job in arrived.items():
            params = sampling(job.plan, new_tokens)
            if job.plan is not None:
                # By its number: one that is cancelled at once is not in `running` any more.
                params.extra_args[GATES] = f"stream-{name.rpartition('-')[2]}"
            engine.add_request(name, {"prompt_token_ids": job.prompt}, params)
        if cancelled is not None:
            engine.abort_request([cancelled])
        for output in engine.step():
            if not output.finished or output.request_id not in running:
                continue
            number = running.pop(output.request_id)
            (text,) = output.outputs
            captured = activations(llm, output) if jobs[number].captures else Captured({}, {})
            acts = captured.acts
            error = text.finish_reason if text.finish_reason == "error" else None
            answers[number] = Answer([*text.token_ids], acts, error)
            if "@gate.g" in acts:
                values = read[f"stream-{number}"].take(0)["g"]
                assert values["positions"] == captured.positions["@gate.g"].tolist()
                found = torch.tensor(numbers_of(values))
                torch.testing.assert_close(found, acts["@gate.g"], equal_nan=True)
    drop_dictionaries(llm, [*dictionaries])
    return answers


def state(llm: Any) -> dict[str, int]:
    """Returns the worker's numbers."""
    import json  # noqa: PLC0415

    from ferrohook.engines.vllm.calls import call  # noqa: PLC0415

    numbers: dict[str, int] = json.loads(call(llm, "state")[0])
    return numbers
