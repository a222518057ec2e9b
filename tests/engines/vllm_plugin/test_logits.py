"""vLLM in this process: gates that read the logits, as they do in the request alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
from ferrohook.engines import vllm
from support.logits_jobs import ALL, REFUSED, SURE, plan_of, stops_at, values_alone
from support.vllm_engine import sampling, serve_at_once, start, stop

if TYPE_CHECKING:
    from torch import Tensor

NEW = 10
PROMPT = [*range(10, 22)]


@pytest.mark.v2
def test_gates_read_the_logits_that_the_request_has_alone(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the chunks, preemptions and neighbours, the sampler and its changes."""
    folder, model = models["llama"]
    rng = random.Random(3)  # noqa: S311 (a test)
    jobs = [
        ([rng.randrange(10, 110) for _ in range(rng.choice([3, 30, 90]))], plan_of(rng))
        for _ in range(12)
    ]
    samplers = [{}, {"temperature": 1.0}, {"logit_bias": {7: 5.0}, "prompt_logprobs": 2}]
    engine = start(folder, num_gpu_blocks_override=14, max_num_batched_tokens=40)
    try:
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []
        monkeypatch.setattr(
            scheduler,
            "_preempt_request",
            lambda it, *args, **kwargs: (preempted.append(it), preempt(it, *args, **kwargs))[1],
        )
        for number, (prompt, plan) in enumerate(jobs):
            for name, own in (("gated", plan), ("plain", None)):
                params = sampling(own, NEW, ignore_eos=True, **samplers[number % len(samplers)])
                request = {"prompt_token_ids": prompt}
                engine.llm_engine.add_request(f"{name}-{number}", request, params)
        outputs = {}
        while engine.llm_engine.has_unfinished_requests():
            outputs |= {it.request_id: it for it in engine.llm_engine.step() if it.finished}
        for number, (prompt, plan) in enumerate(jobs):
            (text,) = outputs[f"gated-{number}"].outputs
            assert len(text.token_ids) == NEW, text
            found = vllm.activations(engine, outputs[f"gated-{number}"]).acts["@gate.g"]
            expected = values_alone(model, plan, prompt, [*text.token_ids])
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
    finally:
        stop(engine)
    assert preempted


@pytest.mark.v2
def test_a_stop_ends_the_answer_with_the_token_that_the_gate_read(llm: Any) -> None:
    plain = serve_at_once(llm, {"plain": SURE}, prompt=PROMPT, new_tokens=NEW)["plain"]
    values = vllm.activations(llm, plain).acts["@gate.sure"]
    assert len(values) == NEW
    plans = {"other": None, **stops_at(values)}
    assert len(plans) > 2
    outputs = serve_at_once(llm, plans, prompt=PROMPT, new_tokens=NEW)
    whole = [*plain.outputs[0].token_ids]
    assert [*outputs.pop("other").outputs[0].token_ids] == whole
    for name, output in outputs.items():
        (text,) = output.outputs
        assert (text.finish_reason, text.stop_reason) == ("stop", "sure")
        assert [*text.token_ids] == whole[: int(name.removeprefix("stops-"))]


@pytest.mark.v2
def test_a_hook_of_the_same_step_fails_its_request_only(llm: Any) -> None:
    gate = fh.gate("g", "@logits", fh.MaxProbability(), at="generated")
    hook = fh.on("model.layers.1", fh.Zero(), at="generated", when=fh.above("g", 0.0))
    plans = {"fails": fh.Plan(gate, hook), "other": fh.Plan(gate, fh.keep("@gate.g"))}
    outputs = serve_at_once(llm, plans, prompt=PROMPT, new_tokens=NEW)
    (text,) = outputs["fails"].outputs
    assert text.finish_reason == "error"
    assert "reads later in the forward" in text.stop_reason
    assert "lag=1" in text.stop_reason
    assert len(vllm.activations(llm, outputs["other"]).acts["@gate.g"]) == NEW - 1


@pytest.mark.v2
def test_logits_that_are_nan_fail_their_request_only(llm: Any) -> None:
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()

    def spoil(_module: object, _args: object, logits: Tensor) -> None:
        calls.append(len(logits))
        if len(calls) == 3:
            logits[1] = float("nan")

    gate = fh.gate("g", "@logits", fh.Entropy(), at=ALL)
    plan = fh.Plan(gate, fh.keep("@gate.g"))
    calls: list[int] = []
    hook = model.logits_processor.register_forward_hook(spoil)
    try:
        plans = {"first": plan, "spoilt": plan, "plain": None}
        outputs = serve_at_once(llm, plans, prompt=PROMPT, new_tokens=NEW)
    finally:
        hook.remove()
    (text,) = outputs["spoilt"].outputs
    assert text.finish_reason == "error"
    assert f"gate 'g' is NaN at position {len(PROMPT) + 1}" in text.stop_reason
    assert len(vllm.activations(llm, outputs["first"]).acts["@gate.g"]) == NEW


@pytest.mark.parametrize(
    ("entry", "reason"),
    [*REFUSED, (fh.keep("logits_processor"), "cannot be hooked: it never runs in the forward")],
)
def test_plans_that_need_other_logits_are_refused(llm: Any, entry: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        llm.generate({"prompt_token_ids": PROMPT}, sampling(fh.Plan(entry)), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
