"""The server of vLLM ends while a request captures: no stream breaks off, nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx
import psutil

from ferrohook.engines.vllm.captures import error_of
from support.engines import Job
from support.vllm_server import KEY, body, frames_of, serving

if TYPE_CHECKING:
    from pathlib import Path

    from support.vllm_server import Server

pytestmark = pytest.mark.timeout(600)  # the server imports torch three times
JOB = Job([*range(10, 60)], (), ("model.layers.0",))


def worker_of(server: Server) -> psutil.Process:
    """The process that has the model."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return max(children, key=lambda child: child.memory_info().rss)


async def ended(server: Server, end: Any) -> tuple[httpx.Response, bytes]:
    """Ends a server while a request runs in a worker that stands still.

    Returns the answer to the request, and the stream of its captures.
    """
    sent = body(JOB, max_tokens=190, ignore_eos=True)
    worker = worker_of(server)
    async with httpx.AsyncClient(base_url=server.address, headers=KEY, timeout=60) as client:
        await client.post("/v1/completions", json=body(JOB))
        headers = {"X-Request-Id": "ending"}
        worker.send_signal(signal.SIGSTOP)
        post = asyncio.ensure_future(client.post("/v1/completions", json=sent, headers=headers))
        path = "/v1/ferrohook/captures/cmpl-ending/stream"
        while True:
            async with client.stream("GET", path) as response:
                if response.status_code == httpx.codes.NOT_FOUND:
                    await asyncio.sleep(0.01)  # the request is on its way
                    continue
                end(worker)
                data = b"".join([part async for part in response.aiter_bytes()])
                return await post, data


@pytest.mark.parametrize("ends", ["worker", "server"])
def test_a_request_captures_while_all_ends(models: Any, tmp_path: Path, ends: str) -> None:
    folder, _ = models["llama"]
    with serving(folder, tmp_path / "log") as server:

        def end(worker: psutil.Process) -> None:
            if ends == "worker":
                worker.kill()
            else:
                os.kill(server.process.pid, signal.SIGTERM)

        answer, data = asyncio.run(ended(server, end))
        assert answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
        assert error_of(frames_of(data)[-1])
        server.process.wait(60)
