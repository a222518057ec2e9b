"""Faults of ferrohook in vLLM's steps: they fail requests with plans, never the engine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from ferrohook.engines.gate_events import AnswerGates
from ferrohook.engines.vllm import worker as worker_module
from ferrohook.engines.vllm.requests import streams
from ferrohook.engines.wire import GATES, NAME
from support.engine_scenes import PROMPT, VECTOR, new_jobs
from support.engines import Job
from support.faults import NOWHERE, Injector
from support.logits_jobs import WATCHED
from support.vllm_engine import EOS, Answer, sampling, start, state, stop

pytestmark = pytest.mark.v2
NEW = 3
UNGUARDED = {
    *("made", "_updating", "_outputting", "_finishing", "_aborting", "_tell", "_named"),
    *("cut", "retry", "end"),
    *("finding", "_safely", "has_plan"),
    *("replaced", "updating", "preparing", "calling", "adding", "executing", "sampling"),
    *("take_request", "computing", "gate_values", "state", "failures", "stops", "retries"),
    *("reason_of", "_mark", "get_output", "sent_checks"),
}
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


def answer_of(llm: Any, job: Job, output: Any) -> Answer:
    (text,) = output.outputs
    if text.finish_reason == "error":
        return Answer([], {}, text.stop_reason)
    acts = vllm.activations(llm, output).acts if job.kept else {}
    return Answer([*text.token_ids], acts)


def serve(llm: Any, model: Any, injector: Injector) -> None:
    """Serves requests with the injector in the engine's steps, and others after them."""
    engine = llm.llm_engine
    for _ in range(2):
        had_fault = injector.where != NOWHERE
        jobs = {f"{next(_numbers)} {name}": job for name, job in new_jobs().items()}
        for name, job in jobs.items():
            engine.add_request(name, {"prompt_token_ids": job.prompt}, sampling(job.plan, NEW))
        watched = f"{next(_numbers)} watched"
        streams[watched] = gates = AnswerGates()
        extra = {NAME: WATCHED.to_json(), GATES: watched}
        params = sampling(None, NEW, extra_args=extra)
        engine.add_request(watched, {"prompt_token_ids": [5, 6, 7]}, params)
        outputs: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            with injector.here():
                found = engine.step()
            outputs |= {output.request_id: output for output in found if output.finished}
        assert outputs.keys() == {*jobs, watched}, injector.where
        (text,) = outputs[watched].outputs
        assert text.finish_reason != "error" or injector.where in text.stop_reason
        assert gates.take(0) or had_fault or injector.where != NOWHERE
        for name, job in jobs.items():
            try:
                answer = answer_of(llm, job, outputs[name])
            except fh.HookError as error:
                answer = Answer([], {}, str(error))
            if had_fault or job.plan is None or answer.error is None:
                job.check(model, answer, NEW)
            else:
                lost = "captures of the request are missing", "is not finished"
                assert any(it in answer.error for it in (injector.where, *lost)), answer.error
    llm.generate({"prompt_token_ids": [5]}, sampling(None, 1), use_tqdm=False)
    assert state(llm)["requests"] == 0, injector.where


def test_a_fault_in_any_call_fails_requests_with_plans_alone(
    models: Any, llm: Any, request: pytest.FixtureRequest
) -> None:
    def run(at: int | None) -> Injector:
        injector = Injector(UNGUARDED, at)
        serve(llm, models["llama"][1], injector)
        return injector

    first = run(None)
    assert len(first.calls) > 100
    found = {run(at).where for at in first.draw(400 if request.config.getoption("--whole") else 10)}
    assert len(found) > 3  # some are called less often in another round


def test_a_failure_at_the_start_is_logged_once_and_refuses_plans(
    models: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine serves all other requests."""
    folder, model = models["llama"]

    def failing(*_args: object) -> None:
        msg = "not as it was tried"
        raise RuntimeError(msg)

    monkeypatch.setattr(worker_module, "observe", failing)
    llm = start(folder)
    try:
        reason = "RuntimeError: not as it was tried"
        assert [it.getMessage().count(reason) for it in caplog.records] == [1]
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling(), use_tqdm=False)
        job = Job(PROMPT)
        job.check(model, answer_of(llm, job, output), 12)
        plan = fh.Plan(fh.on("model.layers.1", fh.Add(VECTOR)))
        with pytest.raises(ValueError, match=reason):
            llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    finally:
        stop(llm)
