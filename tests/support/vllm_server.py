"""The OpenAI server of vLLM: front end, engine and worker in separate processes."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from support.engine_server import free_port, started
from support.vllm_engine import ENVIRONMENT, patience

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from support.engines import Job

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""Template of chats."""
KEY = {"Authorization": "Bearer secret"}
NEW = 10
SEVERAL = """
import importlib.metadata
find = importlib.metadata.version
importlib.metadata.version = lambda name: "0+cpu" if name == "vllm" else find(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""Program that starts several API servers; the build for CPUs is another package than vllm."""
AHEAD = """
import runpy
from support.vllm_engine import scheduling_ahead
with scheduling_ahead():
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""
"""Program that starts a server which schedules asynchronously."""


class Server(NamedTuple):
    """A server that answers."""

    address: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(folder: Path, log: Path, *, ahead: bool = False, **further: Any) -> Iterator[Server]:
    """Starts a server with the routes of the plug-in; ends it and its processes.

    `ahead`: it schedules asynchronously.
    """
    port = free_port()
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
        **further,
    }
    program = ["-m", "vllm.entrypoints.openai.api_server"]
    if "api-server-count" in further:
        program = ["-c", SEVERAL, "serve"]
    elif ahead:
        program = ["-c", AHEAD]
    command = [sys.executable, *program, "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = {**ENVIRONMENT, "VLLM_PLUGINS": "ferrohook"}
    if ahead:
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if "data-parallel-size" in further:
        # A core for each rank; 0.33 takes a NUMA node for each, unless the second is set.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_SIM_MULTI_NUMA": "0"}
    with started(command, port, log, environment, 0.8 * patience()) as process:
        yield Server(f"http://127.0.0.1:{port}", process)


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
