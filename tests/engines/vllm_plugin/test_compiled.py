"""vLLM in this process, compiled: Dynamo's graph, which has the operators of the sites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from support.engines import Change, Job
from support.vllm_engine import (
    EOS,
    LAYERS,
    WIDTH,
    random_jobs,
    sampling,
    serve,
    start_compiled,
    state,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NEW = 12
KINDS = ["Scale", "Ablate", "Clamp"]
KEPT = tuple(f"model.layers.{layer}" for layer in range(LAYERS))


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def engine(models: Any) -> Iterator[Any]:
    config = {"ferrohook": {"sites": "model.layers.*", "sites_kinds": KINDS}}
    # Fresh memory is NaN: of such is the output of attention in the self-test.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        made = start_compiled(
            models["llama"][0],
            additional_config=config,
            compilation_config={"cudagraph_mode": "NONE"},  # as the page says; a CPU has none
        )
    finally:
        torch.use_deterministic_algorithms(False)
    yield made
    stop(made)


def served(job: Job) -> Job:
    """A job as a compiled engine serves it: one change per layer, captures of layers."""
    changes: dict[int, Change] = {}
    for each in job.changes:
        own = type(each.hook).__name__ in ("Add", *KINDS)
        hook = each.hook if own else fh.Add(torch.linspace(-2, 2, WIDTH), scale=each.layer + 1.0)
        changes.setdefault(each.layer, Change(each.layer, hook, each.at))
    kept = tuple(name for name in job.kept if name in KEPT)
    return Job(job.prompt, tuple(changes.values()), kept)


@pytest.mark.v2
def test_random_requests(models: Any, engine: Any) -> None:
    _, model = models["llama"]
    jobs = [served(job) for job in random_jobs(60, seed=71)]
    assert sum(bool(job.changes) for job in jobs) > 8
    before = state(engine)["steps"]
    answers = serve(engine, jobs, seed=73)
    assert len(answers) == len(jobs)
    for number, job in enumerate(jobs):
        job.check(model, answers[number], NEW)
    assert state(engine)["steps"] > before
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.get_model().model.compiled


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (fh.Plan(fh.keep("model.norm")), "not a site of this compiled engine"),
        (fh.Plan(fh.on("model.layers.1", fh.Zero())), "add Zero to sites_kinds"),
        (
            fh.Plan(
                fh.on("model.layers.1", fh.Ablate(torch.ones(WIDTH))),
                fh.on("model.layers.1", fh.Scale(2.0)),
            ),
            "Add, Scale, Ablate, Clamp in this order",
        ),
        (fh.Plan(fh.keep("model.layers.1", inputs=True)), "inputs is not supported"),
        (
            fh.Plan(
                fh.on("model.layers.1", fh.Add(torch.ones(WIDTH)), at=0),
                fh.on("model.layers.1", fh.Add(torch.ones(WIDTH)), at=1),
            ),
            "at different positions",
        ),
        (
            fh.Plan(fh.keep("model.layers.1"), fh.on("model.layers.1", fh.Add(torch.ones(WIDTH)))),
            "keeps 'model.layers.1' before it changes it",
        ),
    ],
)
def test_a_plan_that_a_graph_cannot_serve_is_refused(
    engine: Any, plan: fh.Plan, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        engine.generate({"prompt_token_ids": [5, 6]}, sampling(plan), use_tqdm=False)


@pytest.mark.v2
def test_labels_and_dtypes(engine: Any) -> None:
    plan = fh.Plan(fh.keep("model.layers.1", label="half", dtype=torch.float16, at="last_prompt"))
    (output,) = engine.generate({"prompt_token_ids": [5, 6]}, sampling(plan), use_tqdm=False)
    (act,) = vllm.activations(engine, output).acts.values()
    assert act.dtype == torch.float16
    assert act.shape == (1, WIDTH)


def test_without_sites_plans_are_refused(models: Any) -> None:
    made = start_compiled(models["llama"][0])
    try:
        prompt = {"prompt_token_ids": [5, 6]}
        made.generate(prompt, sampling(), use_tqdm=False)
        with pytest.raises(ValueError, match=r"compilation without sites.*additional_config"):
            made.generate(prompt, sampling(fh.Plan(fh.keep("model.norm"))), use_tqdm=False)
    finally:
        stop(made)
