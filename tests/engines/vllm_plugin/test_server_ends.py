"""The server of vLLM ends while a request captures: no stream breaks off, no client hangs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx

import ferrohook as fh
from ferrohook.engines.wire import HEADER, error_of
from support.engines import Change, Job
from support.vllm_server import KEY, body, frames_of, serving, worker_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.vllm_server import Server

JOB = Job([*range(10, 60)], (), ("model.layers.0",))
DEAD = "EngineCore encountered an issue", "The server had an error"
"""vLLM's messages, the second since 0.33."""


async def ended(server: Server, end: Any) -> tuple[httpx.Response | BaseException, bytes]:
    """Ends a server while a request captures; returns the answer and the stream of captures."""
    sent = body(JOB, max_tokens=190, ignore_eos=True)
    async with httpx.AsyncClient(base_url=server.address, headers=KEY, timeout=60) as client:
        await client.post("/v1/completions", json=body(JOB))
        token = {HEADER: "a token that only this client knows"}
        headers = {"X-Request-Id": "ending", **token}
        if end is kill_worker:  # it no longer answers
            worker_of(server).suspend()
        post = asyncio.ensure_future(client.post("/v1/completions", json=sent, headers=headers))
        path = "/v1/ferrohook/captures/cmpl-ending/stream"
        while True:
            async with client.stream("GET", path, headers=token) as response:
                if response.status_code == httpx.codes.NOT_FOUND:
                    await asyncio.sleep(0.01)  # the request is on its way
                    continue
                end(server)
                data = b"".join([part async for part in response.aiter_bytes()])
            (answer,) = await asyncio.gather(post, return_exceptions=True)
            return answer, data


def kill_worker(server: Server) -> None:
    worker_of(server).kill()


def end_server(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)


def test_a_worker_dies_while_a_request_captures(models: Any, tmp_path: Path) -> None:
    folder, _ = models["llama"]
    with serving(folder, tmp_path / "log") as server:
        answer, data = asyncio.run(ended(server, kill_worker))
        assert isinstance(answer, httpx.Response)
        assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
        assert "EngineCore" in str(error_of(frames_of(data)[-1]))
        server.process.wait(60)


def test_a_killed_engine_is_an_error_of_each_open_request(models: Any, tmp_path: Path) -> None:
    folder, _ = models["llama"]
    steered = Job([*range(10, 60)], (Change(1, fh.Scale(0.5), None),))

    async def texts(server: Server) -> tuple[list[str], list[int]]:
        async with httpx.AsyncClient(base_url=server.address, headers=KEY, timeout=60) as client:
            sent = [
                body(job, stream=stream, max_tokens=190, ignore_eos=True)
                for job in (steered, Job([*range(10, 60)]))
                for stream in (True, False)
            ]
            await client.post("/v1/completions", json=body(steered))
            worker_of(server).suspend()
            posts = [
                asyncio.ensure_future(client.post("/v1/completions", json=each)) for each in sent
            ]
            await asyncio.sleep(1)
            kill_worker(server)
            statuses: list[int] = []
            with contextlib.suppress(httpx.TransportError):  # the server ends itself
                while not all(post.done() for post in posts) or len(statuses) < 1:
                    answer = await client.get("/v1/ferrohook/capabilities")
                    statuses.append(answer.status_code)
                    await asyncio.sleep(0.01)
            return [(await post).text for post in posts], statuses

    with serving(folder, tmp_path / "log") as server:
        answers, statuses = asyncio.run(texts(server))
        told = [any(message in text for message in DEAD) for text in answers]
        assert told == [True] * 4, answers
        assert set(statuses) <= {httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE}, statuses
        server.process.wait(60)


def test_a_server_shuts_down_while_a_request_captures(models: Any, tmp_path: Path) -> None:
    folder, _ = models["llama"]
    with serving(folder, tmp_path / "log") as server:
        _, data = asyncio.run(ended(server, end_server))
        assert frames_of(data)
        server.process.wait(60)
