"""A server that answers what it was sent before it goes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TICK = 0.05


class Server(uvicorn.Server):
    """Uvicorn, which waits for open requests, after a time in which it says goodbye.

    From when it is told to end, the header `Connection: close` of each answer has clients send
    their next request elsewhere, and `request.state.draining` is true. Without that time a server
    cuts connections that seem idle, on which a request may be under way.

    Args:
        app: what it serves.
        grace: how many seconds it goes on taking requests, for clients and load balancers to
            notice.
        **options: of `uvicorn.Config`.
    """

    def __init__(self, app: ASGIApp, *, grace: float, **options: Any) -> None:
        self._app = app
        self._grace = grace
        super().__init__(uvicorn.Config(self._saying_goodbye, interface="asgi3", **options))

    async def _saying_goodbye(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if self.should_exit and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if scope["type"] == "http":
            scope.setdefault("state", {})["draining"] = self.should_exit
        await self._app(scope, receive, sending)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes leave, then ends."""
        for _ in range(round(self._grace / TICK)):
            if not self.force_exit:
                await asyncio.sleep(TICK)
        await super().shutdown(sockets)
