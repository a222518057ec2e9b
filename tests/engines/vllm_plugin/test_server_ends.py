"""The server of vLLM ends while a request captures: no stream breaks off, nobody waits for ever."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx

from ferrohook.engines.vllm.captures import error_of
from ferrohook.engines.vllm.plugin import HEADER
from support.engines import Job
from support.vllm_server import KEY, body, frames_of, serving, worker_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.vllm_server import Server

pytestmark = pytest.mark.timeout(600)  # the server imports torch three times
JOB = Job([*range(10, 60)], (), ("model.layers.0",))


async def ended(server: Server, end: Any) -> tuple[httpx.Response | BaseException, bytes]:
    """Ends a server while a request captures; returns the answer and the stream of captures."""
    sent = body(JOB, max_tokens=190, ignore_eos=True)
    async with httpx.AsyncClient(base_url=server.address, headers=KEY, timeout=60) as client:
        await client.post("/v1/completions", json=body(JOB))
        token = {HEADER: "a token that only this client knows"}
        headers = {"X-Request-Id": "ending", **token}
        if end is kill_worker:  # it answers nobody any more
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


def test_a_server_shuts_down_while_a_request_captures(models: Any, tmp_path: Path) -> None:
    folder, _ = models["llama"]
    with serving(folder, tmp_path / "log") as server:
        _, data = asyncio.run(ended(server, end_server))
        assert frames_of(data)
        server.process.wait(60)
