"""`add_exception_handlers`: the response to each exception, in applications of both frameworks."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import torch
from torch import nn

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

from fastapi import Body, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient

from ferrohook.service import Batcher, add_exception_handlers, check_deadline, deadline
from support.http_server import serving_app
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.websockets import WebSocket

INTERNAL = "db.internal:5432 refused the connection"
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
X = torch.ones(2, 4)


def call(plan: fh.Plan, **options: Any) -> None:
    with plan.prepare(MODEL, **options) as prepared, prepared.open():
        MODEL(X)


def add_of_a_wrong_width() -> None:
    with fh.scope():
        fh.register(MODEL, "1", fh.Add(torch.ones(3)))
        MODEL(X)


def exceed_the_deadline() -> None:
    hook = fh.register(MODEL, "1", check_deadline, phase="forward_pre")
    with hook, deadline(0.0):
        MODEL(X)


def ask_a_closed_batcher() -> None:
    batcher = Batcher(MODEL, torch.cat, lambda output, rows: output[rows])
    batcher.close()
    batcher.submit(X)


def fail(error: Exception) -> Callable[[], None]:
    def failing() -> None:
        raise error

    return failing


def apps(failing: Callable[[], None]) -> list[Starlette]:
    """An application of each framework, with an endpoint that fails."""

    async def starlette_endpoint(_request: Request) -> PlainTextResponse:
        failing()
        return PlainTextResponse("")

    async def websocket(socket: WebSocket) -> None:
        await socket.accept()
        failing()

    starlette = Starlette(routes=[Route("/", starlette_endpoint), WebSocketRoute("/ws", websocket)])
    fastapi = FastAPI(routes=[WebSocketRoute("/ws", websocket)])
    fastapi.get("/")(failing)  # in a thread
    for app in (starlette, fastapi):
        add_exception_handlers(app)
    return [starlette, fastapi]


@pytest.mark.parametrize(
    ("failing", "status", "reason"),
    [
        (lambda: call(fh.Plan(fh.keep("7"))), 422, "matches '7'; the first names in it are '0'"),
        (lambda: call(fh.Plan(fh.on("1", fh.Add(torch.ones(3))))), 422, "has a width of 3"),
        (add_of_a_wrong_width, 422, "its vector has a width of 3"),
        (lambda: call(fh.Plan(fh.keep("1")), max_bytes=3), 422, "would exceed max_bytes=3"),
        (exceed_the_deadline, 504, "deadline exceeded: send a smaller request, or try again later"),
        (ask_a_closed_batcher, 503, "the batcher is closed"),
    ],
)
def test_exceptions_that_a_caller_can_act_on(
    failing: Callable[[], None], status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    for app in apps(failing):
        response = TestClient(app).get("/")
        assert response.status_code == status
        assert response.json().keys() == {"detail"}
        assert reason in response.json()["detail"]
        assert INTERNAL not in response.text
        assert Path(__file__).name not in response.text
        assert ("retry-after" in response.headers) == (status == 503)
    assert not [each for each in caplog.records if each.name == "ferrohook"]


def test_another_timeout_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for app in apps(fail(TimeoutError(INTERNAL))):
        caplog.clear()
        response = TestClient(app).get("/")
        assert response.status_code == 504
        assert INTERNAL not in response.text
        (record,) = (each for each in caplog.records if each.name == "ferrohook")
        assert record.getMessage() == "GET '/' timed out"
        assert INTERNAL in str(record.exc_info)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(INTERNAL),
        KeyError(INTERNAL),
        fh.errors.StoreError(INTERNAL),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_other_exception_is_logged_by_an_id_and_not_shown(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    for app in apps(fail(error)):
        caplog.clear()
        response = TestClient(app, raise_server_exceptions=False).get("/?key=private")
        assert response.status_code == 500
        assert INTERNAL not in response.text
        (record,) = (each for each in caplog.records if each.name == "ferrohook")
        (number,) = re.findall(r"for error id (\w{16})$", response.json()["detail"])
        assert record.getMessage() == f"GET '/' failed (error id {number})"
        assert record.levelno == logging.ERROR
        assert record.exc_info is not None
        assert record.exc_info[1] is error


def test_a_connection_is_told_to_close_before_a_server_closes_it() -> None:
    import httpx

    for app in apps(fail(RuntimeError(INTERNAL))):
        with serving_app(app, LIMIT) as url, httpx.Client(base_url=url, timeout=LIMIT) as client:
            for _ in range(3):
                response = client.get("/")
                assert response.status_code == 500
                assert response.headers["connection"] == "close"


def test_other_handlers_of_the_application_stay() -> None:
    async def answer(_request: Request, _error: Exception) -> PlainTextResponse:
        return PlainTextResponse("no such layer", 404)

    for app in apps(lambda: call(fh.Plan(fh.keep("7")))):
        app.add_exception_handler(fh.SelectionError, answer)
        response = TestClient(app).get("/")
        assert (response.status_code, response.text) == (404, "no such layer")


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"', f'"{"x" * 2**20}"', "1, 2"])
def test_an_invalid_request_gets_the_reason_without_its_input(value: str) -> None:
    def refuse(_request: Request, _error: Exception) -> PlainTextResponse:
        return PlainTextResponse("mine", 400)

    def endpoint(number: Annotated[int, Body(embed=True)]) -> int:
        return number

    for own in (False, True):
        app = FastAPI()
        app.post("/")(endpoint)
        if own:
            app.add_exception_handler(RequestValidationError, refuse)
        add_exception_handlers(app)
        client = TestClient(app)
        assert client.post("/", json={"number": 3}).json() == 3
        response = client.post("/", content=f'{{"number": {value}}}')
        if own:
            assert (response.status_code, response.text) == (400, "mine")
            continue
        assert response.status_code == 422
        assert len(response.content) < 300
        (error,) = response.json()["detail"]
        assert error.keys() == {"type", "loc", "msg"}
        assert error["loc"][0] == "body"


def test_a_websocket_ends_with_the_exception() -> None:
    for app in apps(lambda: call(fh.Plan(fh.keep("7")))):
        with (
            pytest.raises(fh.SelectionError, match="matches '7'"),
            TestClient(app).websocket_connect("/ws") as socket,
        ):
            socket.receive_text()


def test_an_application_that_has_started_is_refused() -> None:
    for app in apps(lambda: None):
        TestClient(app).get("/")
        with pytest.raises(fh.HookError, match="before the application's first request"):
            add_exception_handlers(app)
