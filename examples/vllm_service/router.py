"""`Router`: takes requests, and sends those with a plan to servers that serve plans.

If a server dies before its answer begins, another one is asked; an answer that has begun ends with
an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.requests import Request

LOG = logging.getLogger("ray.serve")
PAGE = Path(__file__).with_name("page.html")
COMPLETIONS = {"/v1/completions", "/v1/chat/completions"}
CAPABILITIES = "/v1/ferrohook/capabilities"
# Ids of responses name the server: captures are where they were taken.
CAPTURES = re.compile(r"/v1/ferrohook/captures/\w+-(?P<name>[\w-]+)\.\w+(/stream)?")
HEADER = "X-Ferrohook-Captures"
"""Header with the token of a request's captures, of answers and of those who fetch them."""
ABORTED = re.compile(rb'"finish_reason":\s*"abort"')


class Server(NamedTuple):
    """A server of vLLM that answers."""

    name: str
    url: str
    key: str
    """API key, of this one process: no other server at the URL takes its requests."""
    capabilities: Any
    """JSON of ferrohook's plug-in; None if it serves no plans."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each request to it."""
        return {"Authorization": f"Bearer {self.key}"}


class Router:
    """Deployment of Ray Serve that takes the HTTP requests.

    Args:
        replicas: handles of the deployments of `Replica`, by name.
        transport: of the requests to the servers; HTTP by default.
    """

    def __init__(
        self, replicas: Mapping[str, Any], transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._servers: dict[str, Server] = {}
        self._client = httpx.AsyncClient(
            transport=transport,
            timeout=httpx.Timeout(600, connect=5),
            limits=httpx.Limits(max_connections=None),
        )
        self._watches = [
            asyncio.create_task(self._watch(name, handle)) for name, handle in replicas.items()
        ]

    async def __call__(self, request: Request) -> Response:
        """Answers one request."""
        path = request.url.path
        answer: Response | None = None
        match request.method:
            case "GET" if path == "/":
                answer = FileResponse(PAGE)
            case "GET" if path == "/replicas":
                servers = self._servers.values()
                answer = JSONResponse({it.name: it.capabilities is not None for it in servers})
            case "GET" if path in {CAPABILITIES, "/v1/models"}:
                answer = await self._any("GET", path, plan=path == CAPABILITIES)
            case "GET" if (found := CAPTURES.fullmatch(path)) is not None:
                if (server := self._servers.get(found["name"])) is not None:
                    token = request.headers.get(HEADER)
                    query = f"{path}?{request.url.query}"
                    answer = await self._ask(server, "GET", query, token=token)
                answer = answer or failure(502, f"{found['name']} does not answer; it had {path}")
            case "POST" if path in COMPLETIONS:
                answer = await self._complete(path, await request.body())
        return answer or failure(404, f"there is no {request.method} {path} here")

    # --- servers -----------------------------------------------------------------------------

    async def _watch(self, name: str, handle: Any) -> None:
        """Asks a replica for its server, and each new server for its capabilities."""
        while True:
            try:
                url, key = await handle.address.remote()
                if name not in self._servers or self._servers[name].key != key:
                    self._servers[name] = await self._connect(Server(name, url, key, None))
            except Exception as error:  # noqa: BLE001 (whatever Ray raises for a replica that died)
                LOG.debug("%s does not answer: %r", name, error)
            await asyncio.sleep(0.5)

    async def _connect(self, server: Server) -> Server:
        """Returns a server with its capabilities.

        Raises:
            httpx.HTTPError: it does not answer.
        """
        (await self._client.get(f"{server.url}/health")).raise_for_status()
        answer = await self._client.get(server.url + CAPABILITIES, headers=server.headers)
        if answer.status_code in {404, 501}:  # without the plug-in, or it refuses plans
            return server
        return server._replace(capabilities=answer.raise_for_status().json())

    def _lose(self, server: Server) -> None:
        """Sends a server no more requests, until its replica answers again."""
        if self._servers.get(server.name) == server:
            LOG.warning("%s is lost", server.name)
            del self._servers[server.name]

    # --- requests ----------------------------------------------------------------------------

    async def _complete(self, path: str, content: bytes) -> Response:
        """Answers a completion."""
        try:
            body = json.loads(content)
            plan = "ferrohook" in (body.get("vllm_xargs") or ())
        except (ValueError, AttributeError, TypeError) as error:
            return failure(400, f"the body is no JSON of a completion: {error}")
        # Written anew, so that the server reads the keys that were read here.
        return await self._any("POST", path, json.dumps(body), plan=plan)

    async def _any(self, method: str, path: str, body: str = "", *, plan: bool) -> Response:
        """Returns the answer of the first server that takes a request.

        Args:
            method: of HTTP.
            path: of the URL.
            body: of the request.
            plan: True if the server has to serve plans.
        """
        able = [it for it in self._servers.values() if it.capabilities is not None or not plan]
        refused = None
        for server in random.sample(able, len(able)):
            answer = await self._ask(server, method, path, body)
            if answer is not None and answer.status_code != httpx.codes.BAD_REQUEST:
                return answer
            refused = answer or refused  # another server may have the modules of the plan
        kind = "that serves plans " if plan else ""
        return refused or failure(503, f"no replica {kind}answers: try again in a minute")

    async def _ask(
        self, server: Server, method: str, path: str, body: str = "", token: str | None = None
    ) -> Response | None:
        """Returns the answer of a server; None if it died before the answer began."""
        request_id = f"{server.name}.{uuid.uuid4().hex}"
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        if token is not None:
            headers[HEADER] = token
        request = self._client.build_request(
            method, server.url + path, content=body, headers=server.headers | headers
        )
        try:
            answer = await self._client.send(request, stream=True)
            kind = answer.headers.get("content-type", "")
            own = {HEADER: answer.headers[HEADER]} if HEADER in answer.headers else None
            if answer.is_success and kind.startswith("text/event-stream"):
                return StreamingResponse(self._events(server, answer), headers=own, media_type=kind)
            if answer.is_success and "/stream" in path:
                return StreamingResponse(_frames(answer), media_type=kind)
            content = await answer.aread()
            if answer.is_server_error:  # of one plan, or of all that is sent to the server
                await self._connect(server)
        except httpx.HTTPError:
            self._lose(server)
            return None
        if answer.status_code == httpx.codes.UNAUTHORIZED or aborted(content):
            self._lose(server)
            return None
        return Response(content, answer.status_code, headers=own, media_type=kind)

    async def _events(self, server: Server, answer: httpx.Response) -> AsyncIterator[bytes]:
        """Yields the events of a streamed text; the last one is an error if it is not whole."""
        rest, done = b"", False
        try:
            async for part in answer.aiter_bytes():
                *lines, rest = (rest + part).split(b"\n")
                if any(map(aborted, lines)):
                    break
                done = done or b"data: [DONE]" in lines
                yield b"".join(line + b"\n" for line in lines)
        except httpx.HTTPError:
            self._lose(server)
        finally:
            await answer.aclose()
        if not done:
            message = f"{server.name} was lost: the text is not whole"
            yield b"\ndata: " + failure(502, message).body + b"\n\n"


async def _frames(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yields a stream of captures; one that is not whole lacks its last frame."""
    try:
        async for part in answer.aiter_bytes():
            yield part
    except httpx.HTTPError:
        LOG.warning("a stream of captures was cut off")
    finally:
        await answer.aclose()


def aborted(text: bytes) -> bool:
    """True if a text ends where its server was stopped."""
    return ABORTED.search(text) is not None


def failure(code: int, message: str) -> Response:
    """An error in OpenAI's form."""
    return JSONResponse({"error": {"message": message, "type": "router", "code": code}}, code)
