"""Answers of servers that are errors, or none of ferrohook's: each an exception with the reason."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("safetensors")

import safetensors.torch
import torch

import ferrohook as fh
from ferrohook.client import (
    AsyncClient,
    Client,
    PlanFailedError,
    RequestRefusedError,
    ServerError,
    UnavailableError,
)
from ferrohook.engines.wire import HEADER, packed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

INFO = {
    "engine": "vllm",
    "version": "0.32.0",
    "served": [],
    "refused": {},
    "capture_bytes": 1,
    "modules": {},
}
TEXT = {"id": "cmpl-1", "choices": [{"text": "w1", "finish_reason": "stop"}]}
KEEP = fh.Plan(fh.keep("0"))
TOKEN = {HEADER: "secret"}


def answering(**answers: Any) -> Callable[[Any], Any]:
    """A server with an answer for each last part of a path; 404 for others."""

    def answer(request: Any) -> Any:
        found = answers.get(request.url.path.rpartition("/")[2])
        if isinstance(found, Exception):
            raise found
        found = found or httpx.Response(404, json={"detail": "Not Found"})
        return httpx.Response(found.status_code, headers=found.headers, content=found.content)

    return answer


def both(answer: Callable[[Any], Any], plan: Any = None, prompt: Any = "w1") -> ServerError:
    """The error of both clients, which is the same."""
    transport = httpx.MockTransport(answer)

    async def run() -> None:
        async with AsyncClient("http://server", transport=transport) as client:
            await client.generate(prompt, plan)

    with pytest.raises(ServerError) as awaited:
        asyncio.run(run())
    client = Client("http://server", transport=transport)
    with client, pytest.raises(ServerError) as waited:
        client.generate(prompt, plan)
    assert type(awaited.value) is type(waited.value)
    assert str(awaited.value) == str(waited.value)
    return waited.value


@pytest.mark.parametrize(
    ("status", "content", "kind", "reason"),
    [
        (400, {"error": {"message": "no such module"}}, RequestRefusedError, "no such module"),
        (422, {"detail": "its vector is too wide"}, RequestRefusedError, "its vector is too wide"),
        (413, {"object": "error", "message": "too long"}, RequestRefusedError, "too long"),
        (501, {"error": {"message": "refused here"}}, RequestRefusedError, "refused here"),
        (500, {"error": {"message": "the plan of the request failed: x"}}, PlanFailedError, "x"),
        (500, {"error": "a text"}, ServerError, "a text"),
        (401, {"error": "Unauthorized"}, ServerError, "Unauthorized"),
        (404, b"<html>nothing here", ServerError, "<html>nothing here"),
        (503, b"", UnavailableError, "Service Unavailable"),
        (502, [1], UnavailableError, r"\[1\]"),
        (429, {"error": {"message": "slower"}}, UnavailableError, "slower"),
        (500, b"x" * 10_000, ServerError, "x{500} "),
    ],
)
def test_statuses(status: int, content: Any, kind: type[ServerError], reason: str) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    error = both(answering(completions=httpx.Response(status, content=raw)))
    assert type(error) is kind
    assert error.status == status
    with pytest.raises(kind, match=f"^{status}: .*{reason}"):
        raise error
    assert isinstance(error, fh.HookError)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))


def test_the_time_to_wait_is_the_server_s() -> None:
    error = both(answering(completions=httpx.Response(503, headers={"Retry-After": "7"})))
    assert isinstance(error, UnavailableError)
    assert error.retry_after == 7.0


@pytest.mark.parametrize("error", ["ConnectError", "ReadTimeout", "RemoteProtocolError"])
def test_errors_of_the_connection(error: str) -> None:
    found = both(answering(completions=getattr(httpx, error)("on purpose")))
    assert isinstance(found, UnavailableError)
    assert f"no answer: {error}: on purpose (http://server/v1/completions)" in str(found)


@pytest.mark.parametrize(
    "content",
    [b"", b"no json", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"text": "w1"}]}', b"null"],
)
def test_texts_that_are_none(content: bytes) -> None:
    error = both(answering(completions=httpx.Response(200, content=content)))
    assert type(error) is ServerError
    assert "does not come from a ferrohook server" in str(error)


def test_a_text_that_was_broken_off_is_none() -> None:
    choice = {"text": "w", "finish_reason": "abort"}
    error = both(answering(completions=httpx.Response(200, json={**TEXT, "choices": [choice]})))
    assert isinstance(error, UnavailableError)


def test_a_plan_is_not_sent_to_a_server_without_plans() -> None:
    """Such a server would answer with the text of the model without it."""
    error = both(answering(completions=httpx.Response(200, json=TEXT)), KEEP)
    assert isinstance(error, RequestRefusedError)
    assert "the server does not support plans" in str(error)
    refused = httpx.Response(501, json={"detail": "vllm 9.9 was not tested"})
    error = both(answering(capabilities=refused), KEEP)
    assert isinstance(error, RequestRefusedError)
    assert "vllm 9.9 was not tested" in str(error)
    other = httpx.Response(200, json={**INFO, "engine": "another"})
    assert "the server is a 'another'" in str(both(answering(capabilities=other), KEEP))


@pytest.mark.parametrize(
    ("captures", "kind", "reason"),
    [
        (httpx.Response(404, json={"detail": "fetched already"}), ServerError, "fetched already"),
        (
            httpx.Response(422, json={"detail": "they were dropped"}),
            PlanFailedError,
            "they were dropped",
        ),
        (httpx.Response(200, content=b""), ServerError, "does not come from a ferrohook"),
        (httpx.Response(200, content=b"\xff" * 40), ServerError, "does not come from a ferrohook"),
        (
            httpx.Response(200, content=safetensors.torch.save({})),
            ServerError,
            "does not come from",
        ),
        (
            httpx.Response(200, content=packed({}, {}, error="the position 3 never ran")),
            PlanFailedError,
            "the position 3 never ran",
        ),
    ],
)
def test_captures_that_are_missing_or_none(
    captures: Any, kind: type[ServerError], reason: str
) -> None:
    answers = {
        "capabilities": httpx.Response(200, json=INFO),
        "completions": httpx.Response(200, json=TEXT, headers=TOKEN),
        "cmpl-1": captures,
    }
    error = both(answering(**answers), KEEP)
    assert type(error) is kind
    assert reason in str(error)


def test_captures_are_asked_for_by_a_quoted_id_with_the_token_of_their_answer() -> None:
    """Ids are a server's: one may not lead to another route."""
    asked: list[Any] = []
    data = packed({"0": torch.ones(2, 3)}, {"0": [0, 1]})

    def answer(request: Any) -> Any:
        asked.append(request)
        if request.url.path.endswith("capabilities"):
            return httpx.Response(200, json=INFO)
        if request.method == "POST":
            return httpx.Response(200, json={**TEXT, "id": "../x?y"}, headers=TOKEN)
        return httpx.Response(200, content=data)

    with Client("http://server", transport=httpx.MockTransport(answer)) as client:
        found = client.generate("w1", KEEP)
    assert asked[-1].url.raw_path == b"/v1/ferrohook/captures/..%2Fx%3Fy"
    assert asked[-1].headers[HEADER] == "secret"
    assert found.acts["0"].equal(torch.ones(2, 3))


