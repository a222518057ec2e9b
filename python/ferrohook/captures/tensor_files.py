"""Reads and writes structures of tensors as safetensors files."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ferrohook._core import crc32
from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.tensors import nested_of, parts
from ferrohook.util.texts import imported, with_article

if TYPE_CHECKING:
    from typing_extensions import Buffer

_KEY = "ferrohook"
_NESTED = {"nested": torch.strided, "jagged": torch.jagged}
"""Layouts of nested tensors, by the kind that a file has of them."""
_FIELDS: dict[str, Any] = {
    "activations": dict,
    "grads": dict | None,
    "model": str,
    "per_call": bool,
}
"""Types of the fields that `ActivationCache.save` writes."""


def save(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a structure of tensors, tuples, lists, dicts and plain data to a file.

    The file appears whole or not at all.

    Raises:
        HookTypeError: `value` contains an object of another type.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encode(value, tensors, ""))
    write(Path(path), {**tensors}, {_KEY: structure})


FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes; it has no others."""


class Pieces(NamedTuple):
    """Tensors that are written as one, joined along their first dimension, without joining them."""

    tensors: list[Tensor]
    """Tensors, one or more, of one dtype and equal in all dimensions but the first."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of each."""
        return self.tensors[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        return sum(len(each) for each in self.tensors), *self.tensors[0].shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(each.nbytes for each in self.tensors)

    def joined(self) -> Tensor:
        """Returns the joined tensor, a copy."""
        return torch.cat(self.tensors)


class Checksum:
    """CRC-32 of the bytes of a file, the one of zlib."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: Buffer) -> None:
        """Continues it over more bytes."""
        self.value = crc32(data, self.value)

    @classmethod
    def of(cls, path: Path) -> int:
        """Reads a file and returns its checksum."""
        checksum = cls()
        with path.open("rb", buffering=0) as file:
            while block := file.read(2**20):
                checksum.update(block)
        return checksum.value


def write(
    target: Path,
    tensors: Mapping[str, Tensor | Pieces],
    metadata: dict[str, str],
    *,
    sync: bool = False,
    checksum: Checksum | None = None,
) -> None:
    """Writes tensors to a file that appears whole or not at all.

    It does without the safetensors library: saving needs no extra, the checksum takes no second
    reading, and a full disk is an `OSError` with its number.

    Args:
        target: path of the file, replaced if it exists.
        tensors: tensors by name; strided, without conjugate or negative bit, of a dtype in
            `FORMATS`.
        metadata: metadata of the file's header.
        sync: return only when the file would survive a loss of power.
        checksum: continued over all bytes of the file.
    """
    # Sorted by element size, so that each tensor is aligned.
    named = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in named:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": FORMATS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            for data in _contents(encoded, named):
                file.write(data)
                if checksum is not None:
                    checksum.update(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(target)
        if sync:
            sync_to_disk(target.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _contents(header: bytes, named: list[tuple[str, Tensor | Pieces]]) -> Iterator[Buffer]:
    yield len(header).to_bytes(8, "little") + header
    for _, tensor in named:
        for piece in tensor.tensors if isinstance(tensor, Pieces) else [tensor]:
            flat = piece.detach().cpu().contiguous().view(-1)
            yield flat.view(torch.uint8).numpy().data


def sync_to_disk(directory: Path) -> None:
    """Syncs a directory: its names survive a loss of power after that."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a file of activations that `save` wrote, onto the CPU.

    Raises:
        HookError: the file is of another kind.
    """
    library = imported("safetensors", "reading")
    msg = f"{os.fspath(path)} contains no activations saved by ferrohook"
    try:
        with library.safe_open(path, framework="pt") as file:
            structure = (file.metadata() or {}).get(_KEY)
            content = None if structure is None else _decode(json.loads(structure), file)
    # Torch raises RuntimeError for components that form no nested tensor.
    except (library.SafetensorError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise HookError(msg) from error
    if not _is_cache(content):
        raise HookError(msg)
    return cast("dict[str, Any]", content)


def _is_cache(content: Any) -> bool:
    """Returns True if a file has the fields that `ActivationCache.save` writes."""
    if not isinstance(content, dict) or content.keys() != _FIELDS.keys():
        return False
    if not all(isinstance(content[name], kind) for name, kind in _FIELDS.items()):
        return False
    values = [*content["activations"].values(), *(content["grads"] or {}).values()]
    return not content["per_call"] or all(isinstance(value, list) for value in values)


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Converts the structure to JSON; adds its tensors to `tensors` by path."""
    if isinstance(value, Tensor):
        return _encode_tensor(value, tensors, path)
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, tuple | list):  # a packed sequence with its sizes and order
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, tensors, f"{path}/{key}") for key, item in enumerate(value)]}
    inside = value.items() if isinstance(value, Mapping) else parts(value)
    if inside is None:
        msg = f"{path}: {with_article(value)} cannot be saved; only tensors and plain data can"
        raise HookTypeError(msg)
    encoded = {}
    for key, item in inside:
        if not isinstance(key, str):
            msg = (
                f"{path or 'the top level'}: keys must be str to be saved, got {type(key).__name__}"
            )
            raise HookTypeError(msg)
        encoded[key] = _encode(item, tensors, f"{path}/{key}")
    return {"dict": encoded}


def _encode_tensor(tensor: Tensor, tensors: dict[str, Tensor], path: str) -> Any:
    while path in tensors:  # a key may contain a slash
        path += "'"
    if tensor.is_nested and tensor.layout in _NESTED.values():
        layout = next(name for name, each in _NESTED.items() if each == tensor.layout)
        components = enumerate(tensor.detach().unbind())
        return {layout: [_encode(it, tensors, f"{path}/{place}") for place, it in components]}
    if tensor.layout != torch.strided:
        msg = f"{path}: a tensor of layout {tensor.layout} cannot be saved"
        raise HookTypeError(msg)
    if tensor.dtype not in FORMATS:
        msg = (
            f"{path}: a tensor of {tensor.dtype} cannot be saved: safetensors does not support "
            "this dtype"
        )
        raise HookTypeError(msg)
    tensors[path] = tensor.detach().resolve_conj().resolve_neg()
    return {"tensor": path}


def _decode(structure: dict[str, Any], file: Any) -> Any:
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return file.get_tensor(content)
        case "dict":
            return {key: _decode(item, file) for key, item in content.items()}
        case "tuple":
            return tuple(_decode(item, file) for item in content)
        case "list":
            return [_decode(item, file) for item in content]
        case name if name in _NESTED:
            return nested_of([_decode(item, file) for item in content], _NESTED[name])
        case _:
            return content
