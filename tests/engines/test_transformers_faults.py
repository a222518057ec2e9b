"""Faults of ferrohook in steps of transformers' engine: they fail requests, never the engine."""

from __future__ import annotations

import random
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("transformers")

import ferrohook as fh
from ferrohook.engines import transformers
from support.engines import WIDTH, Change, Job, batching, greedy, tiny_llama

if TYPE_CHECKING:
    from types import FrameType

NEW, WAIT = 4, 60
NOWHERE = "no call"
PACKAGE = str(Path(fh.__file__).parent)
UNGUARDED = {
    *("replaced", "_shares", "_complete", "get_model_kwargs", "sample"),
    *("_failing", "_fail_all", "_reject", "_give"),
}
"""Functions that put the guards around the rest, and functions that run after a fault."""
STEERED = Job([5, 6, 7, 8], (Change(1, fh.Add(torch.ones(WIDTH)), "generated"),), ("model.norm",))
KEPT = Job([9, 10, 11], kept=("model.layers.0",))
PLAIN = Job([12, 13])


class FaultError(Exception):
    """Raised in a call of a function of ferrohook, as if that had a fault."""


class Injector:
    """Counts the calls in the engine's thread, as its profiler, and raises in one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.calls = 0
        self.where = NOWHERE

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        # No caller gets what a dropped generator, a finaliser or a weak reference's callback
        # raises. The model's own code asks modules for their class.
        above = [code.co_name]
        while caller and caller.f_code.co_filename.startswith(PACKAGE):
            above.append(caller.f_code.co_name)
            caller = caller.f_back
        if above[0][0] == "<" or above[0] in UNGUARDED or above[1:2] == ["replaced"]:
            return
        if (
            "__del__" in above
            or above[-1] == "__class__"
            or (caller and caller.f_code.co_filename == weakref.__file__)
        ):
            return
        self.calls += 1
        if self.calls - 1 == self.at:
            self.where = code.co_qualname
            raise FaultError(self.where)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny_llama()


def serve(model: Any, injector: Injector) -> None:
    """Serves requests with the injector in the engine's thread, and others after them."""
    with (
        model.continuous_batching_context_manager(
            greedy(NEW), continuous_batching_config=batching()
        ) as manager,
        transformers.attach(manager) as attached,
    ):
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


def test_a_fault_in_any_call_fails_requests_with_plans_alone(
    model: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loop's own profiler: threads that start later than it have none.
    monkeypatch.setattr(threading, "_profile_hook", None)

    def run(at: int | None) -> Injector:
        injector = Injector(at)
        threading.setprofile(injector)
        serve(model, injector)
        threading.setprofile(None)  # type: ignore[arg-type]
        return injector

    calls = run(None).calls
    assert calls > 100
    rng = random.Random(calls)  # noqa: S311 (tests)
    number = 400 if request.config.getoption("--whole") else 12
    found = {run(at).where for at in rng.sample(range(calls), min(number, calls))}
    assert len(found) > 5
