"""Engines of vLLM on a CPU, and requests that arrive at random."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
)

import ferrohook as fh
from support.engines import Change, Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WIDTH = 64
LAYERS = 4
VOCABULARY = 512
EOS = 1
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "moe": Qwen2MoeConfig}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def save_model(kind: str, folder: Path, **sizes: int) -> Any:
    """Saves a random model and a tokenizer of words w0, w1, ...; returns the model."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,  # heads of 32 are the least that vLLM has for a CPU
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "initializer_range": 0.2,  # logits that differ, so that a tie is no accident of rounding
    }
    if kind == "moe":
        settings |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        settings |= {"num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**(settings | sizes)))
    model.eval().requires_grad_(False).save_pretrained(folder)
    words = WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")  # noqa: S106 (no password)
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    named = {"unk_token": "w0", "eos_token": "w1", "pad_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return model


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
    }
    before = {*psutil.Process().children(recursive=True)}
    try:
        return LLM(model=str(folder), **(defaults | options))
    except BaseException:
        end_children(before)
        raise


def start_compiled(folder: Path, **options: Any) -> Any:
    """Starts an engine that runs Dynamo's graph, without Inductor and a warm-up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_CI_ENV", "1")
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        return start(folder, enforce_eager=False, **options)


def stop(llm: Any) -> None:
    """Ends an engine of this process, so that another can start."""
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def sampling(plan: Any = None, new_tokens: int = 12, **changes: Any) -> Any:
    """Greedy parameters, with a plan."""
    from vllm import SamplingParams  # noqa: PLC0415

    if isinstance(plan, fh.Plan):
        plan = plan.to_json()
    extra = None if plan is None else {"ferrohook": plan}
    return SamplingParams(temperature=0, max_tokens=new_tokens, extra_args=extra, **changes)


@dataclasses.dataclass
class Answer:
    """An answer as `Job.check` takes it."""

    generated_tokens: list[int]
    acts: dict[str, torch.Tensor]
    error: str | None = None
    hook_error: BaseException | None = None


def random_jobs(number: int, seed: int, longest: int = 60) -> list[Job]:
    """Requests of which a third have no plan; every other begins with one of three prefixes."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    generator = torch.Generator().manual_seed(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, most))]

    def change() -> Change:
        vector = torch.randn(WIDTH, generator=generator)
        hooks = [fh.Add(vector, scale=2.0), fh.Add(vector), fh.Scale(0.5), fh.Ablate(vector)]
        hooks.append(fh.Zero())
        at = rng.choice([None, None, "prompt", "generated", "last_prompt", 0, 3, slice(2, 9)])
        return Change(rng.randrange(LAYERS), rng.choice(hooks), at)

    prefixes = [tokens(longest) + tokens(longest) for _ in range(3)]
    plans = [tuple(change() for _ in range(rng.randint(1, 2))) for _ in range(4)]
    jobs = []
    for index in range(number):
        prompt = [*(rng.choice(prefixes) if index % 2 else []), *tokens(longest // 2)]
        if rng.random() < 1 / 3:
            jobs.append(Job(prompt))
            continue
        changes: tuple[Change, ...] = ()
        if rng.random() < 2 / 3:  # half of them a plan that others have too
            changes = rng.choice(plans) if rng.random() < 1 / 2 else (change(),)
        names = [*(f"model.layers.{layer}" for layer in range(LAYERS)), "model.embed_tokens"]
        names += ["model.layers.1.mlp", "model.norm"]
        kept = tuple(rng.sample(names, rng.randint(0 if changes else 1, 3)))
        jobs.append(Job(prompt, changes, kept))
    return jobs


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
    """Sends requests between steps at random, cancels some; returns the answers by number."""
    from ferrohook.engines.vllm import activations  # noqa: PLC0415

    rng = random.Random(seed)  # noqa: S311 (tests)
    engine = llm.llm_engine
    waiting = [*enumerate(jobs)]
    running: set[str] = set()
    answers = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3, 8]))):
            number, job = waiting.pop(0)
            # Ids that are prefixes of each other.
            name = "job" + "-1" * (number % 3) + f"-{number}"
            params = sampling(job.plan, new_tokens)
            engine.add_request(name, {"prompt_token_ids": job.prompt}, params)
            running.add(name)
        if running and rng.random() < aborted:
            name = rng.choice(sorted(running))
            engine.abort_request([name])
            running.discard(name)
        for output in engine.step():
            if not output.finished or output.request_id not in running:
                continue
            running.discard(output.request_id)
            number = int(output.request_id.rpartition("-")[2])
            (text,) = output.outputs
            kept = jobs[number].kept
            acts = activations(llm, output).acts if kept else {}
            error = text.finish_reason if text.finish_reason == "error" else None
            answers[number] = Answer([*text.token_ids], acts, error)
    return answers


def state(llm: Any) -> dict[str, int]:
    """Returns the worker's numbers."""
    import json  # noqa: PLC0415

    numbers: dict[str, int] = json.loads(llm.collective_rpc("ferrohook_state")[0])
    return numbers
