"""vLLM in this process: plans that fail while they run, and what their requests leave behind."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import admission, vllm
from ferrohook.engines.vllm.calls import call
from ferrohook.engines.wire import digest_of
from support.engines import Change, Job
from support.vllm_engine import EOS, WIDTH, Answer, sampling, serve_at_once, state

pytestmark = pytest.mark.v2
NEW = 12
PROMPT = [*range(10, 50)]
served = functools.partial(serve_at_once, prompt=PROMPT, new_tokens=NEW)
VECTOR = torch.linspace(-2, 2, WIDTH)
FAILS = fh.Plan(fh.on("model.layers.1", fh.Add(VECTOR)), fh.keep("model.layers.1", max_bytes=1))


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.ferrohook


def check(model: Any, job: Job, output: Any) -> None:
    job.check(model, Answer([*output.outputs[0].token_ids], {}), NEW)


STEERED = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),))


def test_a_plan_that_fails_in_the_worker_fails_its_request_alone(models: Any, llm: Any) -> None:
    _, model = models["llama"]
    vllm.put_vectors(llm, {"gone": VECTOR})
    hook = {"type": "Add", "vector": {"tensor": "gone"}}
    named = {
        "version": 1,
        "entries": [
            {"type": "on", "what": "model.layers.1", "hook": hook},
            {"type": "keep", "what": "model.layers.1"},
        ],
    }
    engine = llm.llm_engine
    engine.add_request("failing", {"prompt_token_ids": PROMPT}, sampling(named))
    call(engine, "drop", digest_of(VECTOR.clone()), "gone")
    engine.add_request("other", {"prompt_token_ids": PROMPT}, sampling(STEERED.plan))
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {it.request_id: it for it in engine.step() if it.finished}
    (text,) = finished["failing"].outputs
    assert text.finish_reason == "error"
    assert "uploads were dropped before the request ran" in text.stop_reason
    with pytest.raises(fh.HookError, match="uploads were dropped before the request ran"):
        vllm.activations(llm, "failing")
    check(model, STEERED, finished["other"])


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_no_token_of_a_step_that_failed(llm: Any, new_tokens: int) -> None:
    """The step may be the request's last, which would end it without an error."""
    (text,) = served(llm, {"failing": FAILS}, new_tokens=new_tokens)["failing"].outputs
    assert text.finish_reason == "error"
    assert [*text.token_ids] == []
    assert "model.layers.1" in text.stop_reason
    assert "max_bytes" in text.stop_reason


def test_a_plan_that_fails_later_keeps_the_tokens_before(models: Any, llm: Any) -> None:
    _, model = models["llama"]
    (plain,) = served(llm, {"plain": None})["plain"].outputs
    job = Job(PROMPT, (), ("model.layers.2",))
    row = WIDTH * 4
    whole = len(PROMPT) + len(plain.token_ids) - 1
    fits = fh.Plan(fh.keep("model.layers.2", max_bytes=whole * row))
    fails = fh.Plan(fh.keep("model.layers.2", max_bytes=(len(PROMPT) + 4) * row))
    outputs = served(llm, {"fits": fits, "fails": fails})
    (text,) = outputs["fails"].outputs
    assert text.finish_reason == "error"
    assert "max_bytes" in text.stop_reason
    assert [*text.token_ids] == [*plain.token_ids][:5]
    with pytest.raises(fh.HookError, match=r"the plan of the request failed.*max_bytes"):
        vllm.activations(llm, "fails")
    # An engine that runs ahead of the end runs a row that the budget has no bytes for.
    acts = vllm.activations(llm, "fits").acts
    job.check(model, Answer([*outputs["fits"].outputs[0].token_ids], acts), NEW)


def test_what_a_failed_request_wrote_is_in_no_cache(
    models: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the same plan in the same step does not read it, nor does a later one."""
    _, model = models["llama"]
    llm.reset_prefix_cache()
    worker = worker_of(llm)
    admit, failed = worker.admit, []

    def failing_once(*admitted: Any, **options: Any) -> None:
        if not failed:
            failed.append(admitted)
            msg = "out of luck"
            raise RuntimeError(msg)
        admit(*admitted, **options)

    monkeypatch.setattr(worker, "admit", failing_once)
    outputs = served(llm, {"first": STEERED.plan, "second": STEERED.plan})
    (text,) = outputs["first"].outputs
    assert text.finish_reason == "error"
    assert "RuntimeError: out of luck" in text.stop_reason
    assert outputs["second"].num_cached_tokens == 0
    check(model, STEERED, outputs["second"])
    later = served(llm, {"later": STEERED.plan})["later"]
    assert later.num_cached_tokens == 32  # the second one's
    check(model, STEERED, later)
    served(llm, {"last": None})
    assert state(llm)["requests"] == 0
    assert worker.requests == {}


def test_salts_cannot_be_forged(llm: Any) -> None:
    """A client would poison or read what requests of a plan have cached."""
    salts, keys = [], []
    engine = llm.llm_engine
    for name, salt in (("first", None), ("second", "of the client"), ("third", None)):
        prompt = {"prompt_token_ids": PROMPT, **({"cache_salt": salt} if salt else {})}
        engine.add_request(name, prompt, sampling(STEERED.plan))
        (request,) = engine.engine_core.engine_core.scheduler.waiting
        assert request.cache_salt == salt
        salts.append(request.sampling_params.extra_args["ferrohook"]["prefix"]["salt"])
        keys.append(request.block_hashes)
        engine.abort_request([name])
    first, second, third = salts
    assert first == second == third
    assert keys[0] == keys[2] != keys[1], "the client's salt is a key of its own"
    plan, used = STEERED.plan.to_json(), {}
    assert admission._digest(plan, used) not in first
    for forged in (first, "ferrohook:", f"ferrohook:{admission._digest(plan, used)}"):
        with pytest.raises(ValueError, match="reserved for ferrohook"):
            engine.add_request(
                "forged", {"prompt_token_ids": PROMPT, "cache_salt": forged}, sampling()
            )
