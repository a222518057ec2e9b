"""The OpenAI server of vLLM on the loopback: engine and worker in separate processes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx
import safetensors.torch

import ferrohook as fh
import support.engines
from ferrohook.engines.model.proof import FORMS
from ferrohook.engines.wire import FIELD, GATES, HEADER, Captured, error_of, unpacked
from ferrohook.gates.streaming import numbers_of
from support.engine_scenes import check_fuzzed, spoilt_plans
from support.engine_server import check_unserved_routes
from support.engines import Change, Job
from support.vllm_engine import EOS, WIDTH, Answer, random_jobs
from support.vllm_server import KEY, NEW, Server, body, frames_of, serving, worker_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [*range(10, 60)]
OWN = {HEADER: "a token that only this client knows"}
VECTOR = torch.linspace(-2, 2, WIDTH)


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def running(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, _ = models["llama"]
    with serving(folder, tmp_path_factory.mktemp("server") / "log") as made:
        yield made


@pytest.fixture
def server(running: Server) -> str:
    return running.address


@pytest.fixture
def client(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, headers=KEY, timeout=120) as made:
        yield made


async def streamed(client: httpx.AsyncClient, job: Job, name: str, pause: float) -> Answer:
    """Sends a request; returns its streamed text, and its captures."""
    await asyncio.sleep(pause)
    tokens: list[int] = []
    sent = body(job, stream=True)
    headers = {"X-Request-Id": name}
    async with client.stream("POST", "/v1/completions", json=sent, headers=headers) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        own = None
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert not tokens or FIELD not in event  # in the first one
                own = event.get(FIELD, own)
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
    acts = {}
    if job.kept:
        assert response.headers[HEADER] == own
        captured = await client.get(f"/v1/ferrohook/captures/cmpl-{name}", headers={HEADER: own})
        assert captured.status_code == httpx.codes.OK, captured.text
        acts = unpacked(captured.content).acts
    return Answer(tokens, acts)


def test_random_requests(models: Any, server: str) -> None:
    _, model = models["llama"]
    jobs = random_jobs(36, seed=61)
    rng = random.Random(67)  # noqa: S311 (tests)
    names = [f"user{'-chat' * (number % 3)}-{number}" for number in range(len(jobs))]

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=server, headers=KEY, timeout=120) as client:
            requests = [
                streamed(client, job, name, rng.random() * 2)
                for job, name in zip(jobs, names, strict=True)
            ]
            return await asyncio.gather(*requests)

    for job, given in zip(jobs, asyncio.run(run()), strict=True):
        job.check(model, given, NEW)


def test_captures_stream_beside_the_text(models: Any, server: str) -> None:
    _, model = models["llama"]
    job = Job(PROMPT, (Change(1, fh.Add(VECTOR), "generated"),), ("model.layers.2",))

    async def frames(client: httpx.AsyncClient, name: str) -> list[Captured]:
        path = f"/v1/ferrohook/captures/cmpl-{name}/stream"
        while True:
            async with client.stream("GET", path, headers=OWN) as response:
                if response.status_code == httpx.codes.NOT_FOUND:
                    await asyncio.sleep(0.01)  # the request is on its way
                    continue
                assert response.status_code == httpx.codes.OK
                data = b"".join([part async for part in response.aiter_bytes()])
                return [unpacked(frame) for frame in frames_of(data)]

    async def run() -> tuple[list[int], list[Captured]]:
        async with httpx.AsyncClient(base_url=server, headers=KEY, timeout=120) as client:
            sent = body(job, max_tokens=150)
            headers = {"X-Request-Id": "stream", **OWN}
            post = client.post("/v1/completions", json=sent, headers=headers)
            response, found = await asyncio.gather(post, frames(client, "stream"))
            assert response.json()[FIELD] == response.headers[HEADER] == OWN[HEADER]
            return response.json()["choices"][0]["token_ids"], found

    tokens, found = asyncio.run(run())
    acts = torch.cat([it.acts["model.layers.2"] for it in found if it.acts])
    positions = torch.cat([it.positions["model.layers.2"] for it in found if it.acts])
    assert positions.tolist() == [*range(len(PROMPT) + len(tokens) - 1)]
    job.check(model, Answer(tokens, {"model.layers.2": acts}), 150)


BAD = '{"version": 1, "entries": [{"type": "keep", "what": "model.layers.99"}]}'


@pytest.mark.parametrize(
    ("plan", "reason"),
    [("{", "not valid JSON"), (BAD, "closest names"), (7, "expected an object")],
)
def test_a_bad_plan_is_answered_with_400(client: httpx.Client, plan: Any, reason: str) -> None:
    sent = body(Job(PROMPT), vllm_xargs={"ferrohook": plan})
    answer = client.post("/v1/completions", json=sent)
    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
    assert reason in answer.text


JUNK = ["", "NaN", "1e999", '"', "[" * 5000, "null", "\\ud800", "-1", "{}", "\x00", "7" * 5000]


def spoilt(text: str, rng: random.Random) -> str:
    """The text of a plan with a part cut out, replaced or repeated."""
    first, last = sorted(rng.randrange(len(text)) for _ in range(2))
    junk = rng.choice(JUNK)
    part = rng.choice([text[first : first + 1], junk])
    short = text[:first] + part + text[first + rng.randrange(2) :]
    return rng.choice([text[:first] + junk + text[last:], text[:last] + text[first:], short, junk])


def test_spoilt_plans_are_answered_with_400(
    models: Any, server: str, request: pytest.FixtureRequest
) -> None:
    """Except damaged plans that are still valid."""
    _, model = models["llama"]
    job = Job(PROMPT, (Change(1, fh.Scale(0.5), slice(2, 9)),), ("model.layers.2", "model.norm"))
    assert job.plan is not None
    text, rng = job.plan.to_json(), random.Random(5)  # noqa: S311 (tests)
    plans = [spoilt(text, rng) for _ in range(request.config.getoption("requests") or 300)]

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server, headers=KEY, timeout=120) as client:
            few = asyncio.Semaphore(16)

            async def send(plan: str) -> httpx.Response:
                changes = {"max_tokens": 1, "vllm_xargs": {"ferrohook": plan}}
                async with few:
                    return await client.post("/v1/completions", json=body(Job([5, 6]), **changes))

            return await asyncio.gather(*map(send, plans))

    answers = asyncio.run(run())
    odd = {plan: it.text for plan, it in zip(plans, answers, strict=True) if it.status_code >= 500}
    assert odd == {}
    codes = [it.status_code for it in answers]
    assert {*codes} <= {httpx.codes.OK, httpx.codes.BAD_REQUEST}
    assert codes.count(httpx.codes.BAD_REQUEST) > 0.8 * len(plans)
    with httpx.Client(base_url=server, headers=KEY, timeout=120) as client:
        given = client.post("/v1/completions", json=body(job)).json()["choices"][0]
    Job(PROMPT, job.changes).check(model, Answer(given["token_ids"], {}), NEW)


def test_each_choice_has_its_own_captures(models: Any, client: httpx.Client) -> None:
    """Two prompts get several answers each; values of gates are streamed too."""
    model = models["llama"][1]
    gated = next(job.gated for job in random_jobs(24, seed=3, gates=1.0) if job.gated)
    change = Change(1, fh.Add(VECTOR), "generated")
    jobs = [Job(each, (change,), ("model.layers.2",), gated=gated) for each in (PROMPT, PROMPT[7:])]
    sent = body(jobs[0], prompt=[job.prompt for job in jobs], n=3, temperature=1.0)
    answer = client.post("/v1/completions", json=sent)
    assert answer.status_code == httpx.codes.OK, answer.text
    own, path = {HEADER: answer.headers[HEADER]}, f"/v1/ferrohook/captures/{answer.json()['id']}"
    choices = answer.json()["choices"]
    assert [each["index"] for each in choices] == [*range(6)]
    assert len({tuple(each["token_ids"]) for each in choices}) == 6
    for choice in reversed(choices):
        found = client.get(path, headers=own, params={"index": choice["index"]})
        acts = unpacked(found.content).acts
        jobs[choice["index"] // 3].check_acts(model, Answer(choice["token_ids"], acts))
    assert client.get(path, headers=own, params={"index": 6}).status_code == httpx.codes.NOT_FOUND

    texts: dict[int, list[int]] = {}
    values: dict[int, list[float]] = {}
    with client.stream("POST", "/v1/completions", json={**sent, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    for event in (json.loads(line) for line in lines if line.startswith("{")):
        path = f"/v1/ferrohook/captures/{event['id']}"
        for choice in event["choices"]:
            texts.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
            read = choice.get(GATES, {"g": {"values": []}})["g"]
            values.setdefault(choice["index"], []).extend(numbers_of(read))
    own = {HEADER: response.headers[HEADER]}
    assert texts.keys() == {*range(6)}
    for index, text in texts.items():
        acts = unpacked(client.get(path, headers=own, params={"index": index}).content).acts
        jobs[index // 3].check_acts(model, Answer(text, acts))
        read = torch.tensor(values[index])
        torch.testing.assert_close(read, acts["@gate.g"], equal_nan=True)


def test_each_answer_of_a_chat_has_its_own_captures(models: Any, client: httpx.Client) -> None:
    job = Job([5, 6], (), ("model.layers.2",))
    sent = body(job, messages=BODIES["/v1/chat/completions"]["messages"], n=4, temperature=1.0)
    answer = client.post("/v1/chat/completions", json=sent)
    own = {HEADER: answer.headers[HEADER]}
    for choice in answer.json()["choices"]:
        path = f"/v1/ferrohook/captures/{answer.json()['id']}"
        found = client.get(path, headers=own, params={"index": choice["index"]})
        acts = unpacked(found.content).acts
        job.check_acts(models["llama"][1], Answer(choice["token_ids"], acts))


def test_one_answer_that_fails_fails_the_response(client: httpx.Client) -> None:
    """vLLM returns no partial completions; the error gives the reason of one failed plan."""
    sent = failing(Job(PROMPT), FAILS, n=3, temperature=1.0)
    for name in ("several", "several-1"):
        answer = client.post("/v1/completions", json=sent, headers={"X-Request-Id": name})
        assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
        assert answer.json()["error"]["message"].startswith("the plan of the request failed: ")


FAILS = fh.keep("model.layers.1", max_bytes=1)


def failing(job: Job, entry: Any, **changes: Any) -> dict[str, Any]:
    plan = fh.Plan(entry, fh.keep("model.layers.0"))
    return body(job, vllm_xargs={"ferrohook": plan.to_json()}, **changes)


def test_a_plan_that_fails_tells_the_client_the_reason(client: httpx.Client) -> None:
    headers = {"X-Request-Id": "failing"}
    sent = failing(Job(PROMPT), FAILS)
    answer = client.post("/v1/completions", json=sent, headers=headers)
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    message = answer.json()["error"]["message"]
    assert message.startswith("the plan of the request failed: ")
    assert "model.layers.1" in message
    token = {HEADER: answer.headers[HEADER]}
    captured = client.get("/v1/ferrohook/captures/cmpl-failing", headers=token)
    assert captured.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert captured.json()["error"]["message"] == message
    # The other of two prompts, and one whose id is a prefix.
    assert client.post("/v1/completions", json=body(Job(PROMPT))).status_code == httpx.codes.OK
    answer = client.post("/v1/completions", json={**sent, "prompt": [PROMPT, PROMPT[:9]]})
    assert "max_bytes" in answer.json()["error"]["message"]


def test_a_plan_that_fails_in_a_streamed_answer(client: httpx.Client) -> None:
    # Bytes for four rows of the text.
    entry = fh.keep("model.layers.2", max_bytes=(len(PROMPT) + 4) * WIDTH * 4)
    sent = failing(Job(PROMPT), entry, stream=True, max_tokens=190, ignore_eos=True)
    events: list[Any] = []
    headers = {"X-Request-Id": "midway"}
    with client.stream("POST", "/v1/completions", json=sent, headers=headers) as response:
        assert response.status_code == httpx.codes.OK
        lines = (line.removeprefix("data: ") for line in response.iter_lines())
        events += (json.loads(line) for line in lines if line.startswith("{"))
    *texts, last = events
    assert "max_bytes" in last["error"]["message"]
    tokens = [token for it in texts for choice in it["choices"] for token in choice["token_ids"]]
    assert len(tokens) == 5
    token = {HEADER: response.headers[HEADER]}
    path = "/v1/ferrohook/captures/cmpl-midway/stream"
    frames = frames_of(client.get(path, headers=token).content)
    assert "max_bytes" in str(error_of(frames[-1]))


def test_beam_search_and_chats_refuse_what_they_would_drop(client: httpx.Client) -> None:
    job = Job(PROMPT, (Change(1, fh.Zero(), None),))
    answer = client.post("/v1/completions", json=body(job, use_beam_search=True, n=2))
    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
    assert "beam search is not supported" in answer.text


def test_fuzzed_plans_end_no_server(
    models: Any, client: httpx.Client, request: pytest.FixtureRequest
) -> None:
    plans = spoilt_plans(request.config.getoption("requests") or 60)

    def status(plan: str) -> int:
        sent = body(Job(PROMPT[:4]), max_tokens=1, vllm_xargs={"ferrohook": plan})
        return client.post("/v1/completions", json=sent).status_code

    with ThreadPoolExecutor(8) as pool:
        check_fuzzed([*pool.map(status, plans)])
    job = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),))
    tokens = client.post("/v1/completions", json=body(job)).json()["choices"][0]["token_ids"]
    job.check(models["llama"][1], Answer(tokens, {}), NEW)


def test_vectors_are_uploaded_once(models: Any, client: httpx.Client) -> None:
    _, model = models["llama"]
    path = "/v1/ferrohook/vectors"
    data = safetensors.torch.save({"calm": VECTOR})
    assert client.put(path, content=data).json() == {"calm": [WIDTH]}
    assert client.get(path).json() == {"calm": [WIDTH]}
    hook = {"type": "Add", "vector": {"tensor": "calm"}}
    plan = {"version": 1, "entries": [{"type": "on", "what": "model.layers.1", "hook": hook}]}
    sent = body(Job(PROMPT), vllm_xargs={"ferrohook": json.dumps(plan)})
    tokens = client.post("/v1/completions", json=sent).json()["choices"][0]["token_ids"]
    Job(PROMPT, (Change(1, fh.Add(VECTOR), None),)).check(model, Answer(tokens, {}), NEW)
    assert client.put(path, content=b"no safetensors").status_code == 422
    assert client.delete(f"{path}/calm").status_code == httpx.codes.OK
    assert client.delete(f"{path}/calm").status_code == httpx.codes.NOT_FOUND
    assert client.post("/v1/completions", json=sent).status_code == httpx.codes.BAD_REQUEST


def test_capabilities_and_unknown_captures(client: httpx.Client, server: str) -> None:
    found = client.get("/v1/ferrohook/capabilities").json()
    assert found["modules"]["model.layers.1"]["width"] == WIDTH
    assert found["modules"]["model.layers.1"]["proof"] == dict.fromkeys(FORMS)
    assert "never runs" in found["modules"]["lm_head"]["refused"]
    stream = found["quantities"]["@resid_post.1"]
    assert stream["equation"] == "resid_pre + attn_out + mlp_out = resid_post"
    assert stream["writable"]
    assert found["quantities"]["@q.0"]["heads"] == [2, WIDTH // 2]
    assert "not compute a pattern" in found["quantities"]["@pattern.0"]["refused"]
    for name in ("plans", "failures", "rows", "captures", "captured_bytes"):
        assert f"ferrohook_{name}_total" in client.get("/metrics").text
    path = "/v1/ferrohook/captures/nobody"
    assert client.get(path).status_code == httpx.codes.FORBIDDEN
    assert client.get(path, headers=OWN).status_code == httpx.codes.NOT_FOUND
    without_key = httpx.get(f"{server}/v1/ferrohook/capabilities")
    assert without_key.status_code == httpx.codes.UNAUTHORIZED


def test_a_cancelled_request_has_no_captures(running: Server, client: httpx.Client) -> None:
    assert client.get("/v1/ferrohook/capabilities").status_code == httpx.codes.OK
    job = Job(PROMPT, (), ("model.layers.0",))
    headers = {"X-Request-Id": "cancelled", **OWN}
    sent = body(job, stream=True, max_tokens=190, ignore_eos=True)
    worker = worker_of(running)
    worker.suspend()  # so that it does not finish the request first
    try:
        with client.stream("POST", "/v1/completions", json=sent, headers=headers):
            wait_for(client, httpx.codes.CONFLICT)
        answer = wait_for(client, httpx.codes.NOT_FOUND)
    finally:
        worker.resume()
    assert "no captures for answer 0 of request 'cmpl-cancelled'" in answer.text


def wait_for(client: httpx.Client, code: int) -> httpx.Response:
    """Asks for the captures of the cancelled request until the answer has a status."""
    deadline = time.monotonic() + 60
    while True:
        answer = client.get("/v1/ferrohook/captures/cmpl-cancelled", headers=OWN)
        if answer.status_code == code:
            return answer
        assert time.monotonic() < deadline, answer.text


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": NEW},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "w5 w6"}],
        "max_tokens": NEW,
    },
    "/v1/responses": {"input": "w5 w6", "max_output_tokens": NEW},
    "/v1/messages": {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": NEW},
}
"""A request of each route that serves plans."""


def with_plan(path: str, plan: fh.Plan) -> dict[str, Any]:
    return {"model": "tiny", **BODIES[path], "vllm_xargs": {"ferrohook": plan.to_json()}}


def test_each_route_serves_a_plan_whole_or_refuses_it(client: httpx.Client) -> None:
    check_unserved_routes(client, BODIES.keys(), fh.Plan(fh.keep("model.norm")).to_json())
    ends = []
    for path in BODIES:
        steered = client.post(path, json=with_plan(path, fh.Plan(fh.on("model.norm", fh.Zero()))))
        assert steered.status_code == httpx.codes.OK, (path, steered.text)
        bad = client.post(path, json=with_plan(path, fh.Plan(fh.keep("model.layers.99"))))
        assert bad.status_code == httpx.codes.BAD_REQUEST, (path, bad.text)
        kept = client.post(path, json=with_plan(path, fh.Plan(fh.keep("model.norm"))))
        ends.append(kept.is_success)
        if not kept.is_success:
            assert kept.status_code == httpx.codes.BAD_REQUEST, (path, kept.text)
            assert "captures are available only on the routes" in kept.text
            continue
        name = kept.json()["id"]
        own = {HEADER: kept.headers[HEADER]}
        captured = client.get(f"/v1/ferrohook/captures/{name}", headers=own)
        assert captured.status_code == httpx.codes.OK, (path, captured.text)
        assert unpacked(captured.content).acts.keys() == {"model.norm"}
    assert {True, False} == {*ends}
