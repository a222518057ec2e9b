"""Exceptions of the client, and how answers of servers become them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import httpx

from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONGEST: Final = 500
"""Characters of an answer that is no JSON, in an error."""
_PLAN_FAILED: Final = "the plan of the request failed"
_BUSY: Final = {408, 425, 429, 502, 503, 504}
_REFUSED: Final = {400, 405, 413, 422, 501}


class ServerError(HookError):
    """Request with an invalid or unexpected answer of the server.

    Args:
        reason: as the server said it.
        status: of HTTP; None without an answer.
        url: of the request.
    """

    def __init__(self, reason: str, status: int | None = None, url: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.url = url

    def __reduce__(self) -> Any:
        return type(self), (self.reason, self.status, self.url)

    def __str__(self) -> str:
        asked = f" ({self.url})" if self.url else ""
        return f"{self.status or 'no answer'}: {self.reason}{asked}"


class RequestRefusedError(ServerError, ValueError):
    """Request that the server refused and did not compute: invalid, or not supported."""


class PlanFailedError(ServerError):
    """Plan that failed while its request ran."""


class UnavailableError(ServerError, ConnectionError):
    """Server that cannot be reached, is too busy, or closed the connection: try again later."""

    retry_after: float | None = None
    """Seconds to wait, if the server said so."""


def unreachable(error: httpx.TransportError, request: httpx.Request) -> UnavailableError:
    """Returns the error of a request without an answer."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return UnavailableError(reason, None, str(request.url))


def error_of_status(response: httpx.Response) -> ServerError:
    """Returns the error that an answer reports; its body was read."""
    found = made(reason_of(response), response.status_code, str(response.request.url))
    if isinstance(found, UnavailableError):
        after = response.headers.get("retry-after", "")
        found.retry_after = float(after) if after.isdecimal() else None
    return found


def made(reason: str, status: int, url: str) -> ServerError:
    """Returns the error of a status and a reason."""
    if reason.startswith(_PLAN_FAILED):
        return PlanFailedError(reason, status, url)
    if status in _BUSY:
        return UnavailableError(reason, status, url)
    if status in _REFUSED:
        return RequestRefusedError(reason, status, url)
    return ServerError(reason, status, url)


def strange(error: Exception, status: int, url: str) -> ServerError:
    """Returns the error of an answer in another form; `error`: raised by reading it."""
    return ServerError(f"the answer does not come from a ferrohook server: {error!r}", status, url)


def error_of_event(event: Mapping[str, Any], url: str) -> ServerError | None:
    """Returns the error in an event of a stream; None without one."""
    found = event.get("error")
    if found is None:
        return None
    inside = found if isinstance(found, dict) else {"message": found}
    code = inside.get("code", event.get("code"))
    status = code if isinstance(code, int) else httpx.codes.INTERNAL_SERVER_ERROR
    return made(str(inside.get("message", found)), int(status), url)


def reason_of(response: httpx.Response) -> str:
    """Returns the message of a server's error, in the form of OpenAI, of FastAPI or any other."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        error = body.get("error")
        found = error.get("message") if isinstance(error, dict) else error
        found = found or body.get("detail") or body.get("message")
        if isinstance(found, list) and all(isinstance(it, dict) for it in found):
            found = "; ".join(
                f"{'.'.join(map(str, it.get('loc', ())))}: {it.get('msg')}" for it in found
            )
        if found:
            return str(found)
    return response.text.strip()[:_LONGEST] or response.reason_phrase or "an empty answer"
