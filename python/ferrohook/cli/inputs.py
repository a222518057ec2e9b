"""Reads a model's input: a file of tensors, or text."""

from __future__ import annotations

import functools
import inspect
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ferrohook.cli.errors import UserError, need
from ferrohook.util.texts import with_article

if TYPE_CHECKING:
    import argparse

    from torch import nn

Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


def add_options(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Adds the option for the input."""
    parser.add_argument(
        "--input",
        metavar="INPUT",
        help=f"{purpose}a .safetensors or .pt file (tensors by the names of the forward's "
        "parameters, or a single tensor), or a text if the model is a folder with a tokenizer",
    )


def read(source: str | list[str], model: nn.Module, options: argparse.Namespace) -> Call:
    """Reads the positional and keyword arguments of the model's call, onto its device.

    Args:
        source: a path, a text, or texts of one batch.
        model: the model.
        options: of the command, for the model.

    Raises:
        UserError: a text without a tokenizer, or a file with something else.
    """
    from ferrohook.util.tensors import map_tensors

    call = _arguments(source, model, options.model)
    moved: Call = map_tensors(lambda tensor: tensor.to(options.device), call)
    return moved


def _arguments(source: str | list[str], model: nn.Module, where: str) -> Call:
    import torch

    if isinstance(source, list):
        return (), _tokens(source, model, where)
    value: Any
    match Path(source).suffix:
        case ".safetensors":
            need("safetensors")
            import safetensors.torch

            value = safetensors.torch.load_file(source)
        case ".pt" | ".pth":
            if not zipfile.is_zipfile(source):
                msg = f"{source} was not written by torch.save"
                raise UserError(msg)
            value = torch.load(source, map_location="cpu", weights_only=True)
        case _:
            return (), _tokens([source], model, where)
    match value:
        case torch.Tensor():
            return (value,), {}
        case tuple() | list() if value:
            return tuple(value), {}
        case dict() if value:
            named = value.keys() & inspect.signature(model.forward).parameters.keys()
            return (tuple(value.values()), {}) if len(value) == 1 and not named else ((), value)
    msg = f"{source} contains {with_article(value)}: save a tensor, a tuple or a dict of tensors"
    raise UserError(msg)


def _tokens(texts: list[str], model: nn.Module, where: str) -> dict[str, Any]:
    if not (Path(where) / "tokenizer_config.json").is_file():
        msg = (
            f"{where} has no tokenizer: a text needs a model folder with one, saved by "
            "transformers; tensors are read from .safetensors and .pt files"
        )
        raise UserError(msg)
    tokens = _tokenizer(where)(texts, return_tensors="pt", padding=len(texts) > 1)
    # A tokenizer may return more than the model takes, such as token_type_ids.
    named = inspect.signature(model.forward).parameters.keys() & tokens.keys()
    return {name: tokens[name] for name in named or tokens}


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
