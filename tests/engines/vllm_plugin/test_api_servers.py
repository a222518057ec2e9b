"""vLLM with two API servers, and with two ranks of data parallelism.

Each request of a client comes to one of the servers by chance, and vLLM sends it to one rank.
"""

from __future__ import annotations

import json
import re
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx
import safetensors.torch

import ferrohook as fh
import support.engines
from ferrohook.engines.vllm import plugin
from ferrohook.engines.vllm.supported import refusals
from ferrohook.engines.wire import FIELD, HEADER, unpacked
from support.engine_scenes import PROMPT
from support.engines import Change, Job
from support.serving import wrong_answers
from support.vllm_engine import EOS, WIDTH, Answer, random_jobs
from support.vllm_server import KEY, NEW, body, frames_of, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMED = """{"version": 1, "entries": [{"type": "on", "what": "model.layers.1",
"hook": {"type": "Add", "vector": {"tensor": "calm"}}}]}"""
RANKS = {1: {}, 2: {"data-parallel-size": 2}}


class Servers(NamedTuple):
    """Two API servers with one address."""

    address: str
    ranks: int

    def ask(self, method: str, path: str, **sent: Any) -> httpx.Response:
        """Sends a request over a new connection."""
        headers = KEY | sent.pop("headers", {})
        url = f"{self.address}{path}"
        return httpx.request(method, url, headers=headers, timeout=300, **sent)

    def finished(self) -> list[float]:
        """Returns the requests that each rank has finished."""
        text = self.ask("GET", "/metrics").text
        counts = [0.0] * self.ranks
        for rank, count in re.findall(r'request_success_total{engine="(\d)".*} (\S+)', text):
            counts[int(rank)] += float(count)
        return counts


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module", params=[1, 2])
def servers(
    models: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Servers]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = {"api-server-count": 2, **RANKS[request.param]}
    with serving(models["llama"][0], log, **options) as server:
        yield Servers(server.address, request.param)


def test_random_requests(models: Any, servers: Servers, request: pytest.FixtureRequest) -> None:
    jobs = random_jobs(request.config.getoption("requests") or 48, seed=71)

    def served(number: int) -> Answer:
        job, streams = jobs[number], bool(number % 2)
        answer = servers.ask("POST", "/v1/completions", json=body(job, stream=streams))
        assert answer.is_success, answer.text
        lines = answer.text.splitlines() if streams else [f"data: {answer.text}"]
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        acts = {}
        if job.kept:
            token = {HEADER: parts[0][FIELD]}
            path = f"/v1/ferrohook/captures/{parts[0]['id']}"
            captured = servers.ask("GET", path, headers=token)
            assert captured.is_success, captured.text
            acts = unpacked(captured.content).acts
            assert servers.ask("GET", path, headers=token).status_code in {404, 422}  # once
        choices = [choice for part in parts for choice in part["choices"]]
        return Answer([token for each in choices for token in each["token_ids"] or ()], acts)

    before = servers.finished()
    with ThreadPoolExecutor(8) as pool:
        answers = dict(enumerate(pool.map(served, range(len(jobs)))))
    assert wrong_answers(models["llama"][1], jobs, answers, NEW) == []
    ran = [now - then for now, then in zip(servers.finished(), before, strict=True)]
    assert min(ran) > len(jobs) / 4  # on all ranks


def test_several_answers_may_run_on_several_ranks(models: Any, servers: Servers) -> None:
    """Other ranks run the prompt where the first one does not run."""
    jobs = [Job([each, *PROMPT], (), ("model.layers.2",)) for each in range(10, 16)]

    def served(job: Job) -> list[Answer]:
        answer = servers.ask("POST", "/v1/completions", json=body(job, n=4, temperature=1.0))
        token, path = answer.json()[FIELD], f"/v1/ferrohook/captures/{answer.json()['id']}"
        found = []
        for index, choice in enumerate(answer.json()["choices"]):
            captured = servers.ask("GET", f"{path}?index={index}", headers={HEADER: token})
            assert captured.is_success, captured.text
            found.append(Answer(choice["token_ids"], unpacked(captured.content).acts))
        return found

    before = servers.finished()
    with ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(served, jobs)]
    for job, found in zip(jobs, answers, strict=True):  # one by one: they share a model
        for each in found:
            job.check_acts(models["llama"][1], each)
    ran = [now - then for now, then in zip(servers.finished(), before, strict=True)]
    assert min(ran) > len(jobs) / 4


