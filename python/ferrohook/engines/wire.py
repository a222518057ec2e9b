"""Names that clients and engines share, and captures on their way: safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import safetensors.torch
import torch

from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

NAME: Final = "ferrohook"
"""Key of a plan in the parameters of a request, and of the options of an engine."""
VECTORS: Final = "ferrohook_vectors"
"""Key of the uploaded vectors that a plan names, where they travel with it."""
FIELD: Final = "ferrohook_captures"
"""Key of the token of a request's captures: in its parameters, and in the engine's answer."""
HEADER: Final = "X-Ferrohook-Captures"
"""Header with the token of a request's captures: of the answer, and of who fetches them."""


class Captured(NamedTuple):
    """Activations of one request."""

    acts: dict[str, Tensor]
    """By name, in order of position: (tokens, ...)."""
    positions: dict[str, Tensor]
    """Position in the request of each row, by name."""


def packed(
    acts: Mapping[str, Tensor], positions: Mapping[str, list[int]], *, error: str | None = None
) -> bytes:
    """Packs captures as safetensors; positions and an error are its metadata."""
    metadata = {"positions": json.dumps({name: spans_of(it) for name, it in positions.items()})}
    if error is not None:
        metadata["error"] = error
    return safetensors.torch.save(dict(acts), metadata)


def unpacked(data: bytes) -> Captured:
    """Reads what `packed` packed.

    Raises:
        HookError: the request failed, or its captures are not whole; tells the reason.
    """
    if (error := error_of(data)) is not None:
        raise HookError(error)
    spans = json.loads(header_of(data)["__metadata__"]["positions"])
    positions = {
        name: torch.cat([torch.arange(*span) for span in found]) for name, found in spans.items()
    }
    return Captured(safetensors.torch.load(data), positions)


def error_of(data: bytes) -> str | None:
    """Returns the error that `packed` packed, None without one."""
    error: str | None = header_of(data)["__metadata__"].get("error")
    return error


def is_empty(data: bytes) -> bool:
    """True if `packed` packed no activation."""
    return header_of(data).keys() == {"__metadata__"}


def header_of(data: bytes) -> dict[str, Any]:
    """Returns the header of safetensors."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def spans_of(positions: list[int]) -> list[tuple[int, int]]:
    """Returns the runs of sorted positions, as (start, stop)."""
    spans: list[tuple[int, int]] = []
    for position in positions:
        if spans and spans[-1][1] == position:
            spans[-1] = spans[-1][0], position + 1
        else:
            spans.append((position, position + 1))
    return spans


def digest_of(vector: Tensor) -> str:
    """Returns the digest of a vector's content."""
    return hashlib.blake2b(safetensors.torch.save({"": vector}), digest_size=16).hexdigest()
