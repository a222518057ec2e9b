"""The HTTP server of SGLang: front end, scheduler and detokenizer in separate processes."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from ferrohook.engines.wire import NAME
from support.engine_server import free_port, started
from support.sglang_engine import ENVIRONMENT, OPTIONS

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    import ferrohook as fh

PATIENCE = 900.0
NEW = 10


class Server(NamedTuple):
    """A server that answers."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, body: Any) -> httpx.Response:
        """Asks it."""
        return httpx.post(f"{self.address}{path}", json=body, timeout=300)


@contextlib.contextmanager
def serving(folder: Path, log: Path, **options: Any) -> Iterator[Server]:
    """Starts a server; ends it and its processes."""
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    port = free_port()
    named: dict[str, Any] = {**OPTIONS, "model_path": folder, "host": "127.0.0.1", "port": port}
    named |= {"chat_template": template, "served_model_name": "tiny", **options}
    flags = {"disable_cuda_graph", "enable_mixed_chunk", "log_requests"} & named.keys()
    command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
    command += [f"--{name.replace('_', '-')}" for name in flags]
    for name, value in named.items():
        if name not in flags | {"skip_tokenizer_init"}:
            command += [f"--{name.replace('_', '-')}", str(value)]
    with started(command, port, log, ENVIRONMENT, PATIENCE) as process:
        yield Server(f"http://127.0.0.1:{port}", process, log)


def custom(plan: fh.Plan | str | None) -> dict[str, Any]:
    """Custom parameters that give a request a plan."""
    if plan is None:
        return {}
    return {"custom_params": {NAME: plan if isinstance(plan, str) else plan.to_json()}}
