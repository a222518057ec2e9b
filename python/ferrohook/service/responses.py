"""Responses to requests that fail."""

from __future__ import annotations

import logging
import re
import secrets
from typing import TYPE_CHECKING, Final

from starlette.responses import JSONResponse

from ferrohook.errors import HookError, ResumeError, StaleActivationError, StoreError
from ferrohook.service.batching import BatcherClosedError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

_LOG: Final = logging.getLogger("ferrohook")
_LINE: Final = re.compile(r", registered at .+?:\d+")
"""Line of the service's own code, in the message of an error."""
_OF_THE_SERVICE: Final = (ResumeError, StaleActivationError, StoreError)
"""`HookError`s that no request is at fault for."""


def add_exception_handlers(app: Starlette) -> None:
    """Makes an application of FastAPI or Starlette respond to exceptions with a fitting status.

    | exception | status |
    | --- | --- |
    | `HookError`: an unknown module, a wrong width, a budget exceeded | 422, with the message |
    | `TimeoutError`, of a `deadline` | 504 |
    | `BatcherClosedError` | 503, with `Retry-After` |
    | any other, `StoreError`, `ResumeError` and `StaleActivationError` included | 500 |

    The body is `{"detail": ...}`, as of FastAPI's own errors. A response with status 500 has an id
    and nothing of the exception, which is logged with this id by `logging.getLogger("ferrohook")`.
    Handlers that the application has for its own exceptions stay.

    Raises:
        HookError: the application has answered a request: it reads its handlers before the first.

    Examples:
        >>> app = FastAPI()
        >>> add_exception_handlers(app)
    """
    if app.middleware_stack is not None:
        msg = "add_exception_handlers comes before the application's first request"
        raise HookError(msg)
    for kind in (HookError, TimeoutError, Exception):
        app.add_exception_handler(kind, _respond)


async def _respond(request: Request, error: Exception) -> JSONResponse:
    if request["type"] != "http":  # a WebSocket has no response: its server gets the exception
        raise error
    headers = {}
    match error:
        case TimeoutError():
            status, detail = 504, "deadline exceeded: ask for less, or try again later"
        case BatcherClosedError():
            status, detail, headers = 503, str(error), {"Retry-After": "1"}
        case HookError() if not isinstance(error, _OF_THE_SERVICE):
            status, detail = 422, _LINE.sub("", str(error))
        case _:
            number = secrets.token_hex(8)
            called = f"{request.method} {request.url.path!r}"
            _LOG.error("%s failed, with the id %s", called, number, exc_info=error)
            status, detail = 500, f"internal error: the service's log has it by the id {number}"
            if request["http_version"].startswith("1"):
                # The exception goes on to the server, which closes the connection for it.
                headers = {"Connection": "close"}
    return JSONResponse({"detail": detail}, status, headers)
