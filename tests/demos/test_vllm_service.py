"""The router of `examples/vllm_service`, before servers that are made up here."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

httpx = pytest.importorskip("httpx")
applications = pytest.importorskip("starlette.applications")

from starlette.routing import Route

from examples.vllm_service.router import HEADER, Router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PLAN = {"vllm_xargs": {"ferrohook": '{"version": 1, "entries": []}'}}
RESET = httpx.ReadError("connection reset")
DONE = b'data: {"id": "cmpl-1"}\n\ndata: [DONE]\n\n'


class Cut(httpx.AsyncByteStream):
    """A body that ends where its server died."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part
        raise RESET


class Fake:
    """A server of vLLM."""

    def __init__(self, name: str, capabilities: int = 200) -> None:
        self.name = name
        self.key = f"key of {name}"
        self.capabilities = capabilities
        self.health = 200
        self.up = True
        self.taken: list[Any] = []
        """Bodies and headers of completions."""
        self.answer: Callable[[], Any] = lambda: httpx.Response(200, json={"from": name})

    async def address(self) -> tuple[str, str]:
        if not self.up:
            raise RuntimeError(self.name)
        return f"http://{self.name}", self.key

    def __call__(self, request: Any) -> Any:
        path = request.url.path
        if not self.up:
            raise httpx.ConnectError(self.name)
        if path == "/health":
            return httpx.Response(self.health)
        if request.headers["Authorization"] != f"Bearer {self.key}":
            return httpx.Response(401)
        if path == "/v1/ferrohook/capabilities":
            return httpx.Response(self.capabilities, json={"of": self.name})
        if path.startswith("/v1/ferrohook/captures/"):
            token = request.headers.get(HEADER, "no token")
            content = f"{self.name} {path} {request.url.query.decode()} {token}"
            return httpx.Response(200, content=content)
        self.taken.append((json.loads(request.content), request.headers))
        return self.answer()


class Service:
    """A router, and a client of it."""

    def __init__(self, *fakes: Fake) -> None:
        self.fakes = {fake.name: fake for fake in fakes}
        handles = {
            name: SimpleNamespace(address=SimpleNamespace(remote=fake.address))
            for name, fake in self.fakes.items()
        }
        transport = httpx.MockTransport(lambda request: self.fakes[request.url.host](request))
        router = Router(handles, transport)

        async def endpoint(request: Any) -> Any:
            return await router(request)

        route = Route("/{path:path}", endpoint, methods=["GET", "POST", "PUT"])
        app = applications.Starlette(routes=[route])
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://router"
        )

    async def replicas(self, **expected: bool) -> None:
        """Waits until the router has found these."""
        while (await self.client.get("/replicas")).json() != expected:  # noqa: ASYNC110 (the router has no event)
            await asyncio.sleep(0.01)

    async def complete(self, body: Any = PLAN) -> Any:
        return await self.client.post("/v1/completions", json=body)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_only_servers_that_serve_plans_get_plans() -> None:
    bare, refusing, able = Fake("bare", 404), Fake("refusing", 501), Fake("able")

    async def test() -> None:
        service = Service(bare, refusing, able)
        await service.replicas(bare=False, refusing=False, able=True)
        for _ in range(20):
            assert (await service.complete()).json() == {"from": "able"}
        for body in ({}, {"vllm_xargs": {"other": 1}}, {"vllm_xargs": None}):
            while not (bare.taken and refusing.taken):
                assert (await service.complete(body)).is_success
            assert not any("ferrohook" in (it.get("vllm_xargs") or {}) for it, _ in bare.taken)
            assert not any("ferrohook" in (it.get("vllm_xargs") or {}) for it, _ in refusing.taken)
            bare.taken.clear()
            refusing.taken.clear()
        able.up = False
        answer = await service.complete()
        assert answer.status_code == 503
        assert "no replica that serves plans" in answer.json()["error"]["message"]
        assert not bare.taken
        assert not refusing.taken

    run(test)


def test_a_plan_that_one_server_refuses_goes_to_another() -> None:
    compiled, eager = Fake("compiled"), Fake("eager")
    compiled.answer = lambda: httpx.Response(400, json={"error": "no site"})

    async def test() -> None:
        service = Service(compiled, eager)
        await service.replicas(compiled=True, eager=True)
        while not compiled.taken:
            assert (await service.complete()).json() == {"from": "eager"}
        eager.answer = compiled.answer
        answer = await service.complete()
        assert (answer.status_code, answer.json()) == (400, {"error": "no site"})

    run(test)


def lost(how: str) -> Callable[[], Any]:
    """Answers of a server that dies before it answered."""

    def reset() -> Any:
        raise RESET

    aborted = {"choices": [{"text": "cut", "finish_reason": "abort"}]}
    return {
        "reset": reset,
        "cut": lambda: httpx.Response(200, stream=Cut(b'{"choices"')),
        "aborted": lambda: httpx.Response(200, json=aborted),
        "engine": lambda: httpx.Response(500, json={}),
    }[how]


