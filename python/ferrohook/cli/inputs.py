"""Reads a model's input: a file of tensors, or text."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ferrohook.cli.errors import UserError, failing_as, need
from ferrohook.util.texts import with_article

if TYPE_CHECKING:
    import argparse

    from torch import nn

Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


def add_options(
    parser: argparse.ArgumentParser, *, required: bool = True, purpose: str = ""
) -> None:
    """Adds the option for the input."""
    parser.add_argument(
        "--input",
        metavar="INPUT",
        required=required,
        help=f"{purpose}a .safetensors or .pt file (tensors by the names of the forward's "
        "parameters, or one tensor alone), or a text where the model is a folder with a tokenizer",
    )


def read(source: str, where: str, model: nn.Module) -> Call:
    """Reads the positional and keyword arguments of the model's call.

    Args:
        source: a path or a text.
        where: path or `module:factory` of the model.
        model: the model.

    Raises:
        UserError: the input cannot be read, or the model does not take it.
    """
    path = Path(source)
    match path.suffix:
        case ".safetensors":
            return _by_name(_safetensors(path), path, model)
        case ".pt" | ".pth":
            return _arguments(_torch(path), path, model)
    if not _has_tokenizer(where):
        msg = (
            f"{source!r} is no .safetensors or .pt file; a text needs a model folder with a "
            "tokenizer, saved by transformers"
        )
        raise UserError(msg)
    return (), tokens([source], where)


def _safetensors(path: Path) -> dict[str, Any]:
    need("safetensors")
    import safetensors.torch

    _check_there(path)
    with failing_as(f"cannot read {path}", "; was it written by safetensors?"):
        return safetensors.torch.load_file(path)


def _torch(path: Path) -> Any:
    import torch

    _check_there(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        msg = f"cannot read {path}: save tensors alone by torch.save"
        raise UserError(msg) from error


def _check_there(path: Path) -> None:
    if not path.is_file():
        msg = f"there is no file {path} to read the input from"
        raise UserError(msg)


def _arguments(value: Any, path: Path, model: nn.Module) -> Call:
    from torch import Tensor

    match value:
        case Tensor():
            return (value,), {}
        case tuple() | list():
            return tuple(value), {}
        case dict():
            return _by_name(value, path, model)
    msg = f"{path} contains {with_article(value)}: save a tensor, a tuple or a dict of tensors"
    raise UserError(msg)


def _by_name(tensors: dict[Any, Any], path: Path, model: nn.Module) -> Call:
    parameters = inspect.signature(model.forward).parameters
    if len(tensors) == 1 and not tensors.keys() & parameters.keys():
        return tuple(tensors.values()), {}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [str(name) for name in tensors if name not in parameters]
    if not tensors or (unknown and not takes_any):
        content = f"has {', '.join(unknown)}" if unknown else "is empty"
        msg = f"{path} {content}: name the tensors as the forward does: {', '.join(parameters)}"
        raise UserError(msg)
    return (), tensors


def _has_tokenizer(where: str) -> bool:
    return (Path(where) / "tokenizer_config.json").is_file()


def tokens(texts: list[str], where: str) -> dict[str, Any]:
    """Returns the tokens of texts, as the keyword arguments of a model.

    Raises:
        UserError: the model is no folder with a tokenizer, or the tokenizer failed.
    """
    if not _has_tokenizer(where):
        msg = (
            f"{where} has no tokenizer: a text needs a model folder saved by transformers with one"
        )
        raise UserError(msg)
    with failing_as(f"the tokenizer in {where} failed"):
        return dict(_tokenizer(where)(texts, return_tensors="pt", padding=len(texts) > 1))


@functools.cache
def _tokenizer(where: str) -> Any:
    need("transformers")
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(
        where, local_files_only=True, trust_remote_code=False
    )
    if loaded.pad_token is None:
        loaded.pad_token = loaded.eos_token
    return loaded
