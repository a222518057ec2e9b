"""Faults of ferrohook in SGLang's scheduler: they fail requests with plans, never the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

import ferrohook as fh
import support.engines
from ferrohook.engines.sglang import plugin
from ferrohook.engines.sglang import worker as worker_module
from support.engine_scenes import NEW, PROMPT, VECTOR, new_jobs, steering
from support.engines import Job
from support.faults import NOWHERE, Injector
from support.logits_jobs import WATCHED
from support.serving import EOS
from support.sglang_engine import abort, answer_of, answers, request

if TYPE_CHECKING:
    from support.sglang_engine import Local

UNGUARDED = {
    *("_queueing", "take_request", "_aborting", "_processing", "_limiting", "_batched"),
    *("_forwarding", "_answering", "forward"),
    *(
        "answer",
        "_forward",
        "_checking",
        "_drawing",
        "failures",
        "reason_of",
        "reject",
        "end_early",
    ),
    *("state", "_abort", "_taken", "__getitem__", "part_of"),
    *("check_tokens", "_tensor_of", "_numbered_plan", "_keying", "_sharing", "_keys_of"),
}


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


def serve(local: Local, model: Any, injector: Injector) -> None:
    """Serves requests with the injector, and others after them."""
    for round_ in ("first", "second"):
        had_fault = injector.where != NOWHERE
        jobs = new_jobs()
        sent = [request(f"{round_} {name}.", job.prompt, job.plan) for name, job in jobs.items()]
        sent.append(request(f"{round_} watched.", PROMPT, WATCHED, stream=True))
        gone = request(f"{round_} gone.", PROMPT, steering().plan)
        with injector.here():
            local.serve([sent, [gone], [abort(f"{round_} gone.")], []])
        found = answers(local.sent)
        watched = found[f"{round_} watched."]["finish"]
        assert watched["type"] != "abort" or injector.where in watched["message"]
        for name, job in jobs.items():
            answer = found[f"{round_} {name}."]
            if had_fault or job.plan is None or answer["finish"]["type"] != "abort":
                job.check(model, answer_of(answer, job), NEW)
            else:
                assert injector.where in answer["finish"]["message"]
    local.serve([])
    assert len(local.worker.requests) == 0, injector.where


def test_a_fault_in_any_call_fails_requests_with_plans_alone(
    llama: Any, local: Local, request: pytest.FixtureRequest
) -> None:
    def run(at: int | None) -> Injector:
        injector = Injector(UNGUARDED, at)
        serve(local, llama[1], injector)
        return injector

    first = run(None)
    assert len(first.calls) > 100
    number = 400 if request.config.getoption("--whole") else 16
    found = {run(at).where for at in first.draw(number)}
    assert len(found) > 5


def test_a_failure_at_the_start_is_logged_once_and_refuses_plans(
    llama: Any, local: Local, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler serves all other requests."""
    reason = "RuntimeError: not as it was tried"

    def failing(*_args: object) -> None:
        raise RuntimeError(reason.removeprefix("RuntimeError: "))

    monkeypatch.setattr(worker_module, "observe", failing)
    monkeypatch.setattr(plugin, "_workers", {})
    plugin._made(None, local.scheduler)
    assert [it.getMessage().count(reason) for it in caplog.records] == [1]
    job = Job(PROMPT)
    plan = fh.Plan(fh.on("model.layers.1", fh.Add(VECTOR)))
    found = local.run([[request("plain", PROMPT), request("planned", PROMPT, plan)]])
    job.check(llama[1], answer_of(found["plain"], job), NEW)
    assert found["planned"]["finish"]["status_code"] == 400
    assert reason in found["planned"]["finish"]["message"]
