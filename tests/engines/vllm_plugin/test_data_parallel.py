"""vLLM with two ranks of data parallelism: its load balancer sends each request to one of them."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx

import ferrohook as fh
import support.engines
from ferrohook.engines.wire import HEADER, unpacked
from support.engines import Job
from support.serving import wrong_answers
from support.vllm_engine import EOS, Answer, random_jobs
from support.vllm_server import KEY, NEW, body, frames_of, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [*range(10, 60)]


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def client(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a server with two ranks."""
    log = tmp_path_factory.mktemp("server") / "log"
    ranks: dict[str, Any] = {"data-parallel-size": 2, "api-server-count": 1}
    with (
        serving(models["llama"][0], log, **ranks) as server,
        httpx.Client(base_url=server.address, headers=KEY, timeout=300) as made,
    ):
        yield made


def finished(client: httpx.Client) -> list[float]:
    """Returns the requests that each rank has finished."""
    text = client.get("/metrics").text
    counts = [0.0, 0.0]
    for rank, count in re.findall(r'vllm:request_success_total{engine="(\d)".*} (\S+)', text):
        counts[int(rank)] += float(count)
    return counts


def served(client: httpx.Client, job: Job) -> Answer:
    """Sends a request, and fetches its captures."""
    answer = client.post("/v1/completions", json=body(job))
    assert answer.is_success, answer.text
    acts = {}
    if job.kept:
        path = f"/v1/ferrohook/captures/{answer.json()['id']}"
        captured = client.get(path, headers={HEADER: answer.headers[HEADER]})
        assert captured.is_success, captured.text
        acts = unpacked(captured.content).acts
    return Answer(answer.json()["choices"][0]["token_ids"], acts)


def test_random_requests(models: Any, client: httpx.Client, request: pytest.FixtureRequest) -> None:
    jobs = random_jobs(request.config.getoption("requests") or 48, seed=71)
    before = finished(client)
    with ThreadPoolExecutor(8) as pool:
        answers = dict(enumerate(pool.map(lambda job: served(client, job), jobs)))
    assert wrong_answers(models["llama"][1], jobs, answers, NEW) == []
    ran = [now - then for now, then in zip(finished(client), before, strict=True)]
    assert min(ran) > len(jobs) / 4  # on both ranks


def test_captures_stream_from_the_rank_that_runs_the_request(
    models: Any, client: httpx.Client
) -> None:
    jobs = [Job([5 + each, *PROMPT], (), ("model.layers.2",)) for each in range(4)]

    def streamed(number: int) -> Answer:
        headers = {HEADER: f"a token that only client {number} has", "X-Request-Id": f"s{number}"}
        path = f"/v1/ferrohook/captures/cmpl-s{number}/stream"
        with ThreadPoolExecutor(1) as pool:
            sent = body(jobs[number], max_tokens=100)
            answer = pool.submit(client.post, "/v1/completions", json=sent, headers=headers)
            while (found := client.get(path, headers=headers)).status_code == 404:
                time.sleep(0.01)  # the request is on its way
        frames = [unpacked(frame).acts for frame in frames_of(found.content)]
        rows = torch.cat([each["model.layers.2"] for each in frames if each])
        tokens = answer.result().json()["choices"][0]["token_ids"]
        return Answer(tokens, {"model.layers.2": rows})

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = dict(enumerate(pool.map(streamed, range(len(jobs)))))
    assert wrong_answers(models["llama"][1], jobs, answers, 100) == []


def test_failures_come_from_either_rank(client: httpx.Client) -> None:
    plan = fh.Plan(fh.keep("model.layers.1", max_bytes=1)).to_json()
    sent = body(Job(PROMPT), vllm_xargs={"ferrohook": plan})
    before = finished(client)
    for _ in range(4):
        answer = client.post("/v1/completions", json=sent)
        assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR, answer.text
        assert "max_bytes" in answer.json()["error"]["message"]
    ran = [now - then for now, then in zip(finished(client), before, strict=True)]
    assert min(ran) > 0
