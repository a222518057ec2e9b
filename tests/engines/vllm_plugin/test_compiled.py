"""vLLM in this process, compiled: Dynamo's graph, which has the operators of the sites."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from support.logits_jobs import SURE, stops_at
from support.vllm_engine import (
    EOS,
    LAYERS,
    WIDTH,
    random_jobs,
    sampling,
    serve,
    serve_at_once,
    start_compiled,
    state,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NEW = 12
SITES = ["model.embed_tokens", "model.layers.*", "model.norm"]
KEPT = {"model.embed_tokens", "model.norm", *(f"model.layers.{it}" for it in range(LAYERS))}


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def engine(models: Any) -> Iterator[Any]:
    config = {"ferrohook": {"sites": SITES}}
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


@pytest.mark.v2
def test_random_requests(models: Any, engine: Any) -> None:
    _, model = models["llama"]
    jobs = [
        dataclasses.replace(job, kept=tuple(it for it in job.kept if it in KEPT))
        for job in random_jobs(60, seed=71, gates=0.4)
    ]
    assert sum(job.gated is not None for job in jobs) > 8
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
    ("entry", "reason"),
    [
        (fh.keep("model.layers.1.mlp"), "not a site of this compiled engine"),
        (fh.keep("@mlp_out.1"), "not a site of this compiled engine"),
        (fh.keep("model.layers.1", inputs=True), "leave out inputs"),
        (fh.on("model.layers.1", fh.Zero(output_index=1)), "leave out inputs and output_index"),
    ],
)
def test_a_plan_that_a_graph_cannot_serve_is_refused(engine: Any, entry: Any, reason: str) -> None:
    plan = sampling(fh.Plan(entry))
    with pytest.raises(ValueError, match=reason):
        engine.generate({"prompt_token_ids": [5, 6]}, plan, use_tqdm=False)


@pytest.mark.v2
def test_a_gate_reads_the_logits_outside_of_the_graph(engine: Any) -> None:
    (plain,) = serve_at_once(engine, {"plain": SURE}, prompt=[5, 6], new_tokens=NEW).values()
    values = vllm.activations(engine, plain).acts["@gate.sure"]
    assert len(values) == NEW
    whole = [*plain.outputs[0].token_ids]
    outputs = serve_at_once(engine, stops_at(values), prompt=[5, 6], new_tokens=NEW)
    for name, output in outputs.items():
        (text,) = output.outputs
        assert (text.finish_reason, text.stop_reason) == ("stop", "sure")
        assert [*text.token_ids] == whole[: int(name.removeprefix("stops-"))]


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
