"""Routes of an engine's server: what plans may do there, and the vectors that they name."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

import safetensors
import safetensors.torch
from fastapi import APIRouter, HTTPException, Request

from ferrohook.engines.uploads import packed_vectors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import Tensor

    from ferrohook.engines.uploads import Vectors

_MOST_BYTES: Final = 2**28
_MOST_ARRIVING: Final = 2 * _MOST_BYTES
"""Bytes of all bodies that are on their way or being read at a time."""


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
    async def _send(self, data: bytes) -> None:
        """Sends vectors, as safetensors by their digests, to where the model runs."""

    @abstractmethod
    async def _discard(self, digest: str) -> None:
        """Discards a vector where the model runs."""

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
            vectors, data, digests = await asyncio.to_thread(_read, body)
            async with self._changing_vectors:
                try:
                    uploaded.check_room(vectors)
                except ValueError as error:
                    raise HTTPException(413, str(error)) from error
                await self._send(data)
                for digest in uploaded.put(vectors, digests):
                    await self._discard(digest)
        return {name: list(vector.shape) for name, vector in vectors.items()}

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Takes the body of a request; refuses one that is too long before it has come."""
        refused = HTTPException(413, f"vectors have at most {_MOST_BYTES:,} bytes at a time")
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
                    raise HTTPException(503, "too many vectors arrive: send them again")
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
            if digest is not None:
                await self._discard(digest)


def _read(body: bytes) -> tuple[dict[str, Tensor], bytes, dict[str, str]]:
    """Reads vectors; returns them, their form for a worker, and their digests."""
    try:
        vectors = safetensors.torch.load(body)
    except (safetensors.SafetensorError, ValueError) as error:
        raise HTTPException(422, f"the body is no safetensors: {error}") from error
    return vectors, *packed_vectors(vectors)
