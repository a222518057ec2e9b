"""vLLM in this process, eager: each answer is what transformers gives for the request alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

from prometheus_client import REGISTRY

import ferrohook as fh
import support.engines
from ferrohook.engines import capabilities, vllm
from ferrohook.engines.vllm.calls import call
from ferrohook.engines.vllm.plugin import connect
from ferrohook.engines.wire import unpacked
from ferrohook.plans.entries import KeepEntry
from support import engine_scenes as scenes
from support.dictionary_jobs import dictionaries, random_feature_jobs
from support.engine_scenes import (
    NEW,
    POSITIONS_FROM_THE_END,
    PROMPT,
    VECTOR,
    Given,
    steering,
)
from support.engines import Change, Job
from support.serving import wrong_answers
from support.transcoding import BAD
from support.vllm_engine import (
    EOS,
    LAYERS,
    WIDTH,
    Answer,
    patience,
    random_jobs,
    sampling,
    serve,
    start,
    state,
    stop,
)


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


def answer(llm: Any, job: Job, new_tokens: int = NEW) -> tuple[Answer, Any]:
    """Serves one request; returns the answer, and vLLM's output."""
    params = sampling(job.plan, new_tokens)
    (output,) = llm.generate({"prompt_token_ids": job.prompt}, params, use_tqdm=False)
    acts = vllm.activations(llm, output).acts if job.captures else {}
    return Answer([*output.outputs[0].token_ids], acts), output


def asker(llm: Any) -> scenes.Ask:
    """Returns how the scenes of all engines ask this one."""

    def asked(prompt: list[int], plan: Any, new_tokens: int) -> Given:
        params = sampling(plan, new_tokens)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        captured = vllm.Captured({}, {})
        if any(isinstance(entry, KeepEntry) for entry in (plan.entries if plan else ())):
            captured = vllm.activations(llm, output)
        return Given([*output.outputs[0].token_ids], *captured, output.num_cached_tokens)

    return asked


