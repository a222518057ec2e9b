"""`LimitBody`: refuses bodies that are too long or too slow."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import HTTPException

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LimitBody:
    """Middleware that refuses bodies of more than `max_bytes` or that take more than `seconds`.

    Whoever reads the body gets the `HTTPException`, which FastAPI answers with.
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
