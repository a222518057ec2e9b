"""Scopes of FastAPI's requests."""

# A request's scope is an async generator dependency: FastAPI runs it in the task of the request,
# whose context the thread pool copies. A plain generator would run in a thread with another
# context.

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

from fastapi import Depends

from ferrohook.registration.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def request_scope() -> AsyncIterator[Scope]:
    """FastAPI dependency: a scope entered for one request.

    Hooks registered inside it fire for the request's calls, on the event loop, in the thread pool
    of `def` endpoints and in `asyncio.to_thread`, and are removed at its end.
    """
    # An async generator: FastAPI would enter a plain one in a thread with its own context.
    with Scope() as scope:
        yield scope


RequestScope: TypeAlias = Annotated[Scope, Depends(request_scope)]
"""Type of an endpoint's parameter that receives the request's scope."""
