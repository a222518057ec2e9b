"""Client of servers that take plans: vLLM and SGLang with ferrohook, and services of ours.

Needs the packages httpx and safetensors. Plans are objects, captures tensors, errors exceptions.

Examples:
    >>> from ferrohook.client import Client
    >>> steer = fh.on("model.layers.12", fh.Add(vector, scale=4.0), at="generated")
    >>> with Client("http://127.0.0.1:8000") as client:
    ...     plan = fh.Plan(steer, fh.keep("model.layers.20"))
    ...     answer = client.generate("Once upon a time", plan, max_tokens=20)
    >>> answer.text
    ', there was a calm lake'
    >>> answer.acts["model.layers.20"].shape
    torch.Size([24, 4096])
"""

from __future__ import annotations

from ferrohook.util.texts import missing_package

try:
    import httpx  # noqa: F401 (named here, before a file below needs it)
    import safetensors  # noqa: F401 (likewise)
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0]
    raise ModuleNotFoundError(missing_package(__name__, package), name=package) from error

from ferrohook.client.answers import Embedded as Embedded
from ferrohook.client.answers import Generated as Generated
from ferrohook.client.answers import ServedModule as ServedModule
from ferrohook.client.answers import ServerInfo as ServerInfo
from ferrohook.client.answers import TextChunk as TextChunk
from ferrohook.client.clients import AsyncClient as AsyncClient
from ferrohook.client.clients import Client as Client
from ferrohook.client.errors import PlanFailedError as PlanFailedError
from ferrohook.client.errors import RequestRefusedError as RequestRefusedError
from ferrohook.client.errors import ServerError as ServerError
from ferrohook.client.errors import UnavailableError as UnavailableError
from ferrohook.client.streaming import AsyncTextStream as AsyncTextStream
from ferrohook.client.streaming import TextStream as TextStream

__all__ = [
    "AsyncClient",
    "AsyncTextStream",
    "Client",
    "Embedded",
    "Generated",
    "PlanFailedError",
    "RequestRefusedError",
    "ServedModule",
    "ServerError",
    "ServerInfo",
    "TextChunk",
    "TextStream",
    "UnavailableError",
]


def __dir__() -> list[str]:
    return __all__
