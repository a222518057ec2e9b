"""Plans in the messages of a WebSocket, whose routes would ignore them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra service")

from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

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
