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
from support.dictionaries import dictionary_of
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

    from support.engines import Job
    from support.transcoding import Transcoded

NEW = 12
SITES = ["model.embed_tokens", "model.layers.*", "model.layers.*.mlp", "model.norm"]
KEPT = {
    *("model.embed_tokens", "model.layers.1.mlp", "model.norm"),
    *(f"model.layers.{it}" for it in range(LAYERS)),
}
READ = {"mlp", ""}
"""Modules of a layer whose outputs are sites."""


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


def at_sites(job: Job) -> Transcoded | None:
    """The transcoder's change of a request, if a graph serves it."""
    found = job.transcoded
    if found is None:
        return None
    places = found.read[1], found.written[1]
    served = all(it.module in READ and not it.inputs for it in places)
    return found if served else None


@pytest.mark.v2
def test_random_requests(models: Any, engine: Any) -> None:
    _, model = models["llama"]
    jobs = [
        dataclasses.replace(
            job, kept=tuple(it for it in job.kept if it in KEPT), transcoded=at_sites(job)
        )
        for job in random_jobs(80, seed=71, gates=0.4, transcoders=0.6)
    ]
    assert sum(job.gated is not None for job in jobs) > 8
    assert sum(job.transcoded is not None for job in jobs) > 2
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
        (fh.keep("model.layers.1.self_attn"), "not a site of this compiled engine"),
        (fh.keep("@attn_out.1"), "not a site of this compiled engine"),
        (fh.keep("model.layers.1", inputs=True), "leave out inputs"),
        (fh.on("model.layers.1", fh.Zero(output_index=1)), "leave out inputs and output_index"),
    ],
)
def test_a_plan_that_a_graph_cannot_serve_is_refused(engine: Any, entry: Any, reason: str) -> None:
    plan = sampling(fh.Plan(entry))
    with pytest.raises(ValueError, match=reason):
        engine.generate({"prompt_token_ids": [5, 6]}, plan, use_tqdm=False)


def test_a_transcoder_that_reads_elsewhere_is_refused(engine: Any) -> None:
    reads = {"reads": "@mlp_in.1", "writes": "@mlp_out.1"}
    own = dictionary_of("relu", width=WIDTH, transcoder=True, name="elsewhere", **reads)
    vllm.put_dictionaries(engine, [own])
    plan = sampling(fh.Plan(fh.on("@mlp_out.1", fh.Feature(own, 0, set=1.0))))
    with pytest.raises(ValueError, match="not a site of this compiled engine"):
        engine.generate({"prompt_token_ids": [5, 6]}, plan, use_tqdm=False)
    vllm.drop_dictionaries(engine, ["elsewhere"])


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
