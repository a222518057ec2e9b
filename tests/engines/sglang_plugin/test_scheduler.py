"""A scheduler of SGLang in this process: each answer is what transformers gives alone."""

from __future__ import annotations

import base64
import dataclasses
import gc
import json
import re
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

import ferrohook as fh
import support.engines
from ferrohook.engines import capabilities, sglang
from ferrohook.engines.sglang.front_end import reporting
from ferrohook.engines.sglang.options import SglangOptions
from ferrohook.engines.sglang.supported import CAPABILITIES, refusals
from ferrohook.engines.sglang.worker import SchedulerWorker
from ferrohook.engines.wire import FIELD, GATES, NAME, VECTORS, packed_uploads
from support import engine_scenes as scenes
from support.dictionary_jobs import FeatureJob, dictionaries, random_feature_jobs
from support.engine_scenes import (
    HOSTILE,
    NEW,
    POSITIONS_FROM_THE_END,
    PROMPT,
    VECTOR,
    Given,
    steering,
)
from support.engines import Change, Job
from support.serving import EOS, LAYERS, WIDTH, Answer, random_jobs, wrong_answers
from support.sglang_engine import abort, answer_of, check_streamed, request, serve
from support.transcoding import BAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.sglang_engine import Local


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


def ask(local: Local, job: Job, new_tokens: int = NEW, **extra: Any) -> tuple[Answer, Any]:
    """Serves one request; returns the answer, and SGLang's."""
    found = local.run([[request("one", job.prompt, job.plan, new_tokens, **extra)]])["one"]
    return answer_of(found, job), found


def refusal(local: Local, plan: Any, **extra: Any) -> str:
    """Returns the reason why a request is answered with 400, before it is scheduled."""
    before = local.scheduler.forward_ct
    finish = local.run([[request("one", PROMPT, plan, **extra)]])["one"]["finish"]
    assert finish["type"] == "abort"
    assert finish["status_code"] == 400
    assert local.scheduler.forward_ct == before
    return str(finish["message"])


def opened(local: Local) -> int:
    """The number of plans that are open."""
    return len(local.worker.requests)


def asker(local: Local) -> scenes.Ask:
    """Returns how the scenes of all engines ask this one."""

    def asked(prompt: list[int], plan: Any, new_tokens: int) -> Given:
        found = local.run([[request("one", prompt, plan, new_tokens)]])["one"]
        assert found["finish"]["type"] != "abort", found["finish"]
        captured = sglang.activations(found) if FIELD in found else sglang.Captured({}, {})
        return Given([*found["tokens"]], *captured, found["cached"])

    return asked


@pytest.mark.parametrize("aborted", [0.0, 0.2])
def test_random_requests(
    llama: Any, local: Local, aborted: float, request: pytest.FixtureRequest
) -> None:
    number = request.config.getoption("requests") or 60
    jobs = random_jobs(number, seed=7, gates=0.4, transcoders=0.4)
    answers = serve(local, jobs, seed=11, aborted=aborted)
    assert wrong_answers(llama[1], jobs, answers, NEW) == []
    assert len(answers) == len(jobs) if not aborted else 0 < len(answers) < len(jobs)
    assert opened(local) == 0


def test_plans_end_their_requests(local: Local) -> None:
    """The gate's name is reported as what matched; other requests go on."""
    stops = scenes.random_stops(asker(local), 12)
    requests = []
    for number, each in enumerate(stops):
        streamed = bool(number % 2)
        requests.append(request(f"stops-{number}", each.prompt, each.plan, NEW, stream=streamed))
        requests.append(request(f"goes-on-{number}", each.prompt, None, NEW))
    found = local.run([requests])
    for number, each in enumerate(stops):
        ended = found[f"stops-{number}"]
        assert [*ended["tokens"]] == each.text
        assert ended["finish"] == {"type": "stop", "matched": "the end"}
        captured = sglang.activations(ended)
        positions = captured.positions["@gate.the end"].tolist()
        assert positions == [*range(len(each.prompt) + len(each.text))]
        assert (GATES in ended) == number % 2
        if GATES in ended:
            check_streamed(ended, len(each.prompt), ran_last=1)
        goes_on = found[f"goes-on-{number}"]
        assert goes_on["finish"].get("matched") != "the end"
        assert [*goes_on["tokens"]][: len(each.text)] == each.text


