"""The OpenAI server of vLLM on the loopback: engine and worker in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx
import safetensors.torch

import ferrohook as fh
import support.engines
from ferrohook.engines.vllm.captures import Captured, unpacked
from support.engines import Change, Job
from support.vllm_engine import ENVIRONMENT, EOS, WIDTH, Answer, random_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(600)  # the server imports torch three times
NEW = 10
PROMPT = [*range(10, 60)]
VECTOR = torch.linspace(-2, 2, WIDTH)


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def server(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, _ = models["llama"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    options = {
        "model": folder,
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": 256,
        "max-num-seqs": 16,
        "max-num-batched-tokens": 64,
        "block-size": 32,
        "host": "127.0.0.1",
        "port": port,
        "api-key": "secret",
        "kv-cache-memory-bytes": 2**26,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "ferrohook"},
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 480
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/health").status_code == httpx.codes.OK:
                    break
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine and worker
        process.wait()


@pytest.fixture
def client(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, headers=KEY, timeout=120) as made:
        yield made


KEY = {"Authorization": "Bearer secret"}


def body(job: Job, **changes: Any) -> dict[str, Any]:
    plan = job.plan
    xargs = None if plan is None else {"ferrohook": plan.to_json()}
    return {
        "model": "tiny",
        "prompt": job.prompt,
        "max_tokens": NEW,
        "temperature": 0,
        "vllm_xargs": xargs,
        "return_token_ids": True,
        **changes,
    }


async def streamed(client: httpx.AsyncClient, job: Job, name: str, pause: float) -> Answer:
    """Sends a request; returns its streamed text, and its captures."""
    await asyncio.sleep(pause)
    tokens: list[int] = []
    sent = body(job, stream=True)
    headers = {"X-Request-Id": name}
    async with client.stream("POST", "/v1/completions", json=sent, headers=headers) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or []
    acts = {}
    if job.kept:
        captured = await client.get(f"/v1/ferrohook/captures/cmpl-{name}")
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
        found: list[Captured] = []
        path = f"/v1/ferrohook/captures/cmpl-{name}/stream"
        while True:
            async with client.stream("GET", path) as response:
                if response.status_code == httpx.codes.NOT_FOUND:
                    await asyncio.sleep(0.01)  # the request is on its way
                    continue
                assert response.status_code == httpx.codes.OK
                data = b"".join([part async for part in response.aiter_bytes()])
                while length := int.from_bytes(data[:8], "little"):
                    found.append(unpacked(data[8 : 8 + length]))
                    data = data[8 + length :]
                assert data == bytes(8)
                return found

    async def run() -> tuple[list[int], list[Captured]]:
        async with httpx.AsyncClient(base_url=server, headers=KEY, timeout=120) as client:
            sent = body(job, max_tokens=150)
            post = client.post("/v1/completions", json=sent, headers={"X-Request-Id": "stream"})
            response, found = await asyncio.gather(post, frames(client, "stream"))
            return response.json()["choices"][0]["token_ids"], found

    tokens, found = asyncio.run(run())
    acts = torch.cat([it.acts["model.layers.2"] for it in found if it.acts])
    positions = torch.cat([it.positions["model.layers.2"] for it in found if it.acts])
    assert positions.tolist() == [*range(len(PROMPT) + len(tokens) - 1)]
    job.check(model, Answer(tokens, {"model.layers.2": acts}), 150)


BAD = '{"version": 1, "entries": [{"type": "keep", "what": "model.layers.99"}]}'


@pytest.mark.parametrize(
    ("plan", "reason"),
    [("{", "no JSON"), (BAD, "closest names"), (7, "object is expected")],
)
def test_a_bad_plan_is_answered_with_400(client: httpx.Client, plan: Any, reason: str) -> None:
    sent = body(Job(PROMPT), vllm_xargs={"ferrohook": plan})
    answer = client.post("/v1/completions", json=sent)
    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
    assert reason in answer.text


def test_beam_search_and_chats_refuse_what_they_would_drop(client: httpx.Client) -> None:
    job = Job(PROMPT, (Change(1, fh.Zero(), None),))
    answer = client.post("/v1/completions", json=body(job, use_beam_search=True, n=2))
    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
    assert "beam search is refused" in answer.text


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
    assert "never runs" in found["modules"]["lm_head"]["refused"]
    answer = client.get("/v1/ferrohook/captures/nobody")
    assert answer.status_code == httpx.codes.NOT_FOUND
    without_key = httpx.get(f"{server}/v1/ferrohook/capabilities")
    assert without_key.status_code == httpx.codes.UNAUTHORIZED


def test_a_cancelled_request_has_no_captures(client: httpx.Client) -> None:
    job = Job(PROMPT, (), ("model.layers.0",))
    headers = {"X-Request-Id": "cancelled"}
    sent = body(job, stream=True, max_tokens=190, ignore_eos=True)
    with client.stream("POST", "/v1/completions", json=sent, headers=headers) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 60
    while True:
        answer = client.get("/v1/ferrohook/captures/cmpl-cancelled")
        if answer.status_code == httpx.codes.NOT_FOUND:
            break
        assert answer.status_code == httpx.codes.CONFLICT
        assert time.monotonic() < deadline
    assert "cancelled" in answer.text
