"""Routes of an engine's server: what plans may do there, and the uploads that they name."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware
from starlette.status import WS_1008_POLICY_VIOLATION
from torch import Tensor

from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.engines.wire import NAME, NOUNS, ROUTES, Upload, bytes_of, unpacked_uploads
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ferrohook.engines.uploads import Uploads

_MOST_BYTES: Final = 2**28
_MOST_ARRIVING: Final = 2 * _MOST_BYTES
"""Bytes of all bodies that are on their way or being read at a time."""
_MOST_HEADER: Final = 2**16
"""Most bytes of a body without its tensors."""
_SHOWN: Final = 200
"""Characters of a name in an error."""
_CARRIERS: Final = frozenset({"vllm_xargs", "extra_args", "custom_params"})
"""Fields of a body in which a plan comes."""
_MOST_CHECKED: Final = 2**26
"""Bytes of a body up to which it is searched for a plan: more than the longest plan has."""


class EngineRoutes(ABC):
    """Routes below /v1/ferrohook, beside an engine's own.

    An engine derives from it, and answers where its uploads are.
    """

    def __init__(self) -> None:
        self._changing_uploads = asyncio.Lock()
        """Held while a name and the worker's upload of its digest change together."""
        self._arriving = 0
        """Bytes of bodies that are on their way or being read."""

    def router(self) -> APIRouter:
        """Returns the routes, for a server to include."""
        router = APIRouter(prefix=ROUTES)
        router.get("/capabilities")(self.capabilities)
        router.get("/vectors")(self.vectors)
        router.put("/vectors")(self.put_vectors)
        router.delete("/vectors/{name:path}")(self.drop_vector)
        router.get("/dictionaries")(self.dictionaries)
        router.put("/dictionaries")(self.put_dictionaries)
        router.delete("/dictionaries/{name:path}")(self.drop_dictionary)
        return router

    @abstractmethod
    async def capabilities(self) -> dict[str, Any]:
        """Reports what plans may do here; 501 if they are refused, with the reason."""

    @abstractmethod
    async def _uploaded(self) -> Uploads:
        """Returns the uploads; 501 if plans are refused, with the reason."""

    @abstractmethod
    async def _send(self, data: bytes, digests: dict[str, str]) -> None:
        """Sends uploads, as safetensors by their digests, to where the model runs.

        Args:
            data: the uploads.
            digests: by name.
        """

    @abstractmethod
    async def _discard(self, digest: str, name: str = "") -> None:
        """Discards an upload, and a name of it, where the model runs."""

    async def vectors(self) -> dict[str, list[int]]:
        """Lists the uploaded vectors, with their shapes."""
        found = (await self._uploaded()).of_kind(Tensor)
        return {name: list(vector.shape) for name, (vector, _) in found.items()}

    async def dictionaries(self) -> dict[str, dict[str, Any]]:
        """Lists the uploaded dictionaries, with their digests."""
        found = (await self._uploaded()).of_kind(Dictionary)
        return {name: _described(each, digest) for name, (each, digest) in found.items()}

    async def put_vectors(self, request: Request) -> dict[str, list[int]]:
        """Takes vectors as a safetensors body.

        422 for any other, 413 for too many or too long, 409 for a name of a dictionary, 503 while
        too many others arrive.
        """
        put = await self._put(request, Tensor, await self._uploaded(), _MOST_BYTES)
        return {name: list(vector.shape) for name, (vector, _) in put.items()}

    async def put_dictionaries(self, request: Request) -> dict[str, dict[str, Any]]:
        """Takes dictionaries as a safetensors body, see `packed_uploads`; as `put_vectors`."""
        uploaded = await self._uploaded()
        most_bytes = uploaded.most_bytes + _MOST_HEADER
        put = await self._put(request, Dictionary, uploaded, most_bytes)
        return {name: _described(each, digest) for name, (each, digest) in put.items()}

    async def _put(
        self, request: Request, kind: type[Upload], uploaded: Uploads, most_bytes: int
    ) -> dict[str, tuple[Any, str]]:
        """Takes uploads of a kind; returns them and their digests, by name."""
        async with self._body(request, most_bytes) as body:
            # In a thread: seconds, in which the engine's texts would stand still.
            uploads = await asyncio.to_thread(_read, body, kind)
            async with self._changing_uploads:
                try:
                    data, digests = await asyncio.to_thread(uploaded.packed, uploads)
                except ValueError as error:
                    raise HTTPException(413, str(error)) from error
                except HookError as error:
                    raise HTTPException(409, str(error)) from error
                await self._send(data, digests)
                for digest in uploaded.put(uploads, digests):
                    await self._discard(digest)
        return {name: (each, digests[name]) for name, each in uploads.items()}

    @contextlib.asynccontextmanager
    async def _body(self, request: Request, most_bytes: int) -> AsyncIterator[bytes]:
        """Takes the body of a request; refuses one that is too long before it has come."""
        refused = HTTPException(413, f"an upload must not exceed {most_bytes:,} bytes")
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > most_bytes:
            raise refused
        parts, size = [], 0
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                self._arriving += len(part)
                if size > most_bytes:
                    raise refused
                if self._arriving > max(_MOST_ARRIVING, most_bytes):
                    raise HTTPException(503, "too many bytes are being uploaded: try again later")
            yield b"".join(parts)
        finally:
            self._arriving -= size

    async def drop_vector(self, name: str) -> None:
        """Drops a vector; 404 without one of the name."""
        await self._drop(name, Tensor)

    async def drop_dictionary(self, name: str) -> None:
        """Drops a dictionary; 404 without one of the name."""
        await self._drop(name, Dictionary)

    async def _drop(self, name: str, kind: type[Upload]) -> None:
        uploaded = await self._uploaded()
        async with self._changing_uploads:
            try:
                digest = uploaded.drop(name, kind)
            except KeyError:
                raise HTTPException(404, f"no {NOUNS[kind]} {name!r} was uploaded") from None
            await self._discard(digest, name)


