"""`Replica`: an OpenAI server of vLLM with ferrohook's plug-in, in a separate process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

import httpx
import ray

if TYPE_CHECKING:
    from collections.abc import Sequence


class Replica:
    """Deployment of Ray Serve that starts one server; it fails its health check when that dies.

    Args:
        options: of vLLM's command line.
    """

    def __init__(self, options: Sequence[str]) -> None:
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's own
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        self._url = f"http://{host}:{port}"
        # Another server at this address, or a later one, refuses this key.
        self._key = uuid.uuid4().hex
        # The kernel ends the server with this process, also after SIGKILL.
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable]
        command += ["-m", "vllm.entrypoints.openai.api_server", f"--host={host}", f"--port={port}"]
        environment = {"VLLM_PLUGINS": "ferrohook", **os.environ, "VLLM_API_KEY": self._key}
        self._process = subprocess.Popen([*command, *options], env=environment)  # noqa: S603 (the operator's)
        while not self._is_up():
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            self.check_health()
        except httpx.HTTPError:
            return False
        return True

    def check_health(self) -> None:
        """Raises if the server does not work; Ray Serve then replaces the replica."""
        if (code := self._process.poll()) is not None:
            msg = f"vLLM ended with code {code}: its output is in the logs of Ray's workers"
            raise RuntimeError(msg)
        httpx.get(f"{self._url}/health").raise_for_status()

    def address(self) -> tuple[str, str]:
        """Returns the server's URL and API key."""
        return self._url, self._key

    def __del__(self) -> None:
        self._process.terminate()
