"""SGLang's server on loopback, and its `Engine`: plans and captures on their ways to clients."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

import httpx

import ferrohook as fh
import support.engines
from ferrohook.client import Client, PlanFailedError, RequestRefusedError
from ferrohook.engines import sglang
from ferrohook.engines.wire import VECTORS
from support.dictionary_jobs import dictionaries, random_feature_jobs
from support.engine_scenes import Given, check_fuzzed, random_stops, spoilt_plans
from support.engine_server import check_unserved_routes
from support.engines import Change, Job
from support.gate_streams import check_chunks, read_along
from support.serving import EOS, WIDTH, Answer, random_jobs
from support.sglang_server import NEW, Server, custom, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [*range(10, 60)]
VECTOR = torch.linspace(-2, 2, WIDTH)
JOB = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),), ("model.layers.1", "model.norm"))
FAILS = fh.Plan(fh.keep("model.layers.1", max_bytes=1))
BAD = fh.Plan(fh.keep("model.layers.99")).to_json()


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def server(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Answers are logged as JSON too.
    logged = {"log_requests": True, "log_requests_level": 2, "log_requests_format": "json"}
    with serving(llama[0], tmp_path_factory.mktemp("server") / "log", **logged) as found:
        yield found


def generate(server: Server, job: Job, **extra: Any) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": NEW, **custom(job.plan)}
    return server.post("/generate", {"input_ids": job.prompt, "sampling_params": params, **extra})


def answer(given: dict[str, Any], job: Job) -> Answer:
    acts = sglang.activations(given).acts if job.kept else {}
    return Answer([*given["output_ids"]], acts)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_generate(llama: Any, server: Server) -> None:
    given = generate(server, JOB, rid="mine").json()
    JOB.check(llama[1], answer(given, JOB), NEW)
    assert given["meta_info"]["id"] == "mine"
    plain = Job(PROMPT)
    given = generate(server, plain).json()
    plain.check(llama[1], answer(given, plain), NEW)
    assert "ferrohook_captures" not in given["meta_info"]


def test_a_stream_ends_by_the_captures(llama: Any, server: Server) -> None:
    *others, last = events(generate(server, JOB, stream=True).text)
    JOB.check(llama[1], answer(last, JOB), NEW)
    assert others
    assert not [each for each in others if "ferrohook_captures" in each["meta_info"]]


def test_many_at_once_get_their_own(llama: Any, server: Server) -> None:
    jobs = random_jobs(24, seed=19)
    with ThreadPoolExecutor(12) as pool:
        given = [*pool.map(lambda job: generate(server, job).json(), jobs)]
    for job, each in zip(jobs, given, strict=True):
        job.check(llama[1], answer(each, job), NEW)


def openai(job: Job, *, chat: bool, **extra: Any) -> tuple[str, dict[str, Any]]:
    words = " ".join(f"w{token}" for token in job.prompt)
    body = {"model": "tiny", "temperature": 0, "max_tokens": NEW, "skip_special_tokens": False}
    body |= custom(job.plan) | extra
    if chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}
    return "/v1/completions", body | {"prompt": job.prompt}


def tokens(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


def test_structured_outputs(llama: Any, server: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": NEW, "regex": "(w5w6w7|w8w9)", **custom(JOB.plan)}
    sent = {"input_ids": JOB.prompt, "sampling_params": params}
    given = server.post("/generate", sent).json()
    assert given["text"].replace(" ", "") in {"w5w6w7", "w8w9"}  # as the grammar joins words
    JOB.check_acts(llama[1], answer(given, JOB))


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_has_its_own_captures(llama: Any, server: Server, stream: bool) -> None:
    path, body = openai(JOB, chat=False, stream=stream, n=3)
    response = server.post(path, body | {"temperature": 1.0})
    assert response.status_code == httpx.codes.OK, response.text
    texts: dict[int, str] = {}
    if stream:
        *parts, last = events(response.text)
        for choice in (it for part in parts for it in part["choices"]):
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice.get("text") or "")
        choices = last["ferrohook_captures"]
    else:
        choices = response.json()["choices"]
        texts = {choice["index"]: choice["text"] for choice in choices}
    assert sorted(texts) == [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        acts = sglang.activations(choice).acts
        JOB.check_acts(llama[1], Answer(tokens(texts[choice["index"]]), acts))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_routes(llama: Any, server: Server, chat: bool, stream: bool) -> None:
    response = server.post(*openai(JOB, chat=chat, stream=stream))
    assert response.status_code == httpx.codes.OK, response.text
    if stream:
        *parts, last = events(response.text)
        (choice,) = last["ferrohook_captures"]
        texts = [it.get("text", "") for part in parts for it in part["choices"]]
        given = tokens("".join(texts))
    else:
        (choice,) = response.json()["choices"]
        given = tokens(choice.get("text", ""))
    captured = sglang.activations(choice)
    if chat:  # its prompt is the template's
        assert captured.acts.keys() == {*JOB.kept}
        for name, rows in captured.acts.items():
            assert captured.positions[name].tolist() == [*range(len(rows))]
            assert len(rows) >= NEW
    else:
        given += [EOS] * (len(given) < NEW)
        JOB.check(llama[1], Answer(given, captured.acts), NEW)
    plain = server.post(*openai(Job(PROMPT), chat=chat, stream=stream))
    assert "ferrohook" not in plain.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_plan_is_400(server: Server, stream: bool) -> None:
    bad = {"input_ids": PROMPT, "stream": stream, "sampling_params": custom(BAD)}
    bodies = [("/generate", bad)]
    for chat in (False, True):
        path, body = openai(Job(PROMPT), chat=chat, stream=stream)
        bodies.append((path, body | custom(BAD)))
    for path, body in bodies:
        response = server.post(path, body)
        assert "closest names" in response.text
        assert response.status_code == httpx.codes.BAD_REQUEST or stream


def test_a_plan_that_fails_is_500_with_the_reason(server: Server) -> None:
    params = {"max_new_tokens": NEW, **custom(FAILS)}
    response = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert "max_bytes" in response.text


def test_fuzzed_plans_end_no_server(
    llama: Any, server: Server, request: pytest.FixtureRequest
) -> None:
    plans = spoilt_plans(request.config.getoption("requests") or 60)

    def status(plan: str) -> int:
        params = {"max_new_tokens": 1, **custom(plan)}
        body = {"input_ids": PROMPT[:4], "sampling_params": params}
        return server.post("/generate", body).status_code

    with ThreadPoolExecutor(8) as pool:
        check_fuzzed([*pool.map(status, plans)])
    given = generate(server, JOB).json()
    JOB.check(llama[1], answer(given, JOB), NEW)


def test_a_client_that_goes_leaves_nothing(llama: Any, server: Server) -> None:
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": custom(JOB.plan)}
    body["sampling_params"] |= {"max_new_tokens": 200, "ignore_eos": True}
    for _ in range(3):
        with httpx.stream("POST", f"{server.address}/generate", json=body, timeout=60) as stream:
            next(stream.iter_lines())
    given = generate(server, JOB).json()
    JOB.check(llama[1], answer(given, JOB), NEW)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("job", [JOB, Job(PROMPT, JOB.changes), Job(PROMPT)])
def test_the_client(llama: Any, server: Server, job: Job, streamed: bool) -> None:
    options: Any = {"max_tokens": NEW, "temperature": 0, "skip_special_tokens": False}
    with Client(server.address) as client:
        if streamed:
            with client.stream(PROMPT, job.plan, **options) as stream:
                _ = [*stream]
                found = stream.generated
        else:
            found = client.generate(PROMPT, job.plan, **options)
    tokens = [int(word.removeprefix("w")) for word in found.text.split()]
    if found.finish_reason == "stop":
        tokens.append(EOS)  # which has no text
    job.check(llama[1], Answer(tokens, dict(found.acts)), NEW)


@pytest.mark.parametrize("is_chat", [False, True])
def test_gates_are_read_along(llama: Any, server: Server, is_chat: bool) -> None:
    """Each request reads its own, beside others; long prompts run in several steps."""
    jobs = [it for it in random_jobs(24, seed=3, gates=1.0) if it.gated][:6]
    jobs.append(Job([*range(10, 110)], gated=jobs[0].gated))
    prompts: list[Any] = [job.prompt for job in jobs]
    if is_chat:
        texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
        prompts = [[{"role": "user", "content": text}] for text in texts]
    asked = [*zip(prompts, (job.plan for job in jobs), strict=True), (PROMPT, None)]
    options = {"max_tokens": NEW, "temperature": 0, "skip_special_tokens": False}
    found = read_along(server.address, asked, options)
    chunks, _ = found.pop()
    assert not any(chunk.gates for chunk in chunks)
    for job, (chunks, generated) in zip(jobs, found, strict=True):
        check_chunks(chunks, generated, ["g"], 0 if is_chat else len(job.prompt))
        if not is_chat:  # whose prompt is the template's
            given = tokens(generated.text)
            given += [EOS] * (generated.finish_reason == "stop")  # which has no text
            job.check(llama[1], Answer(given, dict(generated.acts)), NEW)


def test_a_stop_gives_the_value_that_it_is_for(server: Server) -> None:
    options: Any = {"max_tokens": NEW, "temperature": 0, "skip_special_tokens": False}
    with Client(server.address) as client:

        def asked(prompt: list[int], plan: Any, _new_tokens: int) -> Given:
            found = client.generate(prompt, plan, **options)
            return Given(tokens(found.text), dict(found.acts), dict(found.positions), 0)

        stops = [it for it in random_stops(asked, 8) if it.text]
    asked_for = [(it.prompt, it.plan) for it in stops]
    found = read_along(server.address, asked_for, options)
    for stop, (chunks, generated) in zip(stops, found, strict=True):
        assert tokens(generated.text) == stop.text
        check_chunks(chunks, generated, ["the end"], len(stop.prompt))
        values = torch.cat([it.gates["the end"] for it in chunks if it.gates])
        assert float(values[-1]) == pytest.approx(stop.value, abs=1e-3)


def test_errors_of_the_client(server: Server) -> None:
    with Client(server.address) as client:
        with pytest.raises(RequestRefusedError, match="closest names"):
            client.generate(PROMPT, BAD, max_tokens=NEW)
        with pytest.raises(PlanFailedError, match="max_bytes"):
            client.generate(PROMPT, FAILS, max_tokens=NEW)


def named(name: str) -> dict[str, Any]:
    """A plan that steers by an uploaded vector."""
    hook = {"type": "Add", "vector": {"tensor": name}}
    return {
        "version": 1,
        "entries": [{"type": "on", "what": "model.layers.1", "hook": hook}],
    }


STEERED = Job(PROMPT, JOB.changes)


def test_vectors_are_uploaded_once(llama: Any, server: Server) -> None:
    """A name means the vector that it has as its plan comes in."""
    other = Job(PROMPT, (Change(1, fh.Add(VECTOR.flip(0)), None),))
    with Client(server.address) as client:
        for vector, job in ((VECTOR, STEERED), (VECTOR.flip(0), other), (VECTOR, STEERED)):
            client.put_vectors({"calm/1": vector, "unused": torch.ones(3)})
            assert client.vectors() == {"calm/1": (WIDTH,), "unused": (3,)}
            text = json.dumps(named("calm/1"))
            params = {"temperature": 0, "max_new_tokens": NEW, **custom(text)}
            asked = {"input_ids": [PROMPT, PROMPT], "sampling_params": [params, {**params}]}
            for each in server.post("/generate", asked).json():
                job.check(llama[1], answer(each, job), NEW)
            response = server.post(*openai(Job(PROMPT), chat=False, **custom(text)))
            given = tokens(response.json()["choices"][0]["text"])
            job.check(llama[1], Answer(given + [EOS] * (len(given) < NEW), {}), NEW)
        client.drop_vectors(["calm/1"])
        with pytest.raises(KeyError):
            client.drop_vectors(["calm/1"])
        with pytest.raises(
            RequestRefusedError, match="no vector 'calm/1' was uploaded; uploaded: un"
        ):
            client.generate(PROMPT, named("calm/1"), max_tokens=NEW)
    path = f"{server.address}/v1/ferrohook/vectors"
    assert httpx.put(path, content=b"no safetensors").status_code == 422


def test_dictionaries_are_uploaded_once(llama: Any, server: Server) -> None:
    jobs = random_feature_jobs(4)
    with Client(server.address) as client:
        for seed in (0, 1):  # a name means another one then
            client.put_dictionaries(dictionaries(seed).values())
            for job in (dataclasses.replace(it, seed=seed) for it in jobs):
                found = client.generate(job.prompt, job.plan, max_tokens=NEW, temperature=0)
                given = tokens(found.text)
                given += [EOS] * (len(given) < NEW)
                job.check(llama[1], Given(given, found.acts, found.positions, 0))
        client.drop_dictionaries([*client.dictionaries()])
        assert client.dictionaries() == {}
        with pytest.raises(RequestRefusedError, match="no dictionary 'sae/"):
            client.generate(PROMPT, jobs[0].plan, max_tokens=NEW)


@pytest.mark.parametrize("data", ["", "none", "AAAA", 5, ["a"], {"calm": 1.0}])
def test_vectors_that_a_client_made_up_are_400(server: Server, data: Any) -> None:
    params = custom(json.dumps(named("made up")))
    params["custom_params"][VECTORS] = data
    response = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text


def test_capabilities(server: Server) -> None:
    with Client(server.address) as client:
        found = client.info()
    assert found.engine == "sglang"
    assert found.capture_bytes == 64 * 2**20
    assert found.module("model.layers.1").width == WIDTH
    assert "never runs" in (found.modules["lm_head"].refused or "")
    assert "tensor parallelism" in found.refused
    stream = found.raw["quantities"]["@resid_post.1"]
    assert stream["equation"] == "resid_pre + attn_out + mlp_out = resid_post"
    assert stream["writable"]
    assert found.raw["quantities"]["@q.0"]["heads"] == [2, WIDTH // 2]
    assert "not compute a pattern" in found.raw["quantities"]["@pattern.0"]["refused"]
    told = httpx.get(f"{server.address}/server_info").json()
    assert not [each for each in told["internal_states"] if "ferrohook" in each]


def test_each_route_serves_a_plan_whole_or_refuses_it(server: Server) -> None:
    plan = fh.Plan(fh.keep("model.norm"))
    params = {"sampling_params": {"max_new_tokens": NEW, **custom(plan)}}
    chat = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": NEW, **custom(plan)}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "w5 w6", **params},
        "/v1/completions": {"prompt": "w5 w6", "max_tokens": NEW, **custom(plan)},
        "/v1/chat/completions": chat,
        "/invocations": chat,
        "/vertex_generate": {"instances": [{"text": "w5 w6"}], "parameters": params},
    }
    with httpx.Client(base_url=server.address, timeout=120) as client:
        check_unserved_routes(client, bodies.keys(), plan.to_json())
    for path, body in bodies.items():
        given = server.post(path, {"model": "tiny", **body} if "max_tokens" in body else body)
        assert given.status_code == httpx.codes.OK, (path, given.text)
        found = given.json()
        (found,) = found.get("predictions") or found.get("choices") or [found]
        assert sglang.activations(found).acts.keys() == {"model.norm"}
