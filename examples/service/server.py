"""`Server`: uvicorn with a graceful shutdown."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import uvicorn

from .limits import limit_headers

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TICK = 0.05


class Server(uvicorn.Server):
    """Uvicorn with a grace period, in which it drains, before it waits for open requests.

    After a signal to end, each answer has the header `Connection: close`, so that clients send
    their next request elsewhere, and `request.state.draining` is true. Without a grace period,
    uvicorn closes idle connections on which a request may be in flight.

    Args:
        app: the application.
        grace: seconds in which it still accepts requests, for clients and load balancers to notice.
        seconds: time limit for the headers of a request.
        **options: options of `uvicorn.Config`.
    """

    def __init__(
        self, app: ASGIApp, *, grace: float, seconds: float = 10.0, **options: Any
    ) -> None:
        self._app = app
        self._grace = grace
        http: Any = limit_headers(seconds)
        config = uvicorn.Config(self._draining_app, interface="asgi3", http=http, **options)
        super().__init__(config)

    async def _draining_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if self.should_exit and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if scope["type"] == "http":
            scope.setdefault("state", {})["draining"] = self.should_exit
        await self._app(scope, receive, send_closing)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains, then shuts down."""
        for _ in range(round(self._grace / TICK)):
            if not self.force_exit:
                await asyncio.sleep(TICK)
        await super().shutdown(sockets)
