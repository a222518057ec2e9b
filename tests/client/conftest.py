"""A server with plans, and its address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.planned_server import PlannedServer


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[PlannedServer, str]]:
    for package in ("fastapi", "httpx", "psutil", "safetensors", "transformers"):
        pytest.importorskip(package)
    from support.planned_server import PlannedServer  # noqa: PLC0415 (where it can be imported)

    server = PlannedServer()
    with server.running() as url:
        yield server, url


@pytest.fixture
def server(running: tuple[PlannedServer, str]) -> PlannedServer:
    server, _ = running
    server.bodies.clear()
    server.forget()
    server.busy = 0
    server.ignores_plans = server.breaks_off = False
    server.engine = "vllm"
    return server


@pytest.fixture
def url(running: tuple[PlannedServer, str]) -> str:
    return running[1]
