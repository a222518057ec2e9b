"""Calls of an engine's workers: of each rank of data parallelism, and of tensor parallelism."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter

from ferrohook.engines.wire import packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_METHOD: Final = "ferrohook_call"
"""Method of `WorkerWrapperBase`."""
_PATIENCE: Final = 1.0
"""Seconds between looks at an engine that has not answered."""
_CAPTURES: Final = Counter("ferrohook_captures", "Captures fetched by clients")
_BYTES: Final = Counter("ferrohook_captured_bytes", "Bytes of the captures fetched by clients")


def call(engine: Any, name: str, *args: Any) -> list[bytes]:
    """Calls the workers of an `LLM` or `LLMEngine`; returns their answers, by rank.

    Raises:
        RuntimeError: a worker died meanwhile.
    """
    with _naming_death():
        answers: list[bytes] = engine.collective_rpc(_METHOD, args=(name, *args))
    return answers


async def call_async(engine: Any, name: str, *args: Any) -> list[bytes]:
    """Calls the workers of an `AsyncLLM`; returns their answers, by rank.

    Raises:
        EngineDeadError: the engine died meanwhile; vLLM would wait for ever.
        RuntimeError: a worker died meanwhile.
    """
    # `collective_rpc` has all engine cores do it too, and returns the answers of the first one.
    to_all = engine.engine_core.call_utility_all_async
    answers = asyncio.ensure_future(to_all("collective_rpc", _METHOD, None, (name, *args), None))
    try:
        while not (await asyncio.wait({answers}, timeout=_PATIENCE))[0]:
            if engine.errored:
                raise engine.dead_error
        with _naming_death():
            return [each for core in answers.result() for each in core]
    finally:
        answers.cancel()


@contextlib.contextmanager
def _naming_death() -> Iterator[None]:
    """Raises that the engine died where vLLM says that a call was cancelled: its worker died."""
    try:
        yield
    except Exception as error:
        if not str(error).endswith("cancelled"):
            raise
        msg = "the engine died: a worker ended during a call"
        raise RuntimeError(msg) from error


def found(answers: Iterable[bytes]) -> bytes:
    """Returns the answer of the worker that has the captures; empty if none has."""
    return next(filter(None, answers), b"")


def taken(answers: Iterable[bytes]) -> bytes:
    """Returns the captures of the worker that had them, or why there are none."""
    data = found(answers) or packed({}, {}, error="the captures of the request are missing")
    fetched(data)
    return data


def fetched(data: bytes) -> None:
    """Counts captures that a client gets."""
    _CAPTURES.inc()
    _BYTES.inc(len(data))
