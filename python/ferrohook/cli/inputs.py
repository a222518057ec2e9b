"""What a model is called with: a file of tensors, or text."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ferrohook.cli.mistakes import Mistake, need, told

if TYPE_CHECKING:
    import argparse

    from torch import nn

Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What says which input is meant."""
    parser.add_argument(
        "--input",
        metavar="INPUT",
        required=True,
        help="a .safetensors or .pt file (tensors by the names of the forward's parameters, or one "
        "tensor alone), or a text where the model is a folder with a tokenizer",
    )


def read(source: str, where: str, model: nn.Module) -> Call:
    """The positional and keyword arguments to call the model with.

    Args:
        source: a path or a text.
        where: what the model was loaded from.
        model: the model.

    Raises:
        Mistake: the input cannot be read, or the model does not take it.
    """
    path = Path(source)
    match path.suffix:
        case ".safetensors":
            return _by_name(_safetensors(path), path, model)
        case ".pt" | ".pth":
            return _arguments(_torch(path), path, model)
    return (), _tokens(source, where)


def _safetensors(path: Path) -> dict[str, Any]:
    need("safetensors", extra="safetensors")
    import safetensors.torch

    _check_there(path)
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        msg = f"cannot read {path}: {told(error)}; was it written by safetensors?"
        raise Mistake(msg) from error


def _torch(path: Path) -> Any:
    import torch

    _check_there(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        msg = f"cannot read {path}: it is to hold tensors alone, saved by torch.save"
        raise Mistake(msg) from error


def _check_there(path: Path) -> None:
    if not path.is_file():
        msg = f"there is no file {path} to read the input from"
        raise Mistake(msg)


def _arguments(value: Any, path: Path, model: nn.Module) -> Call:
    from torch import Tensor

    match value:
        case Tensor():
            return (value,), {}
        case tuple() | list():
            return tuple(value), {}
        case dict():
            return _by_name(value, path, model)
    msg = f"{path} holds a {type(value).__name__}: save a tensor, a tuple or a dict of tensors"
    raise Mistake(msg)


def _by_name(tensors: dict[Any, Any], path: Path, model: nn.Module) -> Call:
    parameters = inspect.signature(model.forward).parameters
    if len(tensors) == 1 and not tensors.keys() & parameters.keys():
        return tuple(tensors.values()), {}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [str(name) for name in tensors if name not in parameters]
    if not tensors or (unknown and not takes_any):
        given = f"has {', '.join(unknown)}" if unknown else "is empty"
        msg = f"{path} {given}: name the tensors as the forward does: {', '.join(parameters)}"
        raise Mistake(msg)
    return (), tensors


def _tokens(text: str, where: str) -> dict[str, Any]:
    if not (Path(where) / "tokenizer_config.json").is_file():
        msg = (
            f"{text!r} is no .safetensors or .pt file, and for a text the model has to be a folder "
            "with a tokenizer, saved by transformers"
        )
        raise Mistake(msg)
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            where, local_files_only=True, trust_remote_code=False
        )
        return dict(tokenizer(text, return_tensors="pt"))
    except Exception as error:
        msg = f"the tokenizer in {where} failed: {told(error)}"
        raise Mistake(msg) from error