@pytest.mark.parametrize("planned", [False, True])
def test_fields_go_to_requests_with_a_plan(planned: bool) -> None:
    """SGLang gives each request of a step the fields of all, with None in place of its own."""
    params = {"custom_params": {NAME: "{}"}} if planned else {}
    state = types.SimpleNamespace(
        obj=types.SimpleNamespace(sampling_params=params),
        customized_info_accumulated={},
        output_ids=[7, 8],
    )
    info = {FIELD: [[b"a"], [None]], GATES: [[{}], [None]], "others": [[1], [2]]}
    found: list[Any] = []
    reporting(lambda *given: found.append(given), None, {}, state, info, 1, None)
    ((_, _, _, given, index, _),) = found
    assert index == 1
    assert given.keys() == (info.keys() if planned else {"others"})
    earlier = {FIELD: [None, None], GATES: [None, None]} if planned else {}
    assert state.customized_info_accumulated == earlier


def test_rows_are_those_of_the_tokens(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a span have, in each step, the tokens of its request at its positions."""
    worker, model = local.worker, local.scheduler.tp_worker.model_runner.model
    inner, seen = model.forward, []
    reqs: dict[str, Any] = {}
    take = worker.take_request

    def taking(req: Any) -> None:
        take(req)
        reqs[req.ferrohook] = req

    def checked(input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        for _, span in worker._in_step:
            req = reqs[span.request_id]
            tokens = [*req.origin_input_ids, *req.output_ids]
            rows = slice(span.first_row, span.first_row + span.rows)
            wanted = tokens[span.position : span.position + span.rows]
            # The overlap runs a token before its request has it.
            assert input_ids[rows].tolist()[: len(wanted)] == wanted
            assert positions[rows].tolist() == [*range(span.position, span.position + span.rows)]
            seen.append(span.rows)
        return inner(input_ids, positions, *args, **kwargs)

    monkeypatch.setattr(worker, "take_request", taking)
    monkeypatch.setattr(model, "forward", checked)
    serve(local, [job for job in random_jobs(40, seed=5) if job.plan is not None], seed=3)
    assert max(seen) > 16
    assert min(seen) == 1


def test_a_cache_is_shared_within_a_plan_only(llama: Any, local: Local) -> None:
    local.scheduler.flush_cache()
    scenes.a_cache_is_shared_within_a_plan_only(llama[1], asker(local))


def test_salts_and_keys_of_a_client_count_beside_ours(llama: Any, local: Local) -> None:
    local.scheduler.flush_cache()
    own: list[dict[str, Any]] = [{}, {"cache_salt": "mine"}, {"extra_key": "mine"}]
    for job in (steering(), Job(PROMPT)):
        for expected in (0, 1):
            for extra in own:
                given, found = ask(local, job, **extra)
                job.check(llama[1], given, NEW)
                assert bool(found["cached"]) == bool(expected)


@pytest.mark.parametrize("at", POSITIONS_FROM_THE_END)
def test_positions_from_the_prompts_end_are_not_cached_for_longer_prompts(
    llama: Any, local: Local, at: Any
) -> None:
    local.scheduler.flush_cache()
    scenes.positions_from_the_prompts_end_are_not_cached_for_longer_prompts(
        llama[1], asker(local), at
    )


def test_a_capture_runs_cached_positions_again(llama: Any, local: Local) -> None:
    scenes.a_capture_runs_cached_positions_again(llama[1], asker(local))


def test_a_stop_token_cuts_captures_off(local: Local) -> None:
    """The overlap has run one position more by then."""
    plain, _ = ask(local, Job(PROMPT))
    job = Job(PROMPT, (), ("model.layers.0",))
    stop = {"stop_token_ids": [plain.generated_tokens[4]]}
    given, found = ask(local, job, params=stop)
    assert found["finish"]["type"] == "stop"
    assert len(given.acts["model.layers.0"]) == len(PROMPT) + len(given.generated_tokens) - 1


@pytest.mark.parametrize("at", [None, "last_prompt"])
@pytest.mark.parametrize("length", [1, 40])
def test_a_request_for_no_token_captures_its_prompt(local: Local, length: int, at: Any) -> None:
    plan = fh.Plan(fh.keep("model.layers.0", at=at))
    found = local.run([[request(str(new), PROMPT[:length], plan, new) for new in (0, 1)]])
    none, one = (sglang.activations(found[new]) for new in ("0", "1"))
    assert len(none.acts["model.layers.0"]) == (length if at is None else 1)
    torch.testing.assert_close(none.acts["model.layers.0"], one.acts["model.layers.0"])
    assert none.positions["model.layers.0"].tolist() == one.positions["model.layers.0"].tolist()


def test_captures_have_labels_dtypes_and_parts(local: Local) -> None:
    plan = fh.Plan(
        fh.keep("model.layers.1", at="last_prompt", label="half", dtype=torch.float16),
        fh.keep("model.layers.1", at="last_prompt"),
        fh.keep("model.layers.1.self_attn.qkv_proj", at=slice(0, 3)),
        fh.keep("model.layers.2", slice=(..., slice(0, 8))),
    )
    acts = sglang.activations(local.run([[request("one", PROMPT, plan)]])["one"]).acts
    assert acts["half:model.layers.1"].dtype == torch.float16
    torch.testing.assert_close(
        acts["half:model.layers.1"].float(), acts["model.layers.1"], rtol=1e-2, atol=1e-2
    )
    assert acts["model.layers.1.self_attn.qkv_proj"].shape == (3, 3 * WIDTH)
    assert acts["model.layers.2"].shape == (len(PROMPT) + NEW - 1, 8)
    assert len(acts) == 4


MODULES = ["embed_tokens", "layers.1", "layers.1.self_attn", "layers.1.self_attn.qkv_proj"]
MODULES += ["layers.1.self_attn.attn", "layers.1.self_attn.o_proj", "layers.1.mlp"]
MODULES += ["layers.1.mlp.gate_up_proj", "layers.1.mlp.down_proj", "layers.1.input_layernorm"]
MODULES += ["layers.0.input_layernorm", "layers.1.post_attention_layernorm", "norm"]


@pytest.mark.parametrize("name", MODULES)
def test_a_change_of_any_module_ends_no_scheduler(llama: Any, local: Local, name: str) -> None:
    """Next to a request without a plan, whose answer is as ever."""
    plan = fh.Plan(fh.on(f"model.{name}", fh.Scale(0.5)), fh.keep(f"model.{name}"))
    plain = Job(PROMPT[:30])
    found = local.run([[request("a", PROMPT[:30], plan), request("b", plain.prompt)]])
    assert found["a"]["finish"]["type"] != "abort"
    acts = sglang.activations(found["a"]).acts[f"model.{name}"]
    assert len(acts) == 30 + len(found["a"]["tokens"]) - 1
    plain.check(llama[1], answer_of(found["b"], plain), NEW)


@pytest.mark.parametrize("phase", ["keep", "change"])
def test_inputs(llama: Any, local: Local, phase: str) -> None:
    name = "model.layers.1.mlp.down_proj"
    twin, steps = llama[1].get_submodule(name), []
    vector = torch.linspace(-2, 2, 128)  # the width of the MLP, not of the layer's output
    if phase == "keep":
        plan = fh.Plan(fh.keep(name, inputs=True))
        hook = twin.register_forward_pre_hook(lambda _module, args: steps.append(args[0][0]))
    else:
        plan = fh.Plan(fh.on(name, fh.Add(vector), phase="forward_pre"))
        hook = twin.register_forward_pre_hook(lambda _module, args: (args[0] + vector,))
    found = local.run([[request("one", PROMPT, plan)]])["one"]
    Job(PROMPT).check(llama[1], Answer([*found["tokens"]], {}), NEW)
    hook.remove()
    if phase == "keep":
        acts = sglang.activations(found).acts[name]
        torch.testing.assert_close(acts, steps[0], rtol=1e-3, atol=1e-3)


def entry(**fields: Any) -> dict[str, Any]:
    return {"version": 1, "entries": [fields]}


ADD = {"type": "Add", "vector": {"dtype": "float32", "shape": [1], "base64": "AACAPw=="}}


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("{", "not valid JSON"),
        (5, "expected an object"),
        (entry(type="on", what="model.layers.9", hook=ADD), "closest names.*model.layers.0"),
        (entry(type="on", what="model.layers.1", hook={"type": "Exec"}), "type is one of Add"),
        (entry(type="keep", what="model.layers.1.self_attn.q_proj"), "qkv_proj"),
        (entry(type="keep", what="lm_head"), "never runs"),
        (entry(type="keep", what="model.layers.0.self_attn.rotary_emb"), "4 times"),
        (entry(type="keep", what="model.layers.1", stop=True), "stop is not supported"),
        (entry(type="keep", what="model.layers.1", inputs=True), "inputs=True.*has none"),
        (entry(type="keep", what="model.layers.1", output_index=5), "output_index=5"),
        (entry(type="on", what="model.layers.1", hook=ADD, phase="forward_pre"), "has none"),
        (
            entry(type="on", what="model.layers.1", hook=ADD, phase="backward"),
            "does not compute gradients",
        ),
        (
            entry(type="on", what="model.layers.1", hook={**ADD, "vector": {"tensor": "nobody"}}),
            "nobody",
        ),
    ],
)
def test_a_bad_plan_is_refused_before_it_is_scheduled(local: Local, plan: Any, reason: str) -> None:
    text = plan if isinstance(plan, str | int) else json.dumps(plan)
    assert re.search(reason, refusal(local, text))
    assert opened(local) == 0


def test_a_vector_of_another_width_is_refused(local: Local) -> None:
    plan = fh.Plan(fh.on("model.layers.1", fh.Add(torch.ones(3))))
    assert "width of 3" in refusal(local, plan)


def test_transcoders_that_do_not_fit_are_refused(local: Local) -> None:
    local.put_dictionaries({each.hook.dictionary.name: each.hook.dictionary for each, _ in BAD})
    for each, reason in BAD:
        params = local.with_uploads(fh.Plan(each).to_json())
        assert re.search(reason, found := refusal(local, None, params=params)), (reason, found)
    assert opened(local) == 0
    local.drop_dictionaries()


def test_captures_are_limited(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fh.Plan(fh.keep(["model.layers.*", "model.norm"]))
    needed = (len(PROMPT) + NEW - 1) * (LAYERS + 1) * WIDTH * 4
    options = local.worker._admission._options
    monkeypatch.setitem(vars(options), "capture_bytes", needed - 1)
    assert f"{needed:,} bytes, more than capture_bytes" in refusal(local, plan)
    monkeypatch.setitem(vars(options), "capture_bytes", needed)
    found = local.run([[request("one", PROMPT, plan)]])["one"]
    assert len(sglang.activations(found).acts) == LAYERS + 1


@pytest.mark.parametrize("planned", [False, True])
def test_salts_cannot_be_forged(local: Local, planned: bool) -> None:
    """Clients may see salts of plans among the keys of the cache, but cannot pass them."""
    plan = steering().plan if planned else None
    for forged in ("ferrohook:", "ferrohook:1234"):
        assert "reserved for ferrohook" in refusal(local, plan, cache_salt=forged)


FAILS = fh.Plan(fh.on("model.layers.1", fh.Add(VECTOR)), fh.keep("model.layers.1", max_bytes=1))


def test_a_plan_that_fails_ends_its_request_alone(llama: Any, local: Local) -> None:
    """No token of the step that failed is answered, and no later request finds its writes."""
    local.scheduler.flush_cache()
    steered, plain = steering(), Job(PROMPT)
    found = local.run(
        [
            [request("fails", PROMPT, FAILS), request("other", PROMPT, steered.plan)],
            [request("plain", PROMPT)],
        ]
    )
    finish = found["fails"]["finish"]
    assert finish["type"] == "abort"
    assert finish["status_code"] == 500
    assert "max_bytes" in finish["message"]
    assert "model.layers.1" in finish["message"]
    assert found["fails"]["tokens"] == []
    steered.check(llama[1], answer_of(found["other"], steered), NEW)
    plain.check(llama[1], answer_of(found["plain"], plain), NEW)
    again = local.run([[request("again", PROMPT, FAILS)]])["again"]
    assert again["cached"] == 0
    assert opened(local) == 0


def test_a_plan_that_fails_later_keeps_the_tokens_before(llama: Any, local: Local) -> None:
    plain, _ = ask(local, Job(PROMPT))
    job = Job(PROMPT, (), ("model.layers.2",))
    row = WIDTH * 4
    whole = len(PROMPT) + len(plain.generated_tokens) - 1
    fits = fh.Plan(fh.keep("model.layers.2", max_bytes=whole * row))
    fails = fh.Plan(fh.keep("model.layers.2", max_bytes=(len(PROMPT) + 4) * row))
    found = local.run([[request("fits", PROMPT, fits), request("fails", PROMPT, fails)]])
    assert found["fails"]["finish"]["type"] == "abort"
    assert found["fails"]["tokens"] == plain.generated_tokens[:5]
    with pytest.raises(KeyError, match="no captures"):
        sglang.activations(found["fails"])
    # An engine that runs ahead of the end runs a row that the budget has no bytes for.
    job.check(llama[1], answer_of(found["fits"], job), NEW)


def test_a_step_that_fails_ahead_of_a_stop_fails_nobody(local: Local) -> None:
    """The overlap runs it before it knows that the request has ended."""
    plain, _ = ask(local, Job(PROMPT))
    stop = {"stop_token_ids": [plain.generated_tokens[4]]}
    ended, _ = ask(local, Job(PROMPT), params=stop)
    rows = len(PROMPT) + len(ended.generated_tokens) - 1
    plan = fh.Plan(fh.keep("model.layers.2", max_bytes=rows * WIDTH * 4))
    found = local.run([[request("one", PROMPT, plan, params=stop)]])["one"]
    assert found["finish"]["type"] == "stop", found["finish"]
    assert found["tokens"] == ended.generated_tokens
    assert len(sglang.activations(found).acts["model.layers.2"]) == rows


@pytest.mark.parametrize("hook", [*HOSTILE])
def test_neighbours_of_infinite_rows_are_not_reached(llama: Any, local: Local, hook: str) -> None:
    """Neither requests in the same batches nor requests that get the slots later."""
    jobs = [Job(job.prompt) for job in random_jobs(18, seed=3)]
    plan = HOSTILE[hook]
    # Drawn, as the probabilities of an infinite row would end the scheduler.
    drawn = {"params": {"temperature": 1.0, "top_k": 20, "ignore_eos": True}}

    def feed() -> Iterator[list[Any]]:
        for number, job in enumerate(jobs):
            yield [
                request(f"plain {number}", job.prompt),
                request(f"bad {number}", job.prompt, plan, **drawn),
            ]

    found = local.run(feed())
    later = local.run([[request(f"plain {n}", job.prompt)] for n, job in enumerate(jobs)])
    for number, job in enumerate(jobs):
        bad = found[f"bad {number}"]["finish"]
        assert bad["type"] == "abort"
        assert "made its rows NaN, infinite" in bad["message"]
        for answers in (found, later):
            job.check(llama[1], answer_of(answers[f"plain {number}"], job), NEW)
    for pool in ("k_buffer", "v_buffer"):
        for buffer in getattr(local.scheduler.tp_worker.model_runner.token_to_kv_pool, pool):
            assert torch.isfinite(buffer).all()
    assert opened(local) == 0


def test_requests_that_are_cancelled_in_the_queue_close_their_plans(local: Local) -> None:
    """SGLang cancels all whose ids begin alike; they come to no step and no answer any more."""
    jobs = [steering() for _ in range(40)]
    sent = [request(f"many-{n}", job.prompt, job.plan) for n, job in enumerate(jobs)]
    counts = []

    def feed() -> Iterator[list[Any]]:
        yield from (sent, [], [abort("many-")])
        counts.append(opened(local))
        yield []

    gc.disable()  # plans close with the step that cancels, not some time later
    try:
        found = local.run(feed())
    finally:
        gc.enable()
    ends = [each["finish"] for each in found.values()]
    assert all(not end or end["type"] == "abort" for end in ends)
    assert counts[0] < len(jobs) / 2  # the running requests, until their next step
    assert opened(local) == 0


def test_requests_of_one_id_do_not_mix(
    llama: Any, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients choose the ids."""
    jobs = [steering(), Job(PROMPT[:40], (Change(2, fh.Scale(0.5), None),)), Job(PROMPT[:30])]
    take, taken = local.worker.take_request, []
    monkeypatch.setattr(local.worker, "take_request", lambda req: (take(req), taken.append(req)))
    local.run([[request("same", it.prompt, it.plan) for it in jobs]])
    for job, req in zip(jobs, taken, strict=True):
        job.check(llama[1], Answer([*req.output_ids_through_stop], {}), NEW)


def test_python_functions_do_not_travel() -> None:
    plan = fh.Plan(fh.on("model.layers.0", lambda _module, _args, output: output))
    with pytest.raises(fh.HookTypeError, match="cannot hold Python functions"):
        sglang.custom_params(plan)


@pytest.mark.parametrize("plan", [{"entries": ["x" * 200]}, "x" * 200], ids=["objects", "text"])
def test_a_plan_that_is_too_long_is_refused_before_it_is_read(plan: Any) -> None:
    """All others wait while the scheduler reads it."""
    worker: Any = object.__new__(SchedulerWorker)
    worker.served, worker._options = object(), SglangOptions(plan_bytes=100)
    req = types.SimpleNamespace(beam_group=None, session=None, input_embeds=None)
    with pytest.raises(ValueError, match="more than plan_bytes=100"):
        worker._open(req, {"ferrohook": plan})


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"tp_size": 2}, "tensor parallelism"),
        ({"dp_size": 2}, "data parallelism"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_memory_saver": True}, "memory saver"),
        ({"is_generation": False}, "embedding models"),
        ({"speculative_algorithm": "NGRAM"}, "speculative decoding"),
    ],
)
def test_configurations_are_refused_by_name(options: dict[str, Any], feature: str) -> None:
    pool = type("MHATokenToKVPool", (), {})()
    runner = types.SimpleNamespace(
        decode_cuda_graph_runner=None, prefill_cuda_graph_runner=None, token_to_kv_pool=pool
    )
    scheduler = types.SimpleNamespace(
        tp_worker=types.SimpleNamespace(model_runner=runner),
        model_config=types.SimpleNamespace(is_multimodal=False),
        is_generation=options.get("is_generation", True),
    )
    assert refusals(scheduler, types.SimpleNamespace(**options)) == {
        feature: CAPABILITIES.refused[feature]
    }


