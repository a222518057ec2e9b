"""Answers of servers, as objects."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrohook.errors import HookError
from ferrohook.util.suggestions import closest_to

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class ServedModule(NamedTuple):
    """Module of a server's model."""

    width: int | None
    """Size of the last dimension of its value; None if it is not known."""
    refused: str | None
    """Reason if plans may not name it."""


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """Features of a server, see `Client.info`."""

    engine: str
    """ "vllm", "sglang", or "service" for one that embeds texts."""
    version: str
    """Version of the engine, or of ferrohook where its service answers."""
    served: tuple[str, ...]
    refused: Mapping[str, str]
    """Reason for each feature that is refused."""
    capture_bytes: int | None
    """Most bytes that one request may capture; None if the server does not report it."""
    modules: Mapping[str, ServedModule]
    """Served modules by name; empty if the server does not list them."""
    raw: Mapping[str, Any] = dataclasses.field(repr=False)
    """JSON of the server."""

    def module(self, name: str) -> ServedModule:
        """Returns a module that plans may name.

        Raises:
            HookError: no module has the name, or it is refused; the message has the reason.
        """
        found = self.modules.get(name)
        if found is None:
            near = ", ".join(map(repr, closest_to(name, self.modules)))
            msg = f"the server's model has no module {name!r}; the closest names are {near}"
            raise HookError(msg)
        if found.refused is not None:
            msg = f"plans cannot use the module {name!r}: {found.refused}"
            raise HookError(msg)
        return found


def engine_info(body: Mapping[str, Any]) -> ServerInfo:
    """Reads the capabilities of an engine."""
    modules = {
        name: ServedModule(it.get("width"), it.get("refused"))
        for name, it in body.get("modules", {}).items()
    }
    return ServerInfo(
        engine=body["engine"],
        version=body["version"],
        served=tuple(body["served"]),
        refused=MappingProxyType(dict(body["refused"])),
        capture_bytes=body["capture_bytes"],
        modules=MappingProxyType(modules),
        raw=MappingProxyType(dict(body)),
    )


def service_info(body: Mapping[str, Any]) -> ServerInfo:
    """Reads the capabilities of a service that embeds texts."""
    reason = "the service only returns reduced captures"
    return ServerInfo(
        engine="service",
        version=body["ferrohook"],
        served=tuple(body["interventions"]),
        refused=MappingProxyType(dict.fromkeys(body["refused_options"], reason)),
        capture_bytes=body["max_capture"],
        modules=MappingProxyType({}),
        raw=MappingProxyType(dict(body)),
    )


@dataclasses.dataclass(frozen=True)
class Generated:
    """Text of one request, with its captures."""

    text: str
    finish_reason: str | None
    """Reason why the text ended, such as "stop" or "length"."""
    id: str
    """Id of the request."""
    token_ids: tuple[int, ...] | None
    """Token ids of the text, if the request asked for them (`return_token_ids=True` of vLLM)."""
    acts: Mapping[str, Tensor]
    """Captures by name, in order of position: (tokens, ...). The last token never runs."""
    positions: Mapping[str, Tensor]
    """Position in the request of each row, by name."""
    raw: Mapping[str, Any] = dataclasses.field(repr=False)
    """JSON of the server; of a stream, its last event."""
    others: tuple[Generated, ...] = ()
    """Further texts with their own captures, where the request asked for several (`n`)."""


class TextChunk(NamedTuple):
    """Part of a text that is generated, see `TextStream.chunks`."""

    text: str
    """Empty where only values of gates came."""
    gates: Mapping[str, Tensor]
    """Values of the gates that the plan keeps, by name: (tokens,). The first part has the
    values of the prompt's tokens, each later part the values of the text in the part before it."""
    positions: Mapping[str, Tensor]
    """Position in the request of each value, by name."""


@dataclasses.dataclass(frozen=True)
class Embedded:
    """Embeddings of texts, with captures and counts of their request."""

    vectors: Tensor
    """(texts, width)."""
    captures: Mapping[str, Mapping[str, Tensor]]
    """Values by module, then by reduction: a number, vector or vector per token for each text."""
    counts: Mapping[str, int]
    """Calls that the request made, by module."""
    shared: int
    """Number of requests in its forward."""


def embedded(body: Mapping[str, Any]) -> tuple[Embedded, list[str]]:
    """Reads the answer of a service; returns the modules that never ran too."""
    captures = {
        name: {kind: torch.tensor(value, device="cpu") for kind, value in kinds.items()}
        for name, kinds in body["captures"].items()
        if kinds is not None
    }
    missing = [name for name, kinds in body["captures"].items() if kinds is None]
    vectors = torch.tensor(body["embeddings"], device="cpu")
    return Embedded(vectors, captures, body["counts"], body["shared"]), missing
