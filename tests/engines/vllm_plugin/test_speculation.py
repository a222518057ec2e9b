"""Speculative decoding of vLLM in this process: rejected drafts leave nothing in their requests."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from ferrohook.engines.requests import EngineRequest
from ferrohook.engines.vllm import prefix_cache, steps
from ferrohook.engines.vllm.plugin import connect
from ferrohook.engines.vllm.worker import RunnerWorker
from ferrohook.gates.streaming import GateStream
from support import engine_scenes as scenes
from support.engines import Job
from support.logits_jobs import SURE, stops_at
from support.prefix_jobs import BLOCK
from support.serving import wrong_answers
from support.speculation import (
    DRAFTS,
    METHODS,
    DraftCount,
    asked_alone,
    drafted_jobs,
    save_repeating_model,
    speculative_config,
)
from support.vllm_engine import (
    EOS,
    WIDTH,
    Answer,
    sampling,
    scheduling_ahead,
    serve,
    serve_at_once,
    start,
    start_compiled,
    state,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ferrohook.gates.state import Stopped

NEW = 24
PROMPT = [*range(10, 10 + 3 * BLOCK + 4)]
VECTOR = torch.linspace(-2, 2, WIDTH)


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder and model."""
    folder = tmp_path_factory.mktemp("repeating")
    return folder, save_repeating_model(folder)


AHEAD = ("draft_model ahead", "eagle ahead", "draft_model ahead compiled")
SITES = ["model.embed_tokens", "model.layers.*", "model.layers.1.mlp", "model.norm"]


@pytest.fixture(scope="module", params=[*METHODS, "ngram compiled", *AHEAD])
def setting(request: pytest.FixtureRequest) -> str:
    """Method of speculative decoding, then how the engine schedules and runs."""
    return str(request.param)


@pytest.fixture(scope="module")
def method(setting: str) -> str:
    """Method of speculative decoding."""
    return setting.partition(" ")[0]


def start_drafting(setting: str, folder: Path, **options: Any) -> Any:
    config = speculative_config(setting.partition(" ")[0], folder)
    with scheduling_ahead() if "ahead" in setting else contextlib.nullcontext():
        if "compiled" not in setting:
            return start(folder, speculative_config=config, **options)
        return start_compiled(
            folder,
            speculative_config=config,
            additional_config={"ferrohook": {"sites": SITES}},
            compilation_config={"cudagraph_mode": "NONE"},
            **options,
        )


@pytest.fixture(scope="module")
def drafting(setting: str, repeating: tuple[Path, Any]) -> Iterator[Any]:
    """An engine that drafts, with blocks for a few requests."""
    options = {"num_gpu_blocks_override": 11, "max_num_batched_tokens": 48}
    llm = start_drafting(setting, repeating[0], **options)
    yield llm
    stop(llm)


def drawn(request: pytest.FixtureRequest) -> list[Job]:
    return drafted_jobs(request.config.getoption("requests") or 60, seed=7)