def test_capabilities() -> None:
    found = capabilities("sglang")
    assert found.works
    assert "tensor parallelism" in found.refused


def test_dictionaries_have_names(llama: Any, local: Local) -> None:
    """Requests of one batch that set and read features; a name means one dictionary at a time."""

    def put(seed: int) -> None:
        made = dictionaries(seed).values()
        local.put_dictionaries({str(each.name): each for each in made})

    def asked(name: str, job: FeatureJob) -> Any:
        return request(name, job.prompt, params=local.with_uploads(job.plan.to_json()))

    def check(jobs: Sequence[FeatureJob]) -> None:
        found = local.run([[asked(str(number), job) for number, job in enumerate(jobs)]])
        for number, job in enumerate(jobs):
            answer = found[str(number)]
            job.check(llama[1], Given(answer["tokens"], *sglang.activations(answer), 0))

    jobs = random_feature_jobs(8)
    put(seed=0)
    check(jobs)
    waiting = asked("late", jobs[0])
    # Others of these names: the cache still has values changed by the former ones.
    put(seed=1)
    check([dataclasses.replace(job, seed=1) for job in jobs])
    late = local.run([[waiting]])["late"]  # its plan names the former one
    jobs[0].check(llama[1], Given(late["tokens"], *sglang.activations(late), 0))
    local.drop_dictionaries()
    finish = local.run([[asked("gone", jobs[0])]])["gone"]["finish"]
    assert finish["status_code"] == 400
    assert "dictionaries were dropped before the request came: [" in finish["message"]
    assert "no dictionary named 'sae/" in refusal(local, jobs[0].plan)


@pytest.mark.parametrize("digests", ["", "5", "{", '{"a": []}', '{"a": "gone"}', "[[1, 2]]"])
def test_digests_that_a_client_made_up_are_400(local: Local, digests: str) -> None:
    data = base64.b64encode(packed_uploads({}, digests=digests)).decode()
    params = {"custom_params": {NAME: random_feature_jobs(1)[0].plan.to_json(), VECTORS: data}}
    finish = local.run([[request("one", PROMPT, params=params)]])["one"]["finish"]
    assert finish["status_code"] == 400
