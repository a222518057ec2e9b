"""Servers of engines: front end, engine and worker in separate processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Final

import httpx

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

_ENVIRONMENT: Final = dict(os.environ)
"""Variables before an engine of this process added its own, such as how processes start."""


def free_port() -> int:
    """Returns an unused port of this machine."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


@contextlib.contextmanager
def started(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str], patience: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a server and waits until it answers; ends it and its processes.

    Args:
        command: starts it.
        port: that it listens on.
        log: takes its output.
        environment: variables beside the ones that this process started with.
        patience: seconds within which it answers.
    """
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **environment},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"http://127.0.0.1:{port}/health")
                if answer.status_code == httpx.codes.OK:
                    break
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its other processes
        process.wait()


def check_unserved_routes(client: httpx.Client, served: Collection[str], plan: str) -> None:
    """Asserts that a server refuses a plan on each route but some, wherever its body has it.

    Args:
        client: of the server.
        served: paths of the routes that serve plans.
        plan: its JSON.
    """
    given = {"ferrohook": plan}
    bodies = [{"vllm_xargs": given}, {"sampling_params": [{"custom_params": given}]}]
    found = client.get("/openapi.json").json()["paths"]
    assert served <= found.keys()
    asked = 0
    for path, methods in found.items():
        if path in served or path.startswith("/v1/ferrohook"):
            continue
        for method in methods.keys() & {"post", "put"}:
            for body in bodies:
                answer = client.request(method, re.sub(r"\{.*?\}", "x", path), json=body)
                assert answer.status_code == httpx.codes.BAD_REQUEST, (path, answer.text)
                assert "does not support ferrohook plans" in answer.json()["error"]["message"]
                asked += 1
    assert asked > 10
