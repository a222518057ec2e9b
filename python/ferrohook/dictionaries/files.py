"""Files of dictionaries, read without running code that they contain."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ferrohook.util.arguments import describe
from ferrohook.util.texts import imported, listed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LINE = re.compile(r"(\w+):\s*(.*?)\s*(?:#.*)?")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file of settings.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not an object in JSON.
    """
    try:
        found = json.loads(_existing(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        msg = f"{path} is not valid JSON: {error}"
        raise ValueError(msg) from error
    if not isinstance(found, dict):
        msg = f"{path} must be a JSON object, got {describe(found)}"
        raise ValueError(msg)  # noqa: TRY004 (a file has no types of Python's)
    return found


def read_yaml(path: Path) -> dict[str, str]:
    """Reads the texts at the top level of a YAML file, all that circuit-tracer's settings need.

    Raises:
        FileNotFoundError: there is no such file.
    """
    lines = _existing(path).read_text(encoding="utf-8", errors="replace").splitlines()
    found = [match for line in lines if (match := _LINE.fullmatch(line))]
    return {match[1]: match[2].strip("'\"") for match in found if match[2]}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file by name.

    Raises:
        FileNotFoundError: there is no such file.
        HookError: the package safetensors is not installed.
        ValueError: the file is malformed.
    """
    library = imported("safetensors", "Dictionary.load")
    try:
        with library.safe_open(_existing(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except library.SafetensorError as error:
        msg = f"{path} is not a safetensors file: {error}"
        raise ValueError(msg) from error


def read_npz(path: Path) -> dict[str, Tensor]:
    """Reads the arrays of a file by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is malformed, or has objects of Python, which may run code.
    """
    opened = _existing(path).open("rb")
    try:
        with opened, np.load(opened, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except Exception as error:  # a damaged archive raises one of any class
        msg = f"{path} is not an .npz file of numbers: {error}"
        raise ValueError(msg) from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Reads the tensors that `torch.save` wrote by name, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is malformed, needs code to be run, or contains something else.
    """
    try:
        found = torch.load(_existing(path), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises one of any class
        reason = str(error).partition("\n")[0]
        msg = f"{path} is not a file of tensors that loads with weights_only=True: {reason}"
        raise ValueError(msg) from error
    if not isinstance(found, dict) or not all(isinstance(it, str) for it in found):
        msg = f"{path} must contain a dict of tensors, got {describe(found)}"
        raise ValueError(msg)
    wrong = [name for name, it in found.items() if not isinstance(it, Tensor)]
    if wrong:
        msg = f"{path} must contain tensors, got {describe(found[wrong[0]])} for {wrong[0]!r}"
        raise ValueError(msg)
    return {name: it.detach() for name, it in found.items()}


def chosen(
    path: Path,
    tensors: Mapping[str, Tensor],
    names: Mapping[str, str],
    optional: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Returns tensors under the names that `Dictionary` takes.

    Args:
        path: of their file, for errors.
        tensors: of the file, by name.
        names: their names in the file, by name.
        optional: the same of tensors that may be missing.

    Raises:
        ValueError: a tensor is missing, or the file has one more.
    """
    optional = optional or {}
    if missing := [each for each in names.values() if each not in tensors]:
        msg = f"{path} has no {listed(missing)}: its tensors are {listed(sorted(tensors))}"
        raise ValueError(msg)
    if more := sorted(tensors.keys() - {*names.values()} - {*optional.values()}):
        expected = ", ".join([*names.values(), *(f"{each} or none" for each in optional.values())])
        msg = f"{path} has unexpected tensors, {listed(more)}: expected {expected}"
        raise ValueError(msg)
    both = {**names, **optional}
    return {name: tensors[each] for name, each in both.items() if each in tensors}


def setting(
    path: Path, settings: Mapping[str, Any], name: str, types: Any, default: Any = ...
) -> Any:
    """Returns a setting of a file.

    Args:
        path: of the file, for errors.
        settings: by name.
        name: of the setting.
        types: of its values; a bool is no int.
        default: value of a missing one; it may not be missing without a default.

    Raises:
        ValueError: it is missing, or has another type.
    """
    value = settings.get(name, default)
    if value is ...:
        msg = f"{path} has no {name!r}"
        raise ValueError(msg)
    wrong = isinstance(value, bool) and types is not bool
    if value is not default and (wrong or not isinstance(value, types)):
        msg = f"{path}: {name!r} has an unexpected value, {value!r}"
        raise ValueError(msg)
    return value


def _existing(path: Path) -> Path:
    if not path.is_file():
        msg = f"there is no file {path}"
        raise FileNotFoundError(msg)
    return path
