"""Routes of uploads without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrohook.engines.routes import EngineRoutes

if TYPE_CHECKING:
    from ferrohook.engines.uploads import Uploads


class Routes(EngineRoutes):
    """Routes whose uploads are used nowhere.

    Args:
        uploads: takes them.
    """

    def __init__(self, uploads: Uploads) -> None:
        super().__init__()
        self.uploads = uploads
        self.sent: list[str] = []
        """Names in uploads, as they came."""

    async def capabilities(self) -> dict[str, Any]:
        return {}

    async def _uploaded(self) -> Uploads:
        return self.uploads

    async def _send(self, _data: bytes, digests: dict[str, str]) -> None:
        self.sent += digests

    async def _discard(self, _digest: str, _name: str = "") -> None:
        """Nothing is kept beside the uploads."""
