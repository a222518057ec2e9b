"""Responses to requests that fail."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse, Response

from ferrohook.errors import HookError, ResumeError, StaleActivationError, StoreError
from ferrohook.service.batching import BatcherClosedError
from ferrohook.service.deadlines import DeadlineExceededError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

_LOG: Final = logging.getLogger("ferrohook")
_LINE: Final = re.compile(r", registered at .+?:\d+")
"""Line of the service's own code, in the message of an error."""
MOST_REASONS, MOST_CHARACTERS = 100, 1000
"""Bounds of a response to an invalid request."""
_OF_THE_SERVICE: Final = (ResumeError, StaleActivationError, StoreError)
"""`HookError`s that no request is at fault for."""


def add_exception_handlers(app: Starlette) -> None:
    """Makes an application of FastAPI or Starlette respond to exceptions with a fitting status.

    | exception | status |
    | --- | --- |
    | `HookError`: an unknown module, a wrong width, a budget exceeded | 422, with the message |
    | `TimeoutError`; one that is not of a `deadline` is logged | 504 |
    | `BatcherClosedError` | 503, with `Retry-After` |
    | FastAPI's `RequestValidationError` | 422, with place and reason, without the input |
    | any other, `StoreError`, `ResumeError` and `StaleActivationError` included | 500 |

    The body is `{"detail": ...}`, as of FastAPI's own errors. A response with status 500 has an id,
    but no part of the exception; `logging.getLogger("ferrohook")` logs the exception with this id.
    Handlers that the application has for its own exceptions stay.

    Raises:
        HookError: the application has answered a request: it reads its handlers before the first.

    Examples:
        >>> app = FastAPI()
        >>> add_exception_handlers(app)
    """
    if app.middleware_stack is not None:
        msg = "add_exception_handlers must be called before the application's first request"
        raise HookError(msg)
    for kind in (HookError, TimeoutError, Exception):
        app.add_exception_handler(kind, _respond)
    with contextlib.suppress(ImportError):  # Starlette without FastAPI
        from fastapi.exception_handlers import (  # noqa: PLC0415
            request_validation_exception_handler as fastapis,
        )
        from fastapi.exceptions import RequestValidationError  # noqa: PLC0415

        if app.exception_handlers.get(RequestValidationError) is fastapis:
            app.add_exception_handler(RequestValidationError, _refuse)


async def _refuse(_request: Request, error: Any) -> Response:
    """Responds to an invalid request as FastAPI does, but for the input.

    That may be long, and what JSON cannot represent, as NaN, would fail the response.
    """
    reasons = [
        {
            "type": each["type"],
            "loc": [it if isinstance(it, int) else it[:MOST_CHARACTERS] for it in each["loc"]],
            "msg": each["msg"][:MOST_CHARACTERS],
        }
        for each in error.errors()[:MOST_REASONS]
    ]
    return Response(json.dumps({"detail": reasons}), 422, media_type="application/json")


async def _respond(request: Request, error: Exception) -> JSONResponse:
    if request["type"] != "http":  # a WebSocket has no response: its server gets the exception
        raise error
    called = f"{request.method} {request.url.path!r}"
    headers = {}
    match error:
        case TimeoutError():
            status, detail = 504, "deadline exceeded: send a smaller request, or try again later"
            if not isinstance(error, DeadlineExceededError):  # as of a database
                _LOG.warning("%s timed out", called, exc_info=error)
        case BatcherClosedError():
            status, detail, headers = 503, str(error), {"Retry-After": "1"}
        case HookError() if not isinstance(error, _OF_THE_SERVICE):
            status, detail = 422, _LINE.sub("", str(error))
        case _:
            number = secrets.token_hex(8)
            _LOG.error("%s failed (error id %s)", called, number, exc_info=error)
            status, detail = 500, f"internal error: see the service's log for error id {number}"
            if request["http_version"].startswith("1"):
                # The exception reaches the server, which closes the connection for it.
                headers = {"Connection": "close"}
    return JSONResponse({"detail": detail}, status, headers)
