"""Routes of an engine's server: what plans may do there, and the vectors that they name."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import safetensors
import safetensors.torch
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware

from ferrohook.engines.wire import NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from torch import Tensor

    from ferrohook.engines.uploads import Vectors

_MOST_BYTES: Final = 2**28
_MOST_ARRIVING: Final = 2 * _MOST_BYTES
"""Bytes of all bodies that are on their way or being read at a time."""
_CARRIERS: Final = frozenset({"vllm_xargs", "extra_args", "custom_params"})
"""Fields of a body in which a plan comes."""


class EngineRoutes(ABC):
    """Routes below /v1/ferrohook, beside an engine's own.

    An engine derives from it, and answers where its vectors are.
    """

    def __init__(self) -> None:
        self._changing_vectors = asyncio.Lock()
        """Held while a name and the worker's vector of its digest change together."""
        self._arriving = 0
        """Bytes of bodies that are on their way or being read."""

    def router(self) -> APIRouter:
        """Returns the routes, for a server to include."""
        router = APIRouter(prefix="/v1/ferrohook")
        router.get("/capabilities")(self.capabilities)
        router.get("/vectors")(self.vectors)
        router.put("/vectors")(self.put_vectors)
        router.delete("/vectors/{name:path}")(self.drop_vector)
        return router

    @abstractmethod
    async def capabilities(self) -> dict[str, Any]:
        """Tells what plans may do here; 501 if they are refused, with the reason."""

    @abstractmethod
    async def _uploaded(self) -> Vectors:
        """Returns the uploaded vectors; 501 if plans are refused, with the reason."""

    @abstractmethod
    async def _send(self, data: bytes, digests: dict[str, str]) -> None:
        """Sends vectors, as safetensors by their digests, to where the model runs.

        Args:
            data: the vectors.
            digests: by name.
        """

    @abstractmethod
    async def _discard(self, digest: str, name: str = "") -> None:
        """Discards a vector, and a name of it, where the model runs."""

    async def vectors(self) -> dict[str, list[int]]:
        """Lists the uploaded vectors, with their shapes."""
        vectors = await self._uploaded()
        return {name: list(vectors[name].shape) for name in vectors}

    async def put_vectors(self, request: Request) -> dict[str, list[int]]:
        """Takes vectors as a safetensors body.

        422 for any other, 413 for too many or too long, 503 while too many others arrive.
        """
        uploaded = await self._uploaded()
        async with self._body(request) as body:
            # In a thread: seconds, in which the engine's texts would stand still.
            vectors = await asyncio.to_thread(_read, body)
            async with self._changing_vectors:
                try:
                    data, digests = await asyncio.to_thread(uploaded.packed, vectors)
                except ValueError as error:
                    raise HTTPException(413, str(error)) from error
                await self._send(data, digests)
                for digest in uploaded.put(vectors, digests):
                    await self._discard(digest)
        return {name: list(vector.shape) for name, vector in vectors.items()}

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Takes the body of a request; refuses one that is too long before it has come."""
        refused = HTTPException(413, f"an upload of vectors must not exceed {_MOST_BYTES:,} bytes")
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > _MOST_BYTES:
            raise refused
        parts, size = [], 0
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                self._arriving += len(part)
                if size > _MOST_BYTES:
                    raise refused
                if self._arriving > _MOST_ARRIVING:
                    raise HTTPException(503, "too many vectors are being uploaded: try again later")
            yield b"".join(parts)
        finally:
            self._arriving -= size

    async def drop_vector(self, name: str) -> None:
        """Drops a vector; 404 without one of the name."""
        uploaded = await self._uploaded()
        async with self._changing_vectors:
            try:
                digest = uploaded.drop(name)
            except KeyError:
                raise HTTPException(404, f"no vector {name!r} was uploaded") from None
            await self._discard(digest, name)


def _read(body: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(body)
    except (safetensors.SafetensorError, ValueError) as error:
        raise HTTPException(422, f"the body is not valid safetensors: {error}") from error


class PlanGate:
    """Middleware that refuses plans, with 400, on routes that would ignore them.

    Args:
        app: the application behind it.
        served: paths of the routes that serve plans, or refuse them on their own.
    """

    def __init__(self, app: ASGIApp, served: Collection[str]) -> None:
        self._app = app
        self._served = served

    @classmethod
    def add(cls, app: FastAPI, served: Collection[str]) -> None:
        """Adds it to an application, behind authentication and decompression."""
        own = Middleware(cls, served=served)
        if all(each.cls != own.cls for each in app.user_middleware):
            app.user_middleware.append(own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http" or scope["path"] in self._served:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
        if _names_plan(b"".join(each.get("body", b"") for each in messages)):
            served = ", ".join(sorted(self._served))
            msg = f"{scope['path']} does not support ferrohook plans; these routes do: {served}"
            status = HTTPStatus.BAD_REQUEST
            error = {"message": msg, "type": "BadRequestError", "code": status}
            await JSONResponse({"error": error}, status)(scope, receive, send)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)


def _names_plan(body: bytes) -> bool:
    """True if a body is JSON that carries a plan."""
    if f'"{NAME}"'.encode() not in body:
        return False
    try:
        return _carries(json.loads(body))
    except (ValueError, RecursionError):
        return False  # the route's own refusal


def _carries(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_carries, value))
    return isinstance(value, dict) and any(
        _carries(each) or (key in _CARRIERS and isinstance(each, dict) and NAME in each)
        for key, each in value.items()
    )