def test_captures_stream_from_the_rank_that_runs_the_request(models: Any, servers: Servers) -> None:
    jobs = [Job([5 + each, *PROMPT], (), ("model.layers.2",)) for each in range(4)]

    def streamed(number: int) -> Answer:
        headers = {HEADER: f"a token that only client {number} has", "X-Request-Id": f"s{number}"}
        path = f"/v1/ferrohook/captures/cmpl-s{number}/stream"
        with ThreadPoolExecutor(1) as pool:
            sent = body(jobs[number], max_tokens=100)
            answer = pool.submit(servers.ask, "POST", "/v1/completions", json=sent, headers=headers)
            while (found := servers.ask("GET", path, headers=headers)).status_code == 404:
                time.sleep(0.01)  # the request is on its way, or another server has it
        frames = [unpacked(frame).acts for frame in frames_of(found.content)]
        rows = torch.cat([each["model.layers.2"] for each in frames if each])
        tokens = answer.result().json()["choices"][0]["token_ids"]
        return Answer(tokens, {"model.layers.2": rows})

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = dict(enumerate(pool.map(streamed, range(len(jobs)))))
    assert wrong_answers(models["llama"][1], jobs, answers, 100) == []


def test_failures_come_from_all_ranks(servers: Servers) -> None:
    plan = fh.Plan(fh.keep("model.layers.1", max_bytes=1)).to_json()
    sent = body(Job(PROMPT), vllm_xargs={"ferrohook": plan})
    before = servers.finished()
    for number in range(8):
        headers = {"X-Request-Id": f"f{number}"}
        answer = servers.ask("POST", "/v1/completions", json=sent, headers=headers)
        assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR, answer.text
        assert "max_bytes" in answer.json()["error"]["message"]
        token = {HEADER: answer.headers[HEADER]}
        captured = servers.ask("GET", f"/v1/ferrohook/captures/cmpl-f{number}", headers=token)
        assert captured.status_code == httpx.codes.UNPROCESSABLE_ENTITY
        assert "max_bytes" in captured.text
    ran = [now - then for now, then in zip(servers.finished(), before, strict=True)]
    assert min(ran) > 0


def test_vectors_are_replaced_and_dropped_under_load(models: Any, servers: Servers) -> None:
    """A request has the vector that its name meant at some time before its answer."""
    _, model = models["llama"]
    vectors = [torch.linspace(-2, 2, WIDTH).roll(7 * number) for number in range(6)]
    jobs = [Job(PROMPT, (Change(1, fh.Add(vector), None),)) for vector in vectors]
    sent = body(Job(PROMPT), vllm_xargs={"ferrohook": NAMED})

    def put(number: int) -> None:
        data = safetensors.torch.save({"calm": vectors[number]})
        answer = servers.ask("PUT", "/v1/ferrohook/vectors", content=data)
        assert answer.is_success, answer.text

    def complete(_: int) -> Answer:
        answer = servers.ask("POST", "/v1/completions", json=sent)
        assert answer.is_success, answer.text
        return Answer(answer.json()["choices"][0]["token_ids"], {})

    put(0)
    with ThreadPoolExecutor(8) as pool:
        for number in range(1, len(vectors)):
            beside = pool.map(complete, range(6))  # on their way, with this vector or the last
            put(number)
            for answer in pool.map(complete, range(6)):
                jobs[number].check(model, answer, NEW)
            for answer in beside:
                last_two = jobs[number - 1 : number + 1]
                wrong = [wrong_answers(model, [job], {0: answer}, NEW) for job in last_two]
                assert [] in wrong
    assert servers.ask("GET", "/v1/ferrohook/vectors").json() == {"calm": [WIDTH]}
    assert servers.ask("DELETE", "/v1/ferrohook/vectors/calm").is_success
    for _ in range(6):
        answer = servers.ask("POST", "/v1/completions", json=sent)
        assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
        assert "no vector 'calm' was uploaded" in answer.text


def test_data_parallelism_with_a_load_balancer_of_others_is_refused(models: Any) -> None:
    """An engine core of a model without experts takes itself for the only one."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    model, hybrid = str(models["llama"][0]), {"hybrid data parallelism"}
    for changes, refused in (
        ({}, set()),
        ({"data_parallel_hybrid_lb": True, "data_parallel_start_rank": 0}, hybrid),
    ):
        sizes = {"data_parallel_size": 4, "data_parallel_size_local": 2, **changes}
        config = EngineArgs(model=model, enforce_eager=True, **sizes).create_engine_config()
        assert refusals(config).keys() == refused | {"data parallelism of experts"}
        config.parallel_config.reconfigure_for_independent_dp_rank()
        assert refusals(config).keys() == refused


def test_one_rank_that_refuses_plans_refuses_them_for_all(models: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    config = EngineArgs(model=str(models["llama"][0])).create_engine_config()
    engine = types.SimpleNamespace(vllm_config=config)
    answers = [b'{"modules": {}, "secret": ""}', b'{"refused": "its self-test failed"}']
    with pytest.raises(fh.HookError, match="its self-test failed"):
        plugin._connected(engine, answers, serves=True)
