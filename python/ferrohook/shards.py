"""Structures of tensors as files in the format of safetensors."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ferrohook.errors import HookError, HookTypeError

if TYPE_CHECKING:
    from types import ModuleType

_KEY = "ferrohook"


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as error:
        msg = "this needs the package safetensors: install ferrohook[safetensors]"
        raise HookError(msg) from error
    return safetensors


def save(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a structure of tensors, tuples, lists, dicts and plain data to a file.

    The file appears whole or not at all.

    Raises:
        HookTypeError: something that is none of these.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_described(value, tensors, ""))
    write(Path(path), tensors, {_KEY: structure})


def write(
    target: Path, tensors: dict[str, Tensor], metadata: dict[str, str], *, sync: bool = False
) -> None:
    """Writes tensors of their own memory to a file that appears whole or not at all.

    Args:
        target: replaced where it is there.
        tensors: by name, on the CPU, contiguous.
        metadata: for the file's header.
        sync: return only when it would survive a loss of power.
    """
    library = _safetensors()
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
    try:
        part.touch()
        mode = part.stat().st_mode  # the library makes files that nobody else may read
        library.torch.save_file(tensors, part, metadata=metadata)
        part.chmod(mode)
        if sync:
            sync_to_disk(part)
        part.replace(target)
        if sync:
            sync_to_disk(target.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync_to_disk(path: Path) -> None:
    """Returns when what a file or a directory holds would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: str | os.PathLike[str]) -> Any:
    """What `save` wrote, on the CPU.

    Raises:
        HookError: another kind of file.
    """
    library = _safetensors()
    msg = f"{os.fspath(path)} holds no activations that ferrohook saved"
    try:
        with library.safe_open(path, framework="pt") as file:
            structure = (file.metadata() or {}).get(_KEY)
            if structure is None:
                raise HookError(msg)
            return _built(json.loads(structure), file)
    except library.SafetensorError as error:
        raise HookError(msg) from error


def _described(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """The structure as JSON; its tensors go into `tensors`, by their paths."""
    if isinstance(value, Tensor):
        while path in tensors:  # a key may have a slash in it
            path += "'"
        if value.layout != torch.strided:
            msg = f"{path}: a tensor of layout {value.layout} cannot be saved"
            raise HookTypeError(msg)
        # Copied where the format asks for memory of its own.
        own = value.detach().resolve_conj().resolve_neg().contiguous()
        tensors[path] = own.clone() if own.data_ptr() == value.data_ptr() else own
        return {"tensor": path}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                msg = f"{path or 'the top'}: keys are saved as str, got {type(key).__name__}"
                raise HookTypeError(msg)
        return {"dict": {key: _described(value[key], tensors, f"{path}/{key}") for key in value}}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_described(v, tensors, f"{path}/{n}") for n, v in enumerate(value)]}
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name, None) for name in value.__dataclass_fields__}
        return _described(fields, tensors, path)
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    msg = f"{path}: a {type(value).__name__} cannot be saved, only tensors and plain data"
    raise HookTypeError(msg)


def _built(structure: dict[str, Any], file: Any) -> Any:
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return file.get_tensor(content)
        case "dict":
            return {key: _built(item, file) for key, item in content.items()}
        case "tuple":
            return tuple(_built(item, file) for item in content)
        case "list":
            return [_built(item, file) for item in content]
        case _:
            return content
