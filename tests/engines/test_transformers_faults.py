"""Faults of ferrohook in steps of transformers' engine: they fail requests, never the engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import ferrohook as fh
from support.engines import WIDTH, Change, Job, attached_to, tiny_llama
from support.faults import NOWHERE, FaultError, Injector

NEW, WAIT, PARTS = 4, 60, 4
UNGUARDED = {
    *("replaced", "_failing_in_step"),
    *("_complete", "state", "_give", "_end_failed"),
}
STEERED = Job([5, 6, 7, 8], (Change(1, fh.Add(torch.ones(WIDTH)), "generated"),), ("model.norm",))
KEPT = Job([9, 10, 11], kept=("model.layers.0",))
PLAIN = Job([12, 13])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny_llama()


def serve(model: Any, injector: Injector) -> None:
    """Serves requests with the injector in the engine's thread, and others after them."""
    with attached_to(model, NEW) as attached:
        behind, before = False, False
        for round_ in range(3):
            jobs = {f"{round_} {name}": job for name, job in JOBS.items()}
            # One round later: a fault between two rounds may fail requests that came meanwhile.
            behind, before = before, injector.where != NOWHERE
            for name, job in jobs.items():
                attached.add_request(job.prompt, name, plan=job.plan)
            outputs = [attached.get_result(timeout=WAIT) for _ in jobs]
            assert all(outputs), f"no answer after a fault in {injector.where}"
            assert {output.request_id for output in outputs} == {*jobs}, injector.where
            for output in outputs:
                job = jobs[output.request_id]
                if job.plan is None or behind or output.hook_error is None:
                    job.check(model, output, NEW)
                else:
                    assert isinstance(output.hook_error, FaultError), injector.where
                    assert output.status.name == "FAILED"


JOBS = {"steered": STEERED, "kept": KEPT, "plain": PLAIN}


@pytest.mark.parametrize("part", range(PARTS))  # each within the limit of a test
def test_a_fault_in_any_call_fails_requests_with_plans_alone(
    part: int, model: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loop's own profiler: threads that start later than it have none.
    monkeypatch.setattr(threading, "_profile_hook", None)

    def run(at: int | None) -> Injector:
        injector = Injector(UNGUARDED, at)
        threading.setprofile(injector)
        serve(model, injector)
        threading.setprofile(None)  # type: ignore[arg-type]
        return injector

    first = run(None)
    assert len(first.calls) > 100
    number = 400 if request.config.getoption("--whole") else 12
    found = {run(at).where for at in first.draw(number)[part::PARTS]}
    assert len(found) > 1
