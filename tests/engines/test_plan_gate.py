"""Plans on routes that would ignore them, and in the messages of a WebSocket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra service")

from fastapi import FastAPI, Request, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from ferrohook.engines import routes
from ferrohook.engines.routes import PlanGate


def repeating(ended: list[int]) -> TestClient:
    """Returns a client of a server that repeats each message.

    Args:
        ended: takes the code with which a connection ends for the route.
    """
    app = FastAPI()

    @app.websocket("/repeat")
    async def repeat(socket: WebSocket) -> None:
        await socket.accept()
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            await socket.send_text(message.get("text") or message["bytes"].decode())
        ended.append(message["code"])

    PlanGate.add(app, {"/v1/completions"})
    return TestClient(app)


@pytest.mark.parametrize("binary", [False, True])
def test_a_plan_closes_the_connection(binary: bool) -> None:
    session: dict[str, Any] = {"type": "session.update", "model": "m"}
    plain = [json.dumps(session), "ferrohook", '{"ferrohook": 1}', '"ferrohook" and no JSON']
    planned = json.dumps({**session, "vllm_xargs": {"ferrohook": "{}"}})
    ended: list[int] = []
    with repeating(ended).websocket_connect("/repeat") as socket:

        def send(text: str) -> None:
            if binary:
                socket.send_bytes(text.encode())
            else:
                socket.send_text(text)

        for text in plain:
            send(text)
            assert socket.receive_text() == text
        send(planned)
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_text()
    assert closed.value.code == 1008
    assert closed.value.reason == "ferrohook plans are not supported here"
    assert ended == [1008]


def counting(root: str = "") -> TestClient:
    """Returns a client of a server that answers with the number of bytes of a body."""
    app = FastAPI()

    @app.post("/{path:path}")
    async def count(path: str, request: Request) -> tuple[str, int]:
        return path, len(await request.body())

    PlanGate.add(app, {"/v1/completions"})
    return TestClient(app, root_path=root)


PLANNED = {"vllm_xargs": {"ferrohook": "{}"}}


@pytest.mark.parametrize("root", ["", "/api"])
def test_paths_are_the_routes_own(root: str) -> None:
    client = counting(root)
    assert client.post("/v1/completions", json=PLANNED).status_code == 200
    refused = client.post("/v1/embeddings", json=PLANNED)
    assert refused.status_code == 400
    assert "/v1/embeddings does not support ferrohook plans" in refused.text


def test_a_form_that_carries_a_plan_is_refused() -> None:
    client = counting()
    audio = {"file": b"ferrohook" * 10}
    plan = {"vllm_xargs": json.dumps(PLANNED["vllm_xargs"])}
    assert client.post("/v1/audio/transcriptions", files=audio, data=plan).status_code == 400
    said = {"prompt": json.dumps(PLANNED["vllm_xargs"])}
    assert client.post("/v1/audio/transcriptions", files=audio, data=said).status_code == 200


def test_long_bodies_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_MOST_CHECKED", 1000)
    waiting: list[int] = []

    async def receive() -> Any:
        waiting.append(1)
        return {"type": "http.request", "body": bytes(400), "more_body": len(waiting) < 20}

    async def run(path: str) -> int:
        """Returns how many parts had come when the application began to read."""
        waiting.clear()
        begun: list[int] = []

        async def app(_scope: Any, receive: Any, _send: Any) -> None:
            begun.append(len(waiting))
            size = 0
            more = True
            while more:
                message = await receive()
                size += len(message["body"])
                more = message["more_body"]
            assert size == 8000

        scope = {"type": "http", "path": path, "method": "PUT"}
        await PlanGate(app, {"/v1/completions"})(scope, receive, lambda _: None)  # type: ignore[arg-type]
        return begun[0]

    assert asyncio.run(run("/v1/ferrohook/vectors")) == 0
    assert asyncio.run(run("/v1/files")) == 3