@pytest.mark.parametrize(
    ("kind", "options", "preempts"),
    [
        ("llama", {"enable_prefix_caching": False}, False),
        # Blocks for a few of the requests: the others are preempted.
        pytest.param(
            "llama",
            {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 40},
            True,
            marks=pytest.mark.v2,
        ),
        pytest.param("qwen2", {"max_num_batched_tokens": 32}, False, marks=pytest.mark.v2),
        ("moe", {}, False),
    ],
)
def test_random_requests(  # noqa: PLR0913, PLR0917 (fixtures)
    models: Any,
    kind: str,
    options: dict[str, Any],
    preempts: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, model = models[kind]
    number = request.config.getoption("requests") or 36
    jobs = random_jobs(number, seed=7, gates=0.4, transcoders=0.4)
    engine = start(folder, **options)
    try:
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []
        monkeypatch.setattr(
            scheduler,
            "_preempt_request",
            lambda it, *args, **kwargs: (preempted.append(it), preempt(it, *args, **kwargs))[1],
        )
        answers = serve(engine, jobs, seed=11)
        serve(engine, [Job([5, 6, 7])], seed=11)  # reports that the others finished
        numbers = state(engine)
    finally:
        stop(engine)
    assert wrong_answers(model, jobs, answers, NEW) == []
    assert len(answers) == len(jobs)
    assert bool(preempted) == preempts
    assert scheduler.ferrohook_gates == {}
    assert numbers["requests"] == 0
    assert numbers["results"] == 0


def test_embeddings_computed_before_the_forward_are_no_module_of_a_plan(models: Any) -> None:
    """An engine that takes embeddings as prompts embeds all tokens where no hook fires."""
    folder, model = models["llama"]
    engine = start(folder, enable_prompt_embeds=True)
    try:
        for plan in (
            fh.Plan(fh.on("model.embed_tokens", fh.Add(VECTOR))),
            fh.Plan(fh.keep("model.embed_tokens")),
        ):
            with pytest.raises(ValueError, match=r"'model\.embed_tokens' cannot.*never runs"):
                engine.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
        job = Job(PROMPT, (Change(1, fh.Add(VECTOR), "generated"),), ("model.layers.2",))
        embeds = model.get_input_embeddings()(torch.tensor(PROMPT))
        for prompt in ({"prompt_token_ids": PROMPT}, {"prompt_embeds": embeds}):
            (output,) = engine.generate(prompt, sampling(job.plan, NEW), use_tqdm=False)
            acts = vllm.activations(engine, output).acts
            job.check(model, Answer([*output.outputs[0].token_ids], acts), NEW)
    finally:
        stop(engine)


@pytest.mark.v2
def test_plans_end_their_requests(llm: Any) -> None:
    """The gate's name is the stop reason; other requests go on."""
    stops = scenes.random_stops(asker(llm), 12)
    assert {len(each.text) for each in stops} > {0, 1}
    engine = llm.llm_engine
    for number, each in enumerate(stops):
        prompt = {"prompt_token_ids": each.prompt}
        engine.add_request(f"stops-{number}", prompt, sampling(each.plan, NEW))
        engine.add_request(f"goes-on-{number}", prompt, sampling(None, NEW))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each for each in engine.step() if each.finished}
    for number, each in enumerate(stops):
        (text,) = outputs[f"stops-{number}"].outputs
        assert [*text.token_ids] == each.text
        assert (text.finish_reason, text.stop_reason) == ("stop", "the end")
        captured = vllm.activations(llm, outputs[f"stops-{number}"])
        positions = captured.positions["@gate.the end"].tolist()
        assert positions == [*range(len(each.prompt) + len(each.text))]
        value = float(captured.acts["@gate.the end"][-1])
        assert value == pytest.approx(each.value, abs=1e-3)
        (text,) = outputs[f"goes-on-{number}"].outputs
        assert text.stop_reason != "the end"
        assert [*text.token_ids][: len(each.text)] == each.text


@pytest.mark.v2
def test_rows_are_those_of_the_tokens(llm: Any) -> None:
    """Rows of a span have, in each step, the tokens of its request at its positions."""
    engine = llm.llm_engine
    model = engine.model_executor.driver_worker.worker.model_runner.get_model()
    requests = engine.engine_core.engine_core.scheduler.requests
    seen = []

    def check(_model: object, _args: object, inputs: dict[str, Any]) -> None:
        for _, span in engine.model_executor.driver_worker.ferrohook._in_step:
            rows = slice(span.first_row, span.first_row + span.rows)
            tokens = requests[span.request_id].all_token_ids
            wanted = [*tokens][span.position : span.position + span.rows]
            assert inputs["input_ids"][rows].tolist() == wanted
            positions = [*range(span.position, span.position + span.rows)]
            assert inputs["positions"][rows].tolist() == positions
            seen.append(span.rows)

    hook = model.register_forward_pre_hook(check, with_kwargs=True)
    jobs = [job for job in random_jobs(40, seed=5) if job.plan is not None]
    try:
        serve(llm, jobs, seed=3)
    finally:
        hook.remove()
    assert max(seen) > 32
    assert min(seen) == 1


@pytest.mark.v2
def test_cancelled_requests_leave_nothing(models: Any, llm: Any) -> None:
    _, model = models["llama"]
    jobs = random_jobs(40, seed=23)
    answers = serve(llm, jobs, seed=29, aborted=0.2)
    assert wrong_answers(model, jobs, answers, NEW) == []
    assert 0 < len(answers) < len(jobs)
    answer(llm, Job([5, 6]))
    assert state(llm)["requests"] == 0
    answer(llm, steering())  # tells the worker which captures were abandoned
    assert state(llm)["results"] == 0


