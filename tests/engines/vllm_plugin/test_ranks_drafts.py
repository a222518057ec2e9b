"""vLLM on two ranks of a CPU, with speculative decoding: all run a request again, or none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import support.engines
from support.serving import wrong_answers
from support.speculation import (
    DraftCount,
    drafted_jobs,
    save_repeating_model,
    speculative_config,
)
from support.vllm_engine import EOS, scheduling_ahead, serve, start, state, stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEW = 24


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """An engine of two ranks that schedules ahead, and its model, which drafts for itself."""
    folder: Path = tmp_path_factory.mktemp("repeating")
    model = save_repeating_model(folder)
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch, scheduling_ahead():
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        llm = start(
            folder,
            tensor_parallel_size=2,
            speculative_config=speculative_config("draft_model", folder),
            num_gpu_blocks_override=11,
            max_num_batched_tokens=48,
        )
    yield llm, model
    stop(llm)


def spoil(wrapper: Any, *, rank: int) -> None:
    """Has the steps of one rank fail with drafts, every fifth time."""
    if wrapper.rpc_rank != rank:
        return
    worker = wrapper.ferrohook
    check, times = worker.check_rows, iter(range(10**9))

    def checking(*args: Any, **options: Any) -> None:
        check(*args, **options)
        for request, _span in worker._in_step:
            if request.drafts and next(times) % 5 == 0:
                worker._runs_again(request)

    worker.check_rows = checking


def forget(wrapper: Any) -> None:
    """Has only the rank that failed know that a request runs again."""
    merged = wrapper.ferrohook._ranks.merged
    wrapper.ferrohook._ranks.merged = lambda failed, again: (merged(failed, again)[0], again)


def restore(wrapper: Any) -> None:
    vars(wrapper.ferrohook).pop("check_rows", None)
    vars(wrapper.ferrohook._ranks).pop("merged", None)


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_random_requests(
    drafting: tuple[Any, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    failing: int | None,
) -> None:
    llm, model = drafting
    jobs = drafted_jobs(request.config.getoption("requests") or 36, seed=17)
    count = DraftCount(llm, monkeypatch)
    llm.collective_rpc(spoil, kwargs={"rank": failing})
    try:
        answers = serve(llm, jobs, seed=5, new_tokens=NEW)
    finally:
        llm.collective_rpc(restore)
    assert len(answers) == len(jobs)
    assert wrong_answers(model, jobs, answers, NEW) == []
    assert min(count.accepted, count.rejected) > 5, count
    assert count.preempted > (0 if failing is None else 10)
    assert state(llm)["results"] == 0


def test_a_rank_that_does_not_know_would_be_found(drafting: tuple[Any, Any]) -> None:
    """Its hooks act in the steps that the other one's requests sit out."""
    llm, model = drafting
    jobs = [job for job in drafted_jobs(36, seed=17) if not job.gated]
    llm.collective_rpc(spoil, kwargs={"rank": 1})
    llm.collective_rpc(forget)
    try:
        answers = serve(llm, jobs, seed=6, new_tokens=NEW)
    finally:
        llm.collective_rpc(restore)
    assert wrong_answers(model, jobs, answers, NEW)
