"""Routes of ferrohook in SGLang's server, which its API key guards as all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from ferrohook.engines.routes import EngineRoutes
from ferrohook.engines.sglang.front_end import ask_description, vectors_of

if TYPE_CHECKING:
    from ferrohook.engines.uploads import Vectors


class SGLangRoutes(EngineRoutes):
    """Routes of one server.

    Args:
        manager: the `TokenizerManager` of its process.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager

    async def capabilities(self) -> dict[str, Any]:
        """Tells what plans may do here; 501 if they are refused, with the reason."""
        described = await ask_description(self._manager)
        if (reason := described.get("refusal")) is not None:
            raise HTTPException(501, reason)
        return described

    async def _uploaded(self) -> Vectors:
        await self.capabilities()
        if self._manager.server_args.tokenizer_worker_num > 1:
            reason = "with several tokenizer workers, the one that is asked need not have a vector"
            raise HTTPException(501, reason)
        return vectors_of(self._manager)

    async def _send(self, data: bytes) -> None:
        """Sends nothing: vectors travel with the plans that name them."""

    async def _discard(self, digest: str) -> None:
        """Discards nothing, as nothing was sent."""