@pytest.mark.parametrize("how", ["reset", "cut", "aborted", "engine"])
def test_an_answer_that_has_not_begun_is_asked_of_another(how: str) -> None:
    dying, other = Fake("dying"), Fake("other")

    async def test() -> None:
        service = Service(dying, other)
        await service.replicas(dying=True, other=True)
        dying.answer = lost(how)
        if how == "engine":
            dying.health = 503
        body = {**PLAN, "prompt": [1, 2]}
        while not dying.taken:
            assert (await service.complete(body)).json() == {"from": "other"}
        assert dying.taken[0][0] == body
        assert other.taken[-1][0] == body

    run(test)


def test_the_failure_of_one_plan_is_answered_and_loses_no_server() -> None:
    fake = Fake("able")
    fake.answer = lambda: httpx.Response(500, json={"error": "the plan failed"})

    async def test() -> None:
        service = Service(fake)
        await service.replicas(able=True)
        assert (await service.complete()).json() == {"error": "the plan failed"}
        await service.replicas(able=True)
        assert len(fake.taken) == 1

    run(test)


def test_a_new_server_at_the_address_gets_no_plan_before_it_was_asked() -> None:
    fake = Fake("able")

    async def test() -> None:
        service = Service(fake)
        await service.replicas(able=True)
        fake.key, fake.capabilities = "another", 404  # restarted without the plug-in
        answer = await service.complete()
        assert answer.status_code == 503
        assert not fake.taken
        await service.replicas(able=False)
        assert (await service.complete()).status_code == 503
        assert (await service.complete({})).json() == {"from": "able"}

    run(test)


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (httpx.ByteStream(DONE), True),
        (httpx.ByteStream(b'data: {"text": "a\xe2\x80\xa8b"}\n\ndata: [DONE]\n\n'), True),
        (httpx.ByteStream(b'data: {"id": "cmpl-1"}\n\n'), False),
        (Cut(b'data: {"id": "cmpl-1"}\n\nda', b'ta: {"id'), False),
        (Cut(), False),
        (httpx.ByteStream(DONE.replace(b"}", b',"finish_reason":"abort"}')), False),
    ],
)
def test_a_streamed_text_is_whole_or_ends_with_an_error(body: Any, *, whole: bool) -> None:
    fake = Fake("able")
    kind = {"content-type": "text/event-stream; charset=utf-8"}
    fake.answer = lambda: httpx.Response(200, headers=kind, stream=body)

    async def test() -> None:
        service = Service(fake)
        await service.replicas(able=True)
        answer = await service.complete()
        events = [part for part in answer.content.split(b"\n\n") if part.strip()]
        for event in events[:-1]:
            json.loads(event.removeprefix(b"data: "))
        if whole:
            assert answer.content == b"".join([part async for part in body])
            assert events[-1] == b"data: [DONE]"
        else:
            error = json.loads(events[-1].strip().removeprefix(b"data: "))["error"]
            assert error["message"] == "able was lost: the text is not whole"

    run(test)


def test_captures_come_from_the_server_that_has_them() -> None:
    fakes = Fake("vllm-0"), Fake("vllm-1")

    async def test() -> None:
        service = Service(*fakes)
        await service.replicas(**{fake.name: True for fake in fakes})
        for fake in fakes:
            while not fake.taken:
                await service.complete()
            path = f"/v1/ferrohook/captures/chatcmpl-{fake.taken[0][1]['X-Request-Id']}"
            fake.answer = lambda: httpx.Response(200, headers={HEADER: "secret"}, json={})
            answer = await service.client.get(f"{path}?index=1", headers={HEADER: "secret"})
            assert answer.text == f"{fake.name} {path} index=1 secret"
            assert (await service.client.get(path)).text.endswith("no token")
            assert (await service.complete()).headers.get(HEADER, "secret") == "secret"
            assert (await service.client.get(f"{path}/stream")).text.startswith(fake.name)
        fakes[1].up = False
        answer = await service.client.get(path)
        assert answer.status_code == 502
        assert "vllm-1 does not answer" in answer.text

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b'{"vllm_xargs": 7}', 400),
        ("PUT", "/v1/ferrohook/vectors", b"", 404),
        ("POST", "/v1/embeddings", b"{}", 404),
        ("GET", "/metrics", b"", 404),
        ("GET", "/v1/ferrohook/captures/cmpl-able.1%2F..%2F..%2Fvectors", b"", 404),
        ("GET", "/v1/ferrohook/captures/cmpl-nobody.1", b"", 502),
    ],
)
def test_other_requests_are_refused(method: str, path: str, content: bytes, status: int) -> None:
    fake = Fake("able")

    async def test() -> None:
        service = Service(fake)
        await service.replicas(able=True)
        answer = await service.client.request(method, path, content=content)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status
        assert not fake.taken

    run(test)


def test_the_page_has_no_external_resource() -> None:
    async def test() -> None:
        answer = await Service().client.get("/")
        assert answer.is_success
        assert "://" not in answer.text
        assert "default-src 'none'" in answer.text

    run(test)