@pytest.mark.v2
def test_random_requests_have_the_answers_that_they_have_alone(
    repeating: tuple[Path, Any],
    drafting: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captures, and the values of gates that are streamed, too."""
    jobs = drawn(request)
    count = DraftCount(drafting, monkeypatch)
    answers = serve(drafting, jobs, seed=3, new_tokens=NEW)
    assert len(answers) == len(jobs)
    assert wrong_answers(repeating[1], jobs, answers, NEW) == []
    assert min(count.accepted, count.rejected) > 5, count
    assert count.preempted
    print(f"{len(jobs)} texts, {sum(job.captures for job in jobs)} with captures, {count}")
    serve(drafting, [Job([5, 6, 7])], seed=3)
    assert state(drafting)["requests"] == 0


def test_readings_of_rejected_drafts_would_be_found(
    repeating: tuple[Path, Any],
    drafting: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: the test before finds one that stays."""
    jobs = drawn(request)
    with monkeypatch.context() as patch:
        patch.setattr(GateStream, "take_back", lambda *_args: None)
        with pytest.raises(AssertionError):
            serve(drafting, [job for job in jobs if job.gated], seed=3, new_tokens=NEW)
    while drafting.llm_engine.has_unfinished_requests():
        drafting.llm_engine.step()
    jobs = [job for job in jobs if job.gated and job.gated.over != "prompt"]
    monkeypatch.setattr(EngineRequest, "decide", lambda *_args: None)
    plain = [Job(job.prompt, job.changes, job.kept, gated=job.gated) for job in jobs]
    answers = unstreamed(drafting, plain)
    assert wrong_answers(repeating[1], plain, answers, NEW)


@pytest.mark.parametrize("setting", AHEAD, indirect=True)
def test_positions_of_the_host_would_be_found(
    repeating: tuple[Path, Any],
    drafting: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that schedules ahead assumes that all drafts are accepted."""
    settle = RunnerWorker.settle_step

    def settling(self: RunnerWorker, ids: Any, counts: Any, positions: Any, _exact: Any) -> None:
        settle(self, ids, counts, positions, lambda: positions)

    monkeypatch.setattr(RunnerWorker, "settle_step", settling)
    jobs = [job for job in drawn(request) if not job.gated]
    answers = unstreamed(drafting, jobs)
    assert wrong_answers(repeating[1], jobs, answers, NEW)


def unstreamed(llm: Any, jobs: list[Job]) -> dict[int, Answer]:
    """Serves requests that nobody reads along."""
    engine = llm.llm_engine
    for number, job in enumerate(jobs):
        prompt = {"prompt_token_ids": job.prompt}
        engine.add_request(str(number), prompt, sampling(job.plan, NEW))
    answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                job = jobs[int(output.request_id)]
                acts = vllm.activations(llm, output).acts if job.captures else {}
                tokens = [*output.outputs[0].token_ids]
                answers[int(output.request_id)] = Answer(tokens, acts)
    return answers


def served_stops(llm: Any, stops: list[scenes.Stops]) -> list[tuple[Any, Any]]:
    """Serves requests that their plans end; returns their outputs, and the captures."""
    engine = llm.llm_engine
    for number, each in enumerate(stops):
        prompt = {"prompt_token_ids": each.prompt}
        engine.add_request(f"stops-{number}", prompt, sampling(each.plan, scenes.NEW))
        engine.add_request(f"goes-on-{number}", prompt, sampling(None, scenes.NEW))
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each for each in engine.step() if each.finished}
    for number, each in enumerate(stops):
        (text,) = outputs[f"goes-on-{number}"].outputs
        assert text.stop_reason != "the end"
        assert [*text.token_ids][: len(each.text)] == each.text
    ended = [outputs[f"stops-{number}"] for number in range(len(stops))]
    return [(output, vllm.activations(llm, output)) for output in ended]


@pytest.mark.v2
def test_plans_end_their_requests_at_tokens_only(
    repeating: tuple[Path, Any], drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected drafts end nothing; no token follows an accepted one that ends a request."""
    model = repeating[1]
    stops = scenes.random_stops(lambda *asked: asked_alone(model, *asked), 24)
    count = DraftCount(drafting, monkeypatch)
    for each, (output, captured) in zip(stops, served_stops(drafting, stops), strict=True):
        (text,) = output.outputs
        assert [*text.token_ids] == each.text
        assert (text.finish_reason, text.stop_reason) == ("stop", "the end")
        positions = captured.positions["@gate.the end"].tolist()
        assert positions == [*range(len(each.prompt) + len(each.text))]
        value = float(captured.acts["@gate.the end"][-1])
        assert value == pytest.approx(each.value, abs=1e-3)
    assert min(count.accepted, count.rejected) > 5, count


def test_an_end_at_any_draft_would_be_found(
    repeating: tuple[Path, Any], drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = repeating[1]
    stops = scenes.random_stops(lambda *asked: asked_alone(model, *asked), 24)

    def at_once(_scheduler: Any, _output: Any, stopped: dict[str, Stopped]) -> Any:
        return {request_id: each.gate for request_id, each in stopped.items()}, {}

    monkeypatch.setattr(steps, "cut", at_once)
    found = served_stops(drafting, stops)
    texts = [[*output.outputs[0].token_ids] for output, _ in found]
    assert texts != [each.text for each in stops]


@pytest.mark.v2
def test_gates_read_the_logits_of_accepted_drafts(
    repeating: tuple[Path, Any], drafting: Any
) -> None:
    prompt = [3, 4, 5, 6] * 3
    outputs = serve_at_once(drafting, {"kept": SURE, "plain": None}, prompt=prompt, new_tokens=NEW)
    text = [*outputs["kept"].outputs[0].token_ids]
    assert text == [*outputs["plain"].outputs[0].token_ids]
    values = vllm.activations(drafting, outputs["kept"]).acts["@gate.sure"]
    with torch.no_grad():
        logits = repeating[1](torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(values, logits.softmax(-1).amax(-1), rtol=1e-3, atol=1e-3)
    plans = stops_at(values)
    assert len(plans) > 1
    outputs = serve_at_once(drafting, {**plans}, prompt=prompt, new_tokens=NEW)
    for name, output in outputs.items():
        (answer,) = output.outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "sure")
        assert [*answer.token_ids] == text[: int(name.removeprefix("stops-"))]


def test_which_changes_of_the_last_layer_are_shared(drafting: Any, method: str) -> None:
    """EAGLE makes its keys and values of the hidden states after it."""
    drafting.reset_prefix_cache()
    read = []
    for scale in (1.0, 1.0, 2.0):
        plan = fh.Plan(fh.on("model.layers.3", fh.Add(VECTOR, scale=scale)))
        (output,) = drafting.generate(
            {"prompt_token_ids": PROMPT}, sampling(plan, 4), use_tqdm=False
        )
        read.append(output.num_cached_tokens)
    assert read[0] == 0 < read[1]
    assert (read[2] > 0) == (method != "eagle")


def test_capture_bytes_includes_drafts(
    drafting: Any, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = connect(drafting)._admission
    params = sampling(fh.Plan(fh.keep("model.layers.1")), new_tokens=5)
    rows = 3 + 5 - 1 + (DRAFTS + 1 + DRAFTS if "ahead" in setting else DRAFTS)
    for capture_bytes in (4 * WIDTH * rows, 4 * WIDTH * rows - 1):
        options = dataclasses.replace(admission._options, capture_bytes=capture_bytes)
        monkeypatch.setattr(admission, "_options", options)
        prompt = {"prompt_token_ids": [5, 6, 7]}
        if capture_bytes % WIDTH:
            with pytest.raises(ValueError, match=f"captures of {rows} tokens may take"):
                drafting.generate(prompt, params, use_tqdm=False)
        else:
            drafting.generate(prompt, params, use_tqdm=False)


UNSEEN = 400
"""A token that is in no text."""


SOME = "draft_model ahead, some"


@pytest.fixture(params=["ngram", "draft_model ahead"])
def spoiling(
    request: pytest.FixtureRequest, repeating: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """An engine whose drafts are all wrong, or some of them."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        # Its runner has no `drafter` whose drafts a test could replace.
        pytest.skip("the drafts of the model runner V2 come from a kernel")
    llm = start_drafting(request.param.partition(",")[0], repeating[0])
    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    original, rng = drafter.propose, random.Random(5)  # noqa: S311 (tests)

    def propose(*args: Any, **named: Any) -> Any:
        if "ahead" not in request.param:
            return [[UNSEEN] * 2 if tokens else [] for tokens in args[1]]
        drafts = original(*args, **named)
        if request.param != SOME:
            return drafts.fill_(UNSEEN)
        for draft in drafts:
            if rng.random() < 0.3:
                draft[rng.randrange(DRAFTS) :] = UNSEEN
        return drafts

    monkeypatch.setattr(drafter, "propose", propose)
    yield llm
    stop(llm)


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [it for it in caplog.records if it.name.startswith("ferrohook")]
    return [it.getMessage() for it in found if it.levelno >= logging.ERROR]


@pytest.mark.parametrize("read", [None, "model.layers.3"])
def test_rows_of_rejected_drafts_may_be_nan(
    repeating: tuple[Path, Any],
    spoiling: Any,
    read: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request runs again from its start, without drafts; also if a gate reads NaN."""
    model = repeating[1]
    prompt = [3, 4, 5, 6] * 3
    embedded = model.model.embed_tokens.weight[UNSEEN]
    gate = fh.gate("unseen", "model.embed_tokens", fh.Cosine(embedded))
    spoil = fh.on("model.layers.1", fh.Scale(3e38), when=fh.above("unseen", 0.99))
    kept = fh.Plan(fh.keep("model.layers.2"), fh.keep("@gate.unseen"))
    if read is not None:
        kept += fh.Plan(fh.gate("nan", read, fh.Norm()))
    plans = {"spoilt": fh.Plan(gate, spoil) + kept, "kept": fh.Plan(gate) + kept, "plain": None}
    count = DraftCount(spoiling, monkeypatch)
    outputs = serve_at_once(spoiling, plans, prompt=prompt, new_tokens=NEW)
    assert count.rejected
    assert count.preempted
    texts = [[*output.outputs[0].token_ids] for output in outputs.values()]
    assert texts[0] == texts[1] == texts[2]
    assert logged_errors(caplog) == []
    for name in ("spoilt", "kept"):
        job = Job(prompt, (), ("model.layers.2",))
        acts = dict(vllm.activations(spoiling, outputs[name]).acts)
        assert len(acts.pop("@gate.unseen")) == len(prompt) + len(texts[0]) - 1
        job.check(model, Answer([*texts[0]], acts), NEW)
    # A row of the text that is NaN fails its request all the same.
    fails = fh.Plan(gate, fh.on("model.layers.1", fh.Scale(3e38), at=len(prompt) + 2))
    plans |= {"fails": fails}
    outputs = serve_at_once(spoiling, plans, prompt=prompt, new_tokens=NEW)
    assert outputs["fails"].outputs[0].finish_reason == "error"
    assert len(outputs["fails"].outputs[0].token_ids) == 3
    assert len(logged_errors(caplog)) == 1
    assert [*outputs["kept"].outputs[0].token_ids] == texts[0]
    monkeypatch.setattr(steps, "retry", lambda *_args: None)
    again = serve_at_once(spoiling, plans, prompt=prompt, new_tokens=NEW)
    assert [*again["spoilt"].outputs[0].token_ids] != texts[0]


@pytest.mark.parametrize("spoiling", ["draft_model ahead"], indirect=True)
def test_a_request_may_be_preempted_before_its_failure_is_known(
    repeating: tuple[Path, Any], spoiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would hand out the tokens of the failed step later."""
    scheduler = spoiling.llm_engine.engine_core.engine_core.scheduler
    schedule, rng = scheduler.schedule, random.Random(1)  # noqa: S311 (tests)

    def scheduling(*args: Any, **named: Any) -> Any:
        """Preempts requests whose last step is still running, as if there were no blocks left."""
        flying = [it for it in scheduler.running if it.num_in_flight_tokens]
        if flying and rng.random() < 0.2:
            preempted = rng.choice(flying)
            scheduler.running.remove(preempted)
            scheduler._preempt_request(preempted, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.discard(preempted.request_id)
        return schedule(*args, **named)

    late = []
    retry = steps.retry

    def retrying(scheduler: Any, names: Any) -> None:
        running = {it.request_id for it in scheduler.running}
        late.extend(names - running)
        retry(scheduler, names)

    monkeypatch.setattr(scheduler, "schedule", scheduling)
    monkeypatch.setattr(steps, "retry", retrying)
    gate = fh.gate(
        "unseen", "model.embed_tokens", fh.Cosine(repeating[1].model.embed_tokens.weight[UNSEEN])
    )
    spoil = fh.on("model.layers.1", fh.Scale(3e38), when=fh.above("unseen", 0.99))
    prompts = [[2 + (it * 7 + number) % 9 for number in range(20 + it)] for it in range(16)]
    texts = []
    for plan in (None, fh.Plan(gate, spoil)):
        spoiling.reset_prefix_cache()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = spoiling.generate(given, sampling(plan, NEW), use_tqdm=False)
        texts.append([[*output.outputs[0].token_ids] for output in outputs])
    assert texts[0] == texts[1]
    assert late


def steps_until_end(llm: Any, prompts: dict[str, list[int]], plan: fh.Plan) -> dict[str, Any]:
    """Serves requests of one plan in at most 60 steps; returns the outputs of those that end."""
    engine = llm.llm_engine
    for name, prompt in prompts.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling(plan, NEW))
    outputs = {}
    for _ in range(60):
        outputs |= {each.request_id: each for each in engine.step() if each.finished}
    engine.abort_request([*prompts])
    return outputs


def test_spoilt_drafts_leave_the_blocks_before_them(
    repeating: tuple[Path, Any], spoiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of a block is in the step with the drafts that follow it."""
    prompt = ([3, 4, 5, 6] * BLOCK)[: BLOCK - 3]
    plan = fh.Plan(fh.on("model.layers.1", fh.Scale(3e38), at=slice(BLOCK, None)))

    def serve_both() -> None:
        spoiling.reset_prefix_cache()
        (failed,) = steps_until_end(spoiling, {"spoilt": prompt}, plan)["spoilt"].outputs
        assert (failed.finish_reason, len(failed.token_ids)) == ("error", 4)
        job = Job([*prompt, *failed.token_ids, 7, 8], (), ("model.layers.2",), kept_at="generated")
        (output,) = spoiling.generate(
            {"prompt_token_ids": job.prompt}, sampling(job.plan, NEW), use_tqdm=False
        )
        assert output.num_cached_tokens == BLOCK
        acts = dict(vllm.activations(spoiling, output).acts)
        job.check(repeating[1], Answer([*output.outputs[0].token_ids], acts), NEW)

    serve_both()
    monkeypatch.setattr(prefix_cache, "_end_of_rows", lambda _request, tokens: tokens)
    with pytest.raises(AssertionError):
        serve_both()
    spoiling.reset_prefix_cache()


@pytest.mark.parametrize("spoiling", [SOME], indirect=True)
def test_a_next_turn_reads_no_block_that_drafts_spoilt(
    spoiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that schedules ahead counts drafts in flight among the tokens that have run."""
    worker = spoiling.llm_engine.model_executor.driver_worker.worker
    with torch.no_grad():
        worker.model_runner.model.model.embed_tokens.weight[UNSEEN] = 1e38
    plan = fh.Plan(fh.on("model.embed_tokens", fh.Scale(10.0)))
    first = [[2 + (it * 7 + number) % 9 for number in range(20 + it)] for it in range(16)]

    def served(prompts: list[list[int]]) -> tuple[list[list[int]], int]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = sampling(plan, 100, ignore_eos=True)
        outputs = spoiling.generate(given, params, use_tqdm=False)
        texts = [[*output.outputs[0].token_ids] for output in outputs]
        return texts, sum(output.num_cached_tokens for output in outputs)

    def second_turn() -> tuple[list[list[int]], list[list[int]]]:
        """Returns its texts, with the blocks of the first turn and without."""
        spoiling.reset_prefix_cache()
        second = [[*prompt, *text] for prompt, text in zip(first, served(first)[0], strict=True)]
        texts, read = served(second)
        assert read >= len(first) * 3 * BLOCK
        spoiling.reset_prefix_cache()
        return texts, served(second)[0]

    count = DraftCount(spoiling, monkeypatch)
    texts, right = second_turn()
    assert texts == right
    assert min(count.accepted, count.rejected, count.preempted) > 100, count
    monkeypatch.setattr(prefix_cache, "shareable", lambda _coordinator, _request, tokens: tokens)
    texts, right = second_turn()
    assert texts != right


def test_a_request_runs_again_once_for_each_token(
    spoiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pads requests with drafts of which one token has to run."""
    prompt = ([3, 4, 5, 6] * BLOCK)[: BLOCK + 1]
    prompts = {"other": [9] * 5, "one": [5], "cached": prompt}
    plan = fh.Plan(fh.on("model.layers.1", fh.Scale(3e38), at="last_prompt"))
    spoiling.generate({"prompt_token_ids": prompt}, sampling(None, 1), use_tqdm=False)
    count = DraftCount(spoiling, monkeypatch)
    outputs = steps_until_end(spoiling, prompts, plan)
    assert {name: it.outputs[0].finish_reason for name, it in outputs.items()} == dict.fromkeys(
        prompts, "error"
    )
    assert 1 <= count.preempted <= 2
    if spoiling.llm_engine.vllm_config.scheduler_config.async_scheduling:
        return  # steps that it schedules ahead end the control too
    retry = steps.retry

    def reading(scheduler: Any, requests: Any) -> None:
        retry(scheduler, requests)
        for name in requests:
            scheduler.requests[name].num_preemptions = 0

    monkeypatch.setattr(steps, "retry", reading)
    monkeypatch.setattr(EngineRequest, "retried", property(lambda _: 0, lambda *_: None))
    spoiling.generate({"prompt_token_ids": prompt}, sampling(None, 1), use_tqdm=False)
    assert "cached" not in steps_until_end(spoiling, prompts, plan)
    assert count.preempted > 30
    spoiling.generate({"prompt_token_ids": prompt}, sampling(None, 1), use_tqdm=False)


def test_a_gate_with_lag_reads_later_in_the_forward(spoiling: Any) -> None:
    """Drafts have no value of the token before yet, so the request runs again for each token."""
    gate = fh.gate("late", "model.layers.3", fh.Norm(), lag=1, over="token")
    changing = fh.on("model.layers.1", fh.Ablate(VECTOR), at="generated")
    lagging = fh.on("model.layers.1", fh.Ablate(VECTOR), when=fh.above("late", 0.0))
    plans = {"changing": fh.Plan(changing), "lagging": fh.Plan(gate, lagging)}
    texts = [
        (output.outputs[0].finish_reason, [*output.outputs[0].token_ids])
        for output in serve_at_once(spoiling, plans, prompt=[3, 4, 5, 6] * 3, new_tokens=8).values()
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("resets", [0.0, 0.15], ids=["", "with resets"])
def test_tokens_of_a_failed_step_end_no_request(
    repeating: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, resets: float
) -> None:
    """Nor do gates read them: neither steps that ran ahead of it nor a reset of the cache."""
    llm = start_drafting("draft_model ahead", repeating[0])
    engine, rng = llm.llm_engine, random.Random(1)  # noqa: S311 (tests)
    count = DraftCount(llm, monkeypatch)
    embedding, direction = repeating[1].model.embed_tokens.weight, torch.linspace(-1, 1, WIDTH)
    # As drafts have no value of the token before yet, they fail.
    late = fh.gate("late", "model.layers.3", fh.Norm(), lag=1, over="token")
    lagging = fh.on("model.layers.1", fh.Add(VECTOR), when=fh.above("late", 0.0))
    read = fh.gate("read", "model.embed_tokens", fh.Dot(direction), over="token")
    prompts = [([2, 3, 4, 5] * 9)[: 10 + it] for it in range(24)]

    def plan(word: int) -> fh.Plan:
        """Ends a request at a word, as its row runs."""
        end = fh.gate("end", "model.embed_tokens", fh.Cosine(embedding[word]), over="token")
        return fh.Plan(end, fh.stop(when=fh.above("end", 0.999)), read, fh.keep("@gate.read"))

    def served(plans: list[fh.Plan], resets: float) -> dict[int, Any]:
        outputs: dict[int, Any] = {}
        for number, each in enumerate(plans):
            prompt = {"prompt_token_ids": prompts[number]}
            engine.add_request(str(number), prompt, sampling(each, NEW, ignore_eos=True))
        while engine.has_unfinished_requests():
            if rng.random() < resets:
                llm.reset_prefix_cache(reset_running_requests=True)
            outputs |= {int(each.request_id): each for each in engine.step() if each.finished}
        return outputs

    try:
        changing = fh.Plan(fh.on("model.layers.1", fh.Add(VECTOR), at="generated"))
        plans = [changing if number % 4 == 3 else fh.Plan() for number in range(len(prompts))]
        outputs = served(plans, 0.0)
        texts = [[*outputs[number].outputs[0].token_ids] for number in range(len(prompts))]
        assert count.preempted == 0
        ends = [
            rng.choice(
                [at for at, it in enumerate(text[:-1]) if it not in {2, 3, 4, 5, *text[:at]}]
            )
            for text in texts
        ]
        plans = [
            plan(text[end]) + (fh.Plan(late, lagging) if number % 4 == 3 else fh.Plan())
            for number, (text, end) in enumerate(zip(texts, ends, strict=True))
        ]
        for number, output in (each for _ in range(4) for each in served(plans, resets).items()):
            (answer,) = output.outputs
            text = texts[number][: ends[number] + 1]
            assert [*answer.token_ids] == text
            assert (answer.finish_reason, answer.stop_reason) == ("stop", "end")
            values = vllm.activations(llm, output).acts["@gate.read"]
            right = embedding[[*prompts[number], *text]].detach() @ direction
            torch.testing.assert_close(values, right)
        assert min(count.accepted, count.preempted) > len(prompts), count
    finally:
        stop(llm)
