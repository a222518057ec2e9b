"""Plans for transformers' asynchronous batching on a GPU, whose steps overlap."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("transformers")

import ferrohook as fh
from support.engines import (
    WIDTH,
    Change,
    Job,
    attached_to,
    random_jobs,
    tiny_llama,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

NEW = 4
NUMBER = 6
WAIT = 100
LAYER = "model.layers.1"

pytestmark = pytest.mark.cuda


@pytest.fixture
def models() -> tuple[Any, Any]:
    """A model on the GPU, and the same one on the CPU."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(tiny_llama())
    on_gpu, on_cpu = made
    return on_gpu.cuda(), on_cpu


def answers(model: Any, prompts: Sequence[list[int]], plans: Sequence[Any]) -> list[Any]:
    """Outputs of all requests, with their activations on the CPU."""
    outputs: dict[str, Any] = {}
    with attached_to(model, NEW, use_async_batching=True) as attached:
        for number, (prompt, plan) in enumerate(zip(prompts, plans, strict=True)):
            attached.add_request(prompt, str(number), plan=plan)
        for _ in prompts:
            output = attached.get_result(timeout=WAIT)
            output.acts = {name: act.cpu() for name, act in output.acts.items()}
            outputs[output.request_id] = output
    return [outputs[str(number)] for number in range(len(prompts))]


def check(models: tuple[Any, Any], jobs: Sequence[Job]) -> None:
    on_gpu, on_cpu = models
    outputs = answers(on_gpu, [job.prompt for job in jobs], [job.plan for job in jobs])
    for job, output in zip(jobs, outputs, strict=True):
        job.check(on_cpu, output, NEW)


def test_each_request_is_answered_as_alone(models: tuple[Any, Any]) -> None:
    check(models, random_jobs(NUMBER, seed=3, longest=20))


def test_sites_serve_each_request(models: tuple[Any, Any]) -> None:
    vector = torch.linspace(-2, 2, WIDTH)
    jobs = [
        dataclasses.replace(
            job,
            changes=(Change(number % 3, fh.Add(vector * (1 + number % 3)), None),),
            kept=(f"model.layers.{number % 3}",) if number % 2 else (),
            python=None,
        )
        for number, job in enumerate(random_jobs(NUMBER, seed=5, longest=20))
    ]
    sizes: dict[str, Any] = {"max_requests": 16, "max_rows": 64, "dim": 1, "width": WIDTH}
    with fh.rows.sites(models[0], "model.layers.*", **sizes):
        check(models, jobs)


def test_non_finite_rows_fail_their_request_alone(models: tuple[Any, Any]) -> None:
    on_gpu, on_cpu = models
    hostile = fh.Plan(fh.on("model.layers.1.self_attn.k_proj", fh.Scale(3e38)))
    jobs = [Job(job.prompt) for job in random_jobs(NUMBER, seed=7, longest=20)]
    plans = [None if number % 3 else hostile for number in range(NUMBER)]
    outputs = answers(on_gpu, [job.prompt for job in jobs], plans)
    for number, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
        if number % 3:
            job.check(on_cpu, output, NEW)
        else:
            assert "keys or values of layer 1" in str(output.hook_error)
            assert not output.generated_tokens


def _raising(*_: Any) -> None:
    msg = "beyond the answer"
    raise ValueError(msg)


@pytest.mark.parametrize("hook", [fh.Scale(3e38), _raising], ids=["not finite", "raises"])
def test_a_row_beyond_the_answer_fails_no_request(models: tuple[Any, Any], hook: Any) -> None:
    # The last token of an answer is in flight as the answer is given out.
    on_gpu, on_cpu = models
    jobs = [Job(job.prompt, kept=(LAYER,)) for job in random_jobs(NUMBER, seed=7, longest=20)]
    plans = []
    for job in jobs:
        beyond = slice(len(job.prompt) + NEW - 1, None)
        plans.append(fh.Plan(fh.on(f"{LAYER}.self_attn.k_proj", hook, at=beyond), fh.keep(LAYER)))
    for job, output in zip(jobs, answers(on_gpu, [it.prompt for it in jobs], plans), strict=True):
        assert output.hook_error is None
        job.check(on_cpu, output, NEW)


def test_a_row_of_the_answer_fails_its_request(models: tuple[Any, Any]) -> None:
    on_gpu, _ = models
    prompts = [job.prompt for job in random_jobs(NUMBER, seed=7, longest=20)]
    plans = [fh.Plan(fh.on(LAYER, _raising, at=len(it) + NEW - 2)) for it in prompts]
    for output in answers(on_gpu, prompts, plans):
        assert "beyond the answer" in str(output.hook_error)
