"""The OpenAI server of vLLM: front end, engine and worker in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import psutil

from support.vllm_engine import ENVIRONMENT, patience

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.engines import Job

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""Of chats."""
KEY = {"Authorization": "Bearer secret"}
NEW = 10


class Server(NamedTuple):
    """A server that answers."""

    address: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(folder: Path, log: Path) -> Iterator[Server]:
    """Starts a server with the routes of the plug-in; ends it and its processes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
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
        "chat-template": TEMPLATE,
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
        deadline = time.monotonic() + 0.8 * patience()
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/health").status_code == httpx.codes.OK:
                    break
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield Server(address, process)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine and worker
        process.wait()


def worker_of(server: Server) -> psutil.Process:
    """The process that has the model."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return max(children, key=lambda child: child.memory_info().rss)


def body(job: Job, **changes: Any) -> dict[str, Any]:
    """The body of a completion."""
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


def frames_of(data: bytes) -> list[bytes]:
    """Splits a stream of captures, which is whole."""
    frames = []
    while length := int.from_bytes(data[:8], "little"):
        frames.append(data[8 : 8 + length])
        data = data[8 + length :]
    assert data == bytes(8)
    return frames