def test_requests_without_a_plan_are_as_without_the_plug_in(models: Any, llm: Any) -> None:
    folder, _ = models["llama"]
    jobs = [Job(job.prompt) for job in random_jobs(24, seed=41)]
    before = state(llm)["steps"]
    with_plans = {**serve(llm, [*jobs, *random_jobs(24, seed=43)], seed=47)}
    answers = serve(llm, jobs, seed=53)
    steps = state(llm)["steps"]
    code = f"""
import json, sys
sys.path.insert(0, "tests")
from support.vllm_engine import sampling, start
if __name__ == "__main__":
    llm = start({str(folder)!r})
    prompts = [{{"prompt_token_ids": ids}} for ids in json.load(sys.stdin)]
    outputs = llm.generate(prompts, sampling(None, {NEW}), use_tqdm=False)
    assert not hasattr(llm.llm_engine.model_executor.driver_worker.worker, "ferrohook")
    print(json.dumps([list(it.outputs[0].token_ids) for it in outputs]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([job.prompt for job in jobs]),
        env={**os.environ, "VLLM_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=0.4 * patience(),
        check=True,
    )
    plain = json.loads(ran.stdout.strip().splitlines()[-1])
    assert [answers[number].generated_tokens for number in range(len(jobs))] == plain
    assert [with_plans[number].generated_tokens for number in range(len(jobs))] == plain
    assert steps > before


@pytest.mark.v2
def test_a_cache_is_shared_within_a_plan_only(models: Any, llm: Any) -> None:
    llm.reset_prefix_cache()
    scenes.a_cache_is_shared_within_a_plan_only(models["llama"][1], asker(llm))


@pytest.mark.parametrize("at", POSITIONS_FROM_THE_END)
def test_positions_from_the_prompts_end_are_not_cached_for_longer_prompts(
    models: Any, llm: Any, at: Any
) -> None:
    llm.reset_prefix_cache()
    scenes.positions_from_the_prompts_end_are_not_cached_for_longer_prompts(
        models["llama"][1], asker(llm), at
    )


@pytest.mark.v2
def test_a_capture_runs_cached_positions_again(models: Any, llm: Any) -> None:
    scenes.a_capture_runs_cached_positions_again(models["llama"][1], asker(llm))


def test_captures_have_labels_dtypes_and_parts(llm: Any) -> None:
    plan = fh.Plan(
        fh.keep("model.layers.1", at="last_prompt", label="half", dtype=torch.float16),
        fh.keep("model.layers.1", output_index=0, at="last_prompt"),
        fh.keep("model.layers.1.self_attn.qkv_proj", at=slice(0, 3)),
    )
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    acts = vllm.activations(llm, output).acts
    assert acts["half:model.layers.1"].dtype == torch.float16
    assert acts["model.layers.1"].shape == (1, WIDTH)
    assert not torch.allclose(acts["half:model.layers.1"].float(), acts["model.layers.1"])
    assert acts["model.layers.1.self_attn.qkv_proj"].shape == (3, 3 * WIDTH)
    with pytest.raises(KeyError, match="were already fetched"):
        vllm.activations(llm, output)


def test_a_stop_string_cuts_captures_off(llm: Any) -> None:
    plain, _ = answer(llm, Job(PROMPT))
    word = f"w{plain.generated_tokens[4]}"
    plan = fh.Plan(fh.keep("model.layers.0"))
    params = sampling(plan, stop=[word])
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    (text,) = output.outputs
    assert text.finish_reason == "stop"
    acts = vllm.activations(llm, output).acts
    assert len(acts["model.layers.0"]) == len(PROMPT) + len(text.token_ids) - 1


@pytest.mark.parametrize(
    ("name", "index"),
    [("model.layers.1", 1), ("model.layers.1.mlp", None), ("model.layers.1.mlp.down_proj", None)],
)
def test_inputs_are_captured(models: Any, llm: Any, name: str, index: int | None) -> None:
    _, model = models["llama"]
    plan = fh.Plan(fh.keep(name, inputs=True, output_index=index))
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    inputs = vllm.activations(llm, output).acts[name]
    twin, steps = model.get_submodule(name), []
    hook = twin.register_forward_pre_hook(lambda _module, args: steps.append(args[0][0].clone()))
    ids = torch.tensor([[*PROMPT, *output.outputs[0].token_ids][:-1]])
    model(ids, use_cache=False)
    hook.remove()
    if index is not None:  # a layer's input is in two parts: hidden state and residual
        parts = fh.keep(name, inputs=True, output_index=2)
        (output,) = llm.generate(
            {"prompt_token_ids": PROMPT}, sampling(fh.Plan(parts)), use_tqdm=False
        )
        inputs = inputs + vllm.activations(llm, output).acts[name]
    torch.testing.assert_close(inputs, steps[0], rtol=1e-3, atol=1e-3)


def test_an_input_is_changed(models: Any, llm: Any) -> None:
    _, model = models["llama"]
    vector = torch.linspace(-2, 2, 128)  # the width of the MLP, not of the layer's output
    name = "model.layers.1.mlp.down_proj"
    plan = fh.Plan(fh.on(name, fh.Add(vector), phase="forward_pre"))
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda _module, args: (args[0] + vector,)
    )
    Job(PROMPT).check(model, Answer([*output.outputs[0].token_ids], {}), NEW)
    hook.remove()


def test_captured_inputs_have_their_own_size(llm: Any) -> None:
    name = "model.layers.1.mlp.down_proj"
    front_end = connect(llm)
    needed = (len(PROMPT) + NEW - 1) * 128 * 4
    object.__setattr__(front_end.options, "capture_bytes", needed - 1)
    try:
        plan = fh.Plan(fh.keep(name, inputs=True))
        with pytest.raises(ValueError, match=f"{needed:,} bytes, more than capture_bytes"):
            llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    finally:
        object.__setattr__(front_end.options, "capture_bytes", 2**26)


def test_captures_that_are_taken_early_do_not_end_a_plan(models: Any, llm: Any) -> None:
    """Blocks that the request writes then are found by others of the same plan."""
    _, model = models["llama"]
    job = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),), ("model.layers.2",))
    engine = llm.llm_engine
    engine.add_request("early", {"prompt_token_ids": PROMPT}, sampling(job.plan, NEW))
    engine.step()
    key = connect(llm).find("early").key
    ran = 64  # a chunk of the prompt
    taken = [
        unpacked(call(engine, "take", key, ran + 1)[0])
        for _ in range(2)  # a client that tries again gets them again
    ]
    first, second = (each.acts["model.layers.2"] for each in taken)
    assert len(first) == ran
    assert torch.equal(first, second)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [it for it in engine.step() if it.finished]
    answered = Answer([*outputs[0].outputs[0].token_ids], {})
    Job(PROMPT, job.changes).check(model, answered, NEW)
    answer(llm, Job([5]))
    assert (state(llm)["requests"], state(llm)["results"]) == (0, 0)


def entry(**fields: Any) -> dict[str, Any]:
    return {"version": 1, "entries": [fields]}


ADD = {"type": "Add", "vector": {"dtype": "float32", "shape": [1], "base64": "AACAPw=="}}


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("{", "not valid JSON"),
        (5, "expected an object"),
        ({1: object()}, "JSON of Plan.to_json"),
        (entry(type="on", what="model.layers.9", hook=ADD), "closest names.*model.layers.0"),
        (entry(type="on", what="model.layers.1", hook={"type": "Exec"}), "type is one of Add"),
        (entry(type="keep", what="model.layers.1.self_attn.q_proj"), "fuses.*qkv_proj"),
        (entry(type="keep", what="lm_head"), "never runs"),
        (entry(type="keep", what="model.layers.0.self_attn.rotary_emb"), "4 times"),
        (entry(type="keep", what="model.layers.1", stop=True), "stop is not supported"),
        (entry(type="keep", what="model.layers.1", calls="all"), "calls is not supported"),
        (entry(type="keep", what="model.layers.1", inputs=True), r"choose one of \[1, 2\]"),
        (entry(type="keep", what="model.embed_tokens", inputs=True), "inputs=True.*has none"),
        (
            entry(type="on", what="model.layers.1.self_attn", hook=ADD, phase="forward_pre"),
            "phase='forward_pre'.*has none: the engine calls it with keyword arguments.*or its own",
        ),
        (
            entry(type="on", what="model.layers.1", hook=ADD, prepend=True),
            "prepend is not supported",
        ),
        (
            entry(type="on", what="model.layers.1", hook=ADD, phase="backward"),
            "does not compute gradients",
        ),
        (
            entry(
                type="on",
                what="model.layers.1",
                hook={"type": "Add", "vector": {"tensor": "nobody"}},
            ),
            "no vector 'nobody' was uploaded",
        ),
    ],
)
def test_a_bad_plan_is_refused_before_it_is_scheduled(llm: Any, plan: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_vector_of_another_width_is_refused(llm: Any) -> None:
    plan = fh.Plan(fh.on("model.layers.1", fh.Add(torch.ones(3))))
    with pytest.raises(ValueError, match=r"width of 3.*has 64"):
        llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)


def test_transcoders_that_do_not_fit_are_refused(llm: Any) -> None:
    uploaded = {each.hook.dictionary.name: each.hook.dictionary for each, _ in BAD}
    vllm.put_dictionaries(llm, uploaded.values())
    for each, reason in BAD:
        with pytest.raises(ValueError, match=reason):
            llm.generate({"prompt_token_ids": PROMPT}, sampling(fh.Plan(each)), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    vllm.drop_dictionaries(llm, uploaded)


@pytest.mark.parametrize("index", [0, -1, slice(0, 2), (0, ...), [0, 1]])
def test_a_slice_keeps_all_tokens(llm: Any, index: Any) -> None:
    plan = fh.Plan(fh.keep("model.layers.1", slice=index))
    with pytest.raises(ValueError, match=r"slice= of keep.*all tokens"):
        llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    plan = fh.Plan(fh.keep("model.layers.1", slice=(..., slice(0, 8))))
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    assert vllm.activations(llm, output).acts["model.layers.1"].shape[1:] == (8,)


def test_captures_are_limited(models: Any, llm: Any) -> None:
    plan = fh.Plan(fh.keep(["model.layers.*", "model.norm"]))
    front_end = connect(llm)
    needed = (len(PROMPT) + NEW - 1) * (LAYERS + 1) * WIDTH * 4
    object.__setattr__(front_end.options, "capture_bytes", needed - 1)
    try:
        with pytest.raises(ValueError, match=f"{needed:,} bytes, more than capture_bytes"):
            llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
        object.__setattr__(front_end.options, "capture_bytes", needed)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
        assert len(vllm.activations(llm, output).acts) == LAYERS + 1
    finally:
        object.__setattr__(front_end.options, "capture_bytes", 2**26)


def test_captures_that_nobody_fetches_are_dropped(llm: Any) -> None:
    worker = llm.llm_engine.model_executor.driver_worker.ferrohook
    plan = fh.Plan(fh.keep("model.layers.0"))
    object.__setattr__(worker.options, "results_bytes", 3 * len(PROMPT) * WIDTH * 4)
    try:
        outputs = [
            llm.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)[0]
            for _ in range(5)
        ]
        answer(llm, Job([5]))
        assert state(llm)["results_bytes"] <= worker.options.results_bytes
        with pytest.raises(fh.HookError, match="dropped to stay within results_bytes"):
            vllm.activations(llm, outputs[0])
        assert len(vllm.activations(llm, outputs[-1]).acts["model.layers.0"]) > len(PROMPT)
        with pytest.raises(KeyError, match="were already fetched"):
            vllm.activations(llm, outputs[-1])
    finally:
        object.__setattr__(worker.options, "results_bytes", 2**30)


@pytest.mark.parametrize("aborted", [False, True])
def test_several_children_leave_nothing(llm: Any, aborted: bool) -> None:
    params = sampling(steering().plan)
    params.temperature, params.n = 1.0, 3
    engine = llm.llm_engine
    engine.add_request("children", {"prompt_token_ids": PROMPT}, params)
    before = REGISTRY.get_sample_value("ferrohook_rows_total")
    engine.step()
    if aborted:
        engine.abort_request(["children"])
    else:
        while engine.has_unfinished_requests():
            engine.step()
        ran = REGISTRY.get_sample_value("ferrohook_rows_total") - before
        assert ran >= 3 * len(PROMPT)
    assert not connect(llm)._running
    answer(llm, Job([5]))
    assert state(llm)["requests"] == 0


def test_vectors_have_names(models: Any, llm: Any) -> None:
    _, model = models["llama"]
    vllm.put_vectors(llm, {"calm": VECTOR})
    hook = {"type": "Add", "vector": {"tensor": "calm"}, "scale": 2.0}
    named = entry(type="on", what="model.layers.1", hook=hook)

    def check(vector: torch.Tensor) -> None:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling(named), use_tqdm=False)
        job = Job(PROMPT, (Change(1, fh.Add(vector, scale=2.0), None),))
        job.check(model, Answer([*output.outputs[0].token_ids], {}), NEW)

    check(VECTOR)
    # Another vector of the name: the cache still has values changed by the former.
    vllm.put_vectors(llm, {"calm": VECTOR.flip(0)})
    check(VECTOR.flip(0))
    vllm.drop_vectors(llm, ["calm"])
    with pytest.raises(ValueError, match="no vector 'calm'"):
        check(VECTOR)
    with pytest.raises(KeyError):
        vllm.drop_vectors(llm, ["calm"])
    with pytest.raises(fh.HookTypeError, match="'calm' must be a tensor"):
        vllm.put_vectors(llm, {"calm": [1.0]})  # type: ignore[dict-item]


def test_python_functions_do_not_travel() -> None:
    plan = fh.Plan(fh.on("model.layers.0", lambda _module, _args, output: output))
    with pytest.raises(fh.HookTypeError, match="cannot hold Python functions"):
        vllm.extra_args(plan)


def test_capabilities() -> None:
    found = capabilities("vllm")
    assert found.works
    assert "pipeline parallelism" in found.refused


def test_dictionaries_have_names(models: Any, llm: Any) -> None:
    """Requests of one batch that set and read features; a name means one dictionary at a time."""
    _, model = models["llama"]
    made = dictionaries()
    vllm.put_dictionaries(llm, made.values())
    jobs = random_feature_jobs(8)
    prompts = [{"prompt_token_ids": job.prompt} for job in jobs]

    def check(checked: Any) -> None:
        asked = [sampling(job.plan) for job in checked]
        for job, output in zip(checked, llm.generate(prompts, asked, use_tqdm=False), strict=True):
            captured = vllm.activations(llm, output)
            job.check(model, Given([*output.outputs[0].token_ids], *captured, 0))

    check(jobs)
    # Others of these names: the cache still has values changed by the former ones.
    vllm.put_dictionaries(llm, dictionaries(seed=1).values())
    check([dataclasses.replace(job, seed=1) for job in jobs])
    vllm.drop_dictionaries(llm, [each.name for each in made.values()])
    with pytest.raises(ValueError, match=r"no dictionary 'sae/\w+' was uploaded; uploaded: none"):
        check(jobs)
    with pytest.raises(KeyError):
        vllm.drop_dictionaries(llm, ["sae/relu"])
