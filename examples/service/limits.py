"""`LimitBody` and `limit_headers`: refuse requests that are too long or too slow."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LimitBody:
    """Middleware that refuses bodies of more than `max_bytes` or that take more than `seconds`.

    Reading the body raises the `HTTPException`, with which FastAPI answers.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] == "http":
            receive = self._limited(receive)
        await self._app(scope, receive, send)

    def _limited(self, receive: Receive) -> Receive:
        until = asyncio.get_running_loop().time() + self._seconds
        length = 0
        complete = False

        async def limited() -> Message:
            nonlocal length, complete
            if complete:  # the next message is the disconnect
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                msg = f"the body did not come within {self._seconds:g} seconds"
                raise HTTPException(408, msg) from None
            length += len(message.get("body", b""))
            if length > self._max_bytes:
                msg = f"the body has more than {self._max_bytes:,} bytes: send fewer texts at once"
                raise HTTPException(413, msg)
            complete = not message.get("more_body", False)
            return message

        return limited


TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class _LimitHeaders(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # h11 or httptools
    """Protocol of uvicorn that closes a connection whose headers take more than `seconds`.

    Uvicorn limits only the time between a response and the first byte of the next request.
    """

    def __init__(self, *, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()  # for the rest of the headers
        else:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self._close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(TOO_SLOW)
            self.transport.close()


def limit_headers(seconds: float) -> Callable[..., asyncio.Protocol]:
    """Returns the option `http` of uvicorn: headers take at most `seconds`, else 408."""
    return functools.partial(_LimitHeaders, seconds=seconds)
