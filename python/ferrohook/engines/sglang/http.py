"""Routes of ferrohook in SGLang's server, which its API key guards as all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import HTTPException

from ferrohook.engines.routes import EngineRoutes, PlanGate
from ferrohook.engines.sglang.front_end import ask, send_dictionaries, uploads_of
from ferrohook.engines.wire import DICTIONARIES, header_of
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ferrohook.engines.uploads import Uploads

_SERVED: Final = (
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/invocations",
    "/vertex_generate",
)
"""Routes that serve plans."""


def attach(app: FastAPI, manager: Any) -> None:
    """Adds the routes to a server.

    Args:
        app: its application.
        manager: the `TokenizerManager` of its process.
    """
    app.include_router(SGLangRoutes(manager).router())
    PlanGate.add(app, _SERVED)


class SGLangRoutes(EngineRoutes):
    """Routes of one server.

    Args:
        manager: the `TokenizerManager` of its process.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager

    async def capabilities(self) -> dict[str, Any]:
        """Reports what plans may do here; 501 if they are refused, with the reason."""
        try:
            described = await ask(self._manager)
        except HookError as error:
            raise HTTPException(501, str(error)) from error
        if (reason := described.get("refusal")) is not None:
            raise HTTPException(501, reason)
        return described

    async def _uploaded(self) -> Uploads:
        await self.capabilities()
        if self._manager.server_args.tokenizer_worker_num > 1:
            reason = (
                "with several tokenizer workers, the one that gets a request may not have the "
                "vector or dictionary"
            )
            raise HTTPException(501, reason)
        return uploads_of(self._manager)

    async def _send(self, data: bytes, digests: dict[str, str]) -> None:  # noqa: ARG002 (of others)
        """Sends dictionaries to the scheduler; vectors travel with the plans that name them."""
        if DICTIONARIES in header_of(data).get("__metadata__", {}):
            try:
                await send_dictionaries(self._manager, data)
            except HookError as error:
                raise HTTPException(500, str(error)) from error

    async def _discard(self, digest: str, name: str = "") -> None:  # noqa: ARG002 (of others)
        await ask(self._manager, "drop", digest)
