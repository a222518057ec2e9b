"""Entry point `vllm.endpoint_plugins`: uploads and captures over HTTP, beside vLLM's own routes.

Loaded if VLLM_PLUGINS names it. The paths begin with /v1, which vLLM's API key guards.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from typing import TYPE_CHECKING, Any, Final

from fastapi import HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import MutableHeaders

from ferrohook.engines.routes import EngineRoutes
from ferrohook.engines.vllm.calls import call_async, fetched, found, taken
from ferrohook.engines.vllm.plugin import connect_async, sync
from ferrohook.engines.vllm.supported import CAPABILITIES
from ferrohook.engines.wire import FIELD, HEADER, error_of, is_empty, packed
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ferrohook.engines.uploads import Uploads
    from ferrohook.engines.vllm.requests import CapturingRequest, FrontEnd

_BINARY: Final = "application/octet-stream"
_PAUSE: Final = 0.05


class VLLMRoutes(EngineRoutes):
    """Routes of an API server, as vLLM loads them."""

    name = "ferrohook"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None

    async def init_state(self, engine_client: Any, _state: Any, _args: Any) -> None:
        """Takes the engine, once the server has it."""
        self._engine = engine_client

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes to a server."""
        router = self.router()
        router.get("/captures/{response_id}")(self.captures)
        router.get("/captures/{response_id}/stream")(self.stream)
        app.include_router(router)
        app.add_middleware(_TokenHeader)

    async def _front_end(self) -> FrontEnd:
        if self._engine is None:
            raise HTTPException(503, "this server has no engine")
        if self._engine.errored:
            raise HTTPException(503, f"the engine died: {self._engine.dead_error}")
        try:
            return await connect_async(self._engine)
        except HookError as error:
            raise HTTPException(501, str(error)) from error

    async def capabilities(self) -> dict[str, Any]:
        """Reports what plans may do here; 501 if they are refused, with the reason."""
        front_end = await self._front_end()
        return CAPABILITIES.described(front_end.modules, front_end.options)

    async def _uploaded(self) -> Uploads:
        front_end = await self._front_end()
        await sync(self._engine, front_end)
        return front_end.uploads

    async def _send(self, data: bytes, digests: dict[str, str]) -> None:
        if (await self._front_end()).servers > 1:
            # They read the names from one rank, so all ranks have the uploads before.
            await call_async(self._engine, "put", data, {})
            data = packed({}, {})
        await call_async(self._engine, "put", data, digests)

    async def _discard(self, digest: str, name: str = "") -> None:
        await call_async(self._engine, "drop", digest, name)

    async def captures(self, request: Request, response_id: str, index: int = 0) -> Response:
        """Returns the captures of a finished request as safetensors, once.

        403 without its token, 404 for an unknown id or another's, 409 while it runs, 422 if its
        plan failed.

        Args:
            request: with the token of the answer in the header `X-Ferrohook-Captures`.
            response_id: `id` of vLLM's response.
            index: of the choice in the response.
        """
        front_end = await self._front_end()
        ticket = await self._ticket(front_end, request, response_id, index)
        if ticket.tokens is None:
            raise HTTPException(409, "the request is not finished, or was cancelled")
        data = await self._take(front_end, ticket)
        if (error := error_of(data)) is not None:
            raise HTTPException(422, error)
        return Response(data, media_type=_BINARY)

    async def stream(self, request: Request, response_id: str, index: int = 0) -> StreamingResponse:
        """Returns captures while the request runs: frames of safetensors, each after its length.

        Length: 8 bytes, little-endian. A row comes once, as soon as its token is settled; the last
        frame has length 0. A frame before it with `error` in its metadata gives the reason why rows
        are missing. Rows that were streamed are not kept. The token as in `captures`.
        """
        front_end = await self._front_end()
        ticket = await self._ticket(front_end, request, response_id, index)
        return StreamingResponse(self._frames(front_end, ticket), media_type=_BINARY)

    async def _frames(self, front_end: FrontEnd, ticket: CapturingRequest) -> AsyncIterator[bytes]:
        since = 0
        try:
            while ticket.tokens is None:
                if (tokens := self._tokens(ticket)) - 1 > since:
                    asked = ticket.key, tokens, since
                    data = found(await call_async(self._engine, "read_so_far", *asked))
                    if data and error_of(data) is not None:
                        break
                    if data and not is_empty(data):
                        fetched(data)
                        yield _framed(data)
                        since = tokens - 1
                await asyncio.sleep(_PAUSE)
            else:
                data = await self._take(front_end, ticket, since)
        except Exception as error:  # noqa: BLE001 (the status is sent: the reason goes into a frame)
            data = packed({}, {}, error=str(error) or repr(error))
        yield _framed(data) + bytes(8)

    async def _ticket(
        self, front_end: FrontEnd, request: Request, response_id: str, index: int
    ) -> CapturingRequest:
        """Returns the ticket of a response, to a client with its token."""
        token = request.headers.get(HEADER)
        by_id = front_end.options.captures_by_id
        if token is None and not by_id:
            raise HTTPException(403, f"fetching captures needs the header {HEADER} of the answer")

        def may(ticket: CapturingRequest) -> bool:
            if by_id:
                return True
            secret = (ticket.token or secrets.token_urlsafe()).encode()
            return hmac.compare_digest(secret, str(token).encode())

        if front_end.servers > 1:
            data, *_ = await call_async(self._engine, "tickets", response_id)
            front_end.adopt(json.loads(data))
        try:
            return front_end.find(response_id, index, may)
        except KeyError as error:
            raise HTTPException(404, error.args[0]) from error
        except ValueError as error:
            raise HTTPException(409, str(error)) from error

    async def _take(self, front_end: FrontEnd, ticket: CapturingRequest, since: int = 0) -> bytes:
        front_end.forget(ticket)
        asked = ticket.key, ticket.tokens, since
        data = taken(await call_async(self._engine, "take", *asked))
        return data if ticket.error is None else packed({}, {}, error=ticket.error)

    def _tokens(self, ticket: CapturingRequest) -> int:
        """Returns the number of tokens of a request so far, 0 before its first new one.

        Raises:
            HookError: it was cancelled, or never came to the engine.
        """
        if self._engine.errored:
            raise self._engine.dead_error
        if ticket.engine_id is None:
            return 0
        state = self._engine.output_processor.request_states.get(ticket.engine_id)
        if state is None:
            msg = "the request was cancelled"
            raise HookError(msg)
        new = state.detokenizer.num_output_tokens()
        return int(state.prompt_len + new) if new else 0


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


class _TokenHeader:
    """Middleware that gives answers to requests with a plan the token of their captures."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and (token := state.get(FIELD)):
                MutableHeaders(scope=message)[HEADER] = token
            await send(message)

        await self._app(scope, receive, sent)
