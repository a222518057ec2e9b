"""Servers of engines: front end, engine and worker in separate processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


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
        environment: variables beside this process's.
        patience: seconds within which it answers.
    """
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
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
