"""Names that clients and engines share; uploads and captures: safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.dictionaries.packing import dictionary_of, settings_of, weights_of
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Mapping

Upload: TypeAlias = Tensor | Dictionary
"""A vector or a dictionary that plans name."""
NOUNS: Final[Mapping[type[Upload], str]] = {Tensor: "vector", Dictionary: "dictionary"}
"""Kinds of uploads, for errors."""
NAME: Final = "ferrohook"
"""Key of a plan in the parameters of a request, and of the options of an engine."""
ROUTES: Final = "/v1/ferrohook"
"""Start of the paths of a server's own routes."""
VECTORS: Final = "ferrohook_vectors"
"""Key of the uploads that a plan names, where they travel with it."""
DICTIONARIES: Final = "dictionaries"
"""Key of the settings of dictionaries in the metadata of uploads."""
DIGESTS: Final = "digests"
"""Key of the digests of dictionaries that a plan names, in the metadata of its vectors."""
ANSWERS: Final = "ferrohook_answers"
"""Key of a secret that all answers to a prompt share, in the parameters of their requests."""
FIELD: Final = "ferrohook_captures"
"""Key of the token of a request's captures: in its parameters, and in the engine's answer."""
GATES: Final = "ferrohook_gates"
"""Key of the values of gates in the choices of a streamed answer, see `GateValues`."""
HEADER: Final = "X-Ferrohook-Captures"
"""Header with the token of a request's captures: of the answer, and of who fetches them."""


class Captured(NamedTuple):
    """Activations of one request."""

    acts: dict[str, Tensor]
    """Activations by name, in order of position: (tokens, ...)."""
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
        HookError: the request failed, or its captures are not whole; names the reason.
    """
    if (error := error_of(data)) is not None:
        raise HookError(error)
    spans = json.loads(header_of(data)["__metadata__"]["positions"])
    positions = {
        name: torch.cat([torch.arange(*span, device="cpu") for span in found])
        for name, found in spans.items()
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


def packed_uploads(uploads: Mapping[str, Upload], **metadata: str) -> bytes:
    """Packs vectors and dictionaries as safetensors.

    A weight of a dictionary is the tensor `"NAME/WEIGHT"`; its settings are in the metadata.

    Args:
        uploads: by name, or by digest.
        **metadata: further entries of the metadata.
    """
    tensors: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    for name, each in uploads.items():
        if isinstance(each, Dictionary):
            settings[name] = settings_of(each)
            tensors |= {f"{name}/{weight}": it for weight, it in weights_of(each).items()}
        else:
            tensors[name] = each
    if settings:
        metadata[DICTIONARIES] = json.dumps(settings)
    # Clones: safetensors refuses views that share memory.
    plain = {name: it.detach().cpu().contiguous().clone() for name, it in tensors.items()}
    return safetensors.torch.save(plain, metadata or None)


def unpacked_uploads(data: bytes) -> dict[str, Upload]:
    """Reads what `packed_uploads` packed, of an author who need not be trusted.

    Raises:
        ValueError: it is no safetensors, or a dictionary in it is malformed.
    """
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:  # a KeyError for a dtype
        msg = f"the body is not valid safetensors: {error}"
        raise ValueError(msg) from error
    text = header_of(data).get("__metadata__", {}).get(DICTIONARIES, "{}")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"the settings of dictionaries, {DICTIONARIES!r} in the metadata, are not JSON"
        raise ValueError(msg) from error
    if not isinstance(settings, dict):
        msg = f"{DICTIONARIES!r} in the metadata must be an object with settings by name"
        raise ValueError(msg)  # noqa: TRY004 (a text has no types of Python's)
    found: dict[str, Upload] = {}
    weights: dict[str, dict[str, Tensor]] = {name: {} for name in settings}
    for key, tensor in tensors.items():
        name, _, weight = key.rpartition("/")
        if name in weights:
            weights[name][weight] = tensor
        else:
            found[key] = tensor
    return found | {name: dictionary_of(own, settings[name]) for name, own in weights.items()}


def bytes_of(upload: Upload) -> int:
    """Returns the bytes of the tensors of an upload."""
    if isinstance(upload, Dictionary):
        return sum(each.nbytes for each in weights_of(upload).values())
    return upload.nbytes


def digest_of(upload: Upload) -> str:
    """Returns the digest of the content of a vector or a dictionary."""
    return hashlib.blake2b(packed_uploads({"": upload}), digest_size=16).hexdigest()
