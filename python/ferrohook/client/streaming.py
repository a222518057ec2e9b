"""Texts that are read while they are generated."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import httpx
import torch

from ferrohook.client.answers import Generated, TextChunk
from ferrohook.client.calls import proof_in
from ferrohook.client.errors import (
    ServerError,
    UnavailableError,
    error_of_event,
    strange,
    unreachable,
)
from ferrohook.engines.wire import FIELD, GATES, HEADER
from ferrohook.errors import HookError
from ferrohook.gates.streaming import numbers_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from ferrohook.client.calls import Pending

Finished = TypeVar("Finished")
"""Result of `finish`: a text, or an awaitable of one."""


class _Events:
    """Events of one text, read line by line."""

    def __init__(self, pending: Pending, response: httpx.Response) -> None:
        self._chat = pending.chat
        self._url = str(pending.request.url)
        self.proof: str | bytes | None = response.headers.get(HEADER)
        """Proof that the plan was served: the token of its captures, or the captures."""
        self._pieces: list[str] = []
        self._tokens: list[int] | None = None
        self._last: Mapping[str, Any] = {}
        self._finish_reason: str | None = None
        self._done = False
        self._line = b""
        """Start of a line that has not ended."""

    def feed(self, data: bytes) -> Iterator[TextChunk]:
        """Reads data; yields the parts of the answer in it.

        Raises:
            ServerError: an event reports an error, or is none.
        """
        # Only at its own line ends: JSON may have others, such as U+2028, inside of a text.
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            kind, _, event = line.partition(b":")
            event = event.strip()
            if kind != b"data" or not event or self._done:
                continue
            if event == b"[DONE]":
                self._done = True
                continue
            try:
                found = self._read(json.loads(event))
            except ServerError:
                raise
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
                raise strange(error, httpx.codes.OK, self._url) from error
            if found is not None:
                yield found

    def _read(self, event: Mapping[str, Any]) -> TextChunk | None:
        """Reads an event; returns the part of the answer in it, if there is one."""
        if (error := error_of_event(event, self._url)) is not None:
            raise error
        found = event.get(FIELD)
        if isinstance(found, list):  # SGLang's: of each choice
            found = proof_in(found[0]) if found else b""
        self.proof = found if self.proof is None else self.proof
        if not event.get("choices"):  # only the usage
            return None
        if event.get("object") != GATES:  # which has no text
            self._last = event
        choice = event["choices"][0]
        piece = choice["delta"].get("content") if self._chat else choice["text"]
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if (tokens := choice.get("token_ids")) is not None:
            self._tokens = [*(self._tokens or ()), *tokens]
        self._pieces.append(piece or "")
        gates = choice.get(GATES, {})
        if not piece and not gates:
            return None
        return TextChunk(
            text=piece or "",
            gates={
                name: torch.tensor(numbers_of(values), device="cpu")
                for name, values in gates.items()
            },
            positions={
                name: torch.tensor(values["positions"], device="cpu")
                for name, values in gates.items()
            },
        )

    def end(self) -> Generated:
        """Returns the text.

        Raises:
            UnavailableError: it is not whole.
        """
        if not self._done:
            msg = "the server stopped before the text was complete"
            raise UnavailableError(msg, None, self._url)
        return Generated(
            text="".join(self._pieces),
            finish_reason=self._finish_reason,
            id=self._last.get("id", ""),
            token_ids=None if self._tokens is None else tuple(self._tokens),
            acts={},
            positions={},
            raw=self._last,
        )


class _Stream(Generic[Finished]):
    """A text that is being read.

    Args:
        pending: the request.
        response: its response.
        finish: fetches the captures of a whole text.
    """

    def __init__(
        self,
        pending: Pending,
        response: httpx.Response,
        finish: Callable[[Generated, str | bytes | None], Finished],
    ) -> None:
        self._response = response
        self._events = _Events(pending, response)
        self._finish = finish
        self._generated: Generated | None = None

    @property
    def generated(self) -> Generated:
        """The whole text, with its captures, once it was read.

        Raises:
            HookError: it was not read to its end.
        """
        if self._generated is None:
            msg = "the text was not read to the end: iterate over the stream first"
            raise HookError(msg)
        return self._generated


class TextStream(_Stream[Generated]):
    """Parts of a text, as they are generated: an iterator of `Client.stream`."""

    def __iter__(self) -> Iterator[str]:
        return (chunk.text for chunk in self.chunks() if chunk.text)

    def chunks(self) -> Iterator[TextChunk]:
        """Iterates over the parts of the text with the values of gates that the plan keeps.

        Parts that were read are not repeated.

        Examples:
            >>> for chunk in stream.chunks():
            ...     print(chunk.text, chunk.gates.get("sad"))
        """
        return self._reading

    @functools.cached_property
    def _reading(self) -> Iterator[TextChunk]:
        """The one iterator over the parts: a second loop goes on with it."""
        try:
            for data in self._response.iter_bytes():
                yield from self._events.feed(data)
            yield from self._events.feed(b"\n")
        except httpx.TransportError as error:
            raise unreachable(error, self._response.request) from error
        self._generated = self._finish(self._events.end(), self._events.proof)


class AsyncTextStream(_Stream[Awaitable[Generated]]):
    """Parts of a text, as they are generated: an iterator of `AsyncClient.stream`."""

    async def __aiter__(self) -> AsyncIterator[str]:
        async for chunk in self.chunks():
            if chunk.text:
                yield chunk.text

    def chunks(self) -> AsyncIterator[TextChunk]:
        """Iterates over the parts of the text with values of gates, see `TextStream.chunks`."""
        return self._reading

    @functools.cached_property
    async def _reading(self) -> AsyncIterator[TextChunk]:
        """The one iterator over the parts: a second loop goes on with it."""
        try:
            async for data in self._response.aiter_bytes():
                for chunk in self._events.feed(data):
                    yield chunk
            for chunk in self._events.feed(b"\n"):
                yield chunk
        except httpx.TransportError as error:
            raise unreachable(error, self._response.request) from error
        self._generated = await self._finish(self._events.end(), self._events.proof)