def test_the_key_and_other_options_are_sent() -> None:
    asked: list[Any] = []

    def answer(request: Any) -> Any:
        asked.append(request)
        return httpx.Response(200, json=TEXT)

    transport = httpx.MockTransport(answer)
    with Client("http://s", api_key="k", headers={"x": "y"}, transport=transport) as client:
        client.generate("w1", model="m", seed=3)
    assert asked[0].headers["authorization"] == "Bearer k"
    assert asked[0].headers["x"] == "y"
    assert json.loads(asked[0].content) == {"prompt": "w1", "seed": 3, "model": "m"}


def test_an_error_event_of_a_stream() -> None:
    lines = b'data: {"error": {"message": "the plan of the request failed: x", "code": 500}}\n\n'
    transport = httpx.MockTransport(answering(completions=httpx.Response(200, content=lines)))
    with (
        Client("http://server", transport=transport) as client,
        client.stream("w1") as stream,
        pytest.raises(PlanFailedError, match="x"),
    ):
        next(iter(stream))


def event_of(text: str, **fields: Any) -> bytes:
    choice = {"text": text, "finish_reason": None, **fields}
    event = {"id": "cmpl-1", "choices": [choice]}
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n"


TEXTS = ["a\u2028b", "c\x85\u2029d", "é\x0c"]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_ends_lines_at_line_feeds_only(size: int) -> None:
    """Separators of Unicode may stand in a text, and data is cut anywhere."""
    sent = b"".join(map(event_of, TEXTS)) + b"data: [DONE]"
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]

    async def later() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    def answer(_request: Any, content: Any) -> Any:
        return httpx.Response(200, content=content)

    transport = httpx.MockTransport(lambda request: answer(request, iter(pieces)))
    with Client("http://server", transport=transport) as client, client.stream("w1") as stream:
        first = next(iter(stream))
        assert [first, *stream] == TEXTS
        assert [*stream] == []
        assert stream.generated.text == "".join(TEXTS)

    async def run() -> None:
        transport = httpx.MockTransport(lambda request: answer(request, later()))
        async with (
            AsyncClient("http://server", transport=transport) as client,
            client.stream("w1") as stream,
        ):
            async for text in stream:
                assert text == TEXTS[0]
                break
            assert [text async for text in stream] == TEXTS[1:]
            assert stream.generated.text == "".join(TEXTS)

    asyncio.run(run())


@pytest.mark.parametrize("event", [b"{", b"[]", b'{"choices": [{}]}', b"\xff"])
def test_an_event_that_is_none_of_a_server(event: bytes) -> None:
    sent = httpx.Response(200, content=b"data: " + event + b"\n")
    transport = httpx.MockTransport(answering(completions=sent))
    with (
        Client("http://server", transport=transport) as client,
        client.stream("w1") as stream,
        pytest.raises(ServerError, match="does not come from a ferrohook server"),
    ):
        next(iter(stream))


def test_numbers_that_json_has_not_are_refused() -> None:
    plan = {"entries": [{"type": "on", "hook": {"type": "Scale", "factor": float("nan")}}]}
    with Client("http://server") as client, pytest.raises(ValueError, match="not JSON compliant"):
        client.generate("w1", plan)