def _read(body: bytes, kind: type[Upload]) -> dict[str, Upload]:
    try:
        uploads = unpacked_uploads(body)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    for name, each in uploads.items():
        # Clients resolve such segments, so the name's route could not be called.
        if not name.isprintable() or {".", ".."}.intersection(name.split("/")):
            msg = f"the name {name[:_SHOWN]!r} cannot stand in a URL: choose another name"
            raise HTTPException(422, msg)
        if not isinstance(each, kind):
            msg = f"the body has {name[:_SHOWN]!r}, which is not a {NOUNS[kind]}"
            raise HTTPException(422, msg)
        if isinstance(each, Dictionary) and each.name != name:
            msg = f"the settings of the dictionary {name!r} have another name, {each.name!r}"
            raise HTTPException(422, msg)
    return uploads


def _described(dictionary: Dictionary, digest: str) -> dict[str, Any]:
    return {
        "digest": digest,
        "bytes": bytes_of(dictionary),
        "activation": dictionary.formula.activation,
        "d_in": dictionary.d_in,
        "d_out": dictionary.d_out,
        "d_sae": dictionary.d_sae,
    }


class PlanGate:
    """Middleware that refuses plans on routes that would ignore them.

    With 400; a WebSocket is closed with 1008.

    Args:
        app: the wrapped application.
        served: paths of the routes that serve plans, or refuse them on their own.
    """

    def __init__(self, app: ASGIApp, served: Collection[str]) -> None:
        self._app = app
        self._served = served

    @classmethod
    def add(cls, app: FastAPI, served: Collection[str]) -> None:
        """Adds it to an application, inside authentication and decompression."""
        own = Middleware(cls, served=served)
        if all(each.cls != own.cls for each in app.user_middleware):
            app.user_middleware.append(own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] == "websocket":
            await self._pass_messages(scope, receive, send)
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        own = path in self._served or path.startswith(f"{ROUTES}/")
        if scope["type"] != "http" or own:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        size = 0
        while (not messages or messages[-1].get("more_body")) and size <= _MOST_CHECKED:
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
        bodies = (each.get("body", b"") for each in messages)
        if size <= _MOST_CHECKED and _names_plan(b"".join(bodies)):
            served = ", ".join(sorted(self._served))
            msg = f"{path} does not support ferrohook plans; these routes do: {served}"
            status = HTTPStatus.BAD_REQUEST
            error = {"message": msg, "type": "BadRequestError", "code": status}
            await JSONResponse({"error": error}, status)(scope, receive, send)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)

    async def _pass_messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the messages of a WebSocket on, up to one that carries a plan."""

        async def reading() -> Message:
            message = await receive()
            if not _names_plan(message.get("bytes") or (message.get("text") or "").encode()):
                return message
            code, reason = WS_1008_POLICY_VIOLATION, "ferrohook plans are not supported here"
            await send({"type": "websocket.close", "code": code, "reason": reason})
            return {"type": "websocket.disconnect", "code": code}

        await self._app(scope, reading, send)


def _names_plan(body: bytes) -> bool:
    """True if a body is JSON that carries a plan, or a form with such a field."""
    if f'"{NAME}"'.encode() not in body:
        return False
    try:
        return _carries(json.loads(body))
    except (ValueError, RecursionError):
        # Else the route's own refusal.
        return any(f'name="{each}"'.encode() in body for each in _CARRIERS)


def _carries(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_carries, value))
    return isinstance(value, dict) and any(
        _carries(each) or (key in _CARRIERS and isinstance(each, dict) and NAME in each)
        for key, each in value.items()
    )
