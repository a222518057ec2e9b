"""A scheduler of SGLang in this process: gates that read the logits, as in the request alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

import ferrohook as fh
from ferrohook.engines import sglang
from support.logits_jobs import REFUSED, SURE, gated, plan_of, stops_at, values_alone
from support.sglang_engine import request

if TYPE_CHECKING:
    from support.sglang_engine import Local

NEW = 10
PROMPT = [*range(10, 22)]
ON = {"ignore_eos": True}


def test_gates_read_the_logits_that_the_request_has_alone(llama: Any, local: Local) -> None:
    """Whatever the chunks and neighbours, the sampler and its changes."""
    rng = random.Random(3)  # noqa: S311 (a test)
    jobs = [
        ([rng.randrange(10, 110) for _ in range(rng.choice([3, 30, 90, 200]))], plan_of(rng))
        for _ in range(12)
    ]
    samplers = [ON, ON | {"temperature": 1.0}, ON | {"logit_bias": {"7": 5.0}}]
    sent = []
    for number, (prompt, plan) in enumerate(jobs):
        for name, own in (("gated", plan), ("plain", None)):
            params = samplers[number % len(samplers)]
            more = {"return_logprob": number % 4 == 0, "logprob_start_len": 0}
            sent.append(request(f"{name}-{number}", prompt, own, NEW, params=params, **more))
    # One after the other: each step has others in it.
    outputs = local.run([[each] for each in sent])
    for number, (prompt, plan) in enumerate(jobs):
        found = outputs[f"gated-{number}"]
        assert len(found["tokens"]) == NEW, found["finish"]
        values = sglang.activations(found).acts["@gate.g"]
        expected = values_alone(llama[1], plan, prompt, [*found["tokens"]])
        torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert not local.worker.requests


def test_a_stop_ends_the_answer_with_the_token_that_the_gate_read(local: Local) -> None:
    plain = local.run([[request("plain", PROMPT, SURE, NEW, params=ON)]])["plain"]
    values = sglang.activations(plain).acts["@gate.sure"]
    assert len(values) == NEW
    plans = {"other": None, **stops_at(values)}
    assert len(plans) > 2
    sent = [request(name, PROMPT, plan, NEW, params=ON) for name, plan in plans.items()]
    outputs = local.run([sent])
    whole = [*plain["tokens"]]
    assert [*outputs.pop("other")["tokens"]] == whole
    for name, found in outputs.items():
        assert found["finish"] == {"type": "stop", "matched": "sure"}
        assert [*found["tokens"]] == whole[: int(name.removeprefix("stops-"))]


def test_a_hook_of_the_same_step_fails_its_request_only(local: Local) -> None:
    hook = fh.on("model.layers.1", fh.Zero(), at="generated", when=fh.above("g", 0.0))
    plans = {"fails": fh.Plan(gated(), hook), "other": fh.Plan(gated(), fh.keep("@gate.g"))}
    sent = [request(name, PROMPT, plan, NEW, params=ON) for name, plan in plans.items()]
    outputs = local.run([sent])
    reason = outputs["fails"]["finish"]["message"]
    assert "reads later in the forward" in reason
    assert "lag=1" in reason
    assert len(sglang.activations(outputs["other"]).acts["@gate.g"]) == NEW - 1


@pytest.mark.parametrize(("entry", "reason"), REFUSED)
def test_plans_that_need_other_logits_are_refused(local: Local, entry: Any, reason: str) -> None:
    finish = local.run([[request("one", PROMPT, fh.Plan(entry))]])["one"]["finish"]
    assert finish["status_code"] == 400
    with pytest.raises(ValueError, match=reason):
        raise ValueError(finish["message"])
