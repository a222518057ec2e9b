"""Loads a command's model: `module:factory`, a saved file or a saved folder."""

from __future__ import annotations

import pickle
import pkgutil
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrohook.cli.errors import UserError, describe, need
from ferrohook.util.texts import with_article

if TYPE_CHECKING:
    import argparse

    from torch import nn


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the model."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:factory (an nn.Module, or a callable without arguments that returns one), a "
        "file written by torch.save(model), or a folder saved by transformers",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help=(
            "allow loading a file written by torch.save(model), which may run arbitrary code of "
            "its author"
        ),
    )
    parser.add_argument("--device", default="cpu", help="device of the model; cpu by default")


def load(options: argparse.Namespace) -> nn.Module:
    """Loads the model, onto its device.

    Raises:
        UserError: it does not exist, or cannot be loaded.
    """
    # Like `python`, imports from the current folder, for unpickling too.
    if "" not in sys.path:
        sys.path.insert(0, "")
    model, path = options.model, Path(options.model)
    if path.is_dir():
        return _on(options.device, _from_transformers(path))
    if path.is_file():
        return _on(options.device, _from_file(path, trust=options.trust))
    if ":" in model:
        return _on(options.device, _from_module(model))
    msg = f"{model!r} is neither module:factory nor an existing file or folder"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        msg += (
            f"; if it is the id of a model on a hub, download it first (hf download {model} "
            "--local-dir FOLDER) and pass the folder"
        )
    raise UserError(msg)


def _on(device: str, model: nn.Module) -> nn.Module:
    """Moves a model to a device; one without data, on `meta`, stays there: it can be shown."""
    return model if any(each.is_meta for each in model.parameters()) else model.to(device)


def _from_module(model: str) -> nn.Module:
    try:
        found = pkgutil.resolve_name(model)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "is it in this folder or installed, and written without .py?"
        msg = f"cannot import {model!r}: {describe(error)}; {hint}"
        raise UserError(msg) from error
    return _module(found, model)


def _module(found: object, where: str) -> nn.Module:
    from torch import nn

    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        msg = (
            f"{where} is {with_article(found)}: expected an nn.Module, or a callable that returns "
            "one"
        )
        raise UserError(msg)
    result = found()
    if not isinstance(result, nn.Module):
        msg = f"{where}() returned {with_article(result)}: expected an nn.Module"
        raise UserError(msg)
    return result


def _from_file(path: Path, *, trust: bool) -> nn.Module:
    import torch
    from torch import nn

    if not zipfile.is_zipfile(path):
        msg = (
            f"{path} is not a saved model: pass a file written by torch.save(model), or "
            "module:factory"
        )
        raise UserError(msg)
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        if trust:
            raise
        msg = f"loading {path} may run arbitrary code of its author: pass --trust if you trust them"
        raise UserError(msg) from error
    if not isinstance(loaded, nn.Module):
        msg = (
            f"{path} contains {with_article(loaded)}, not an nn.Module: save the whole model with "
            "torch.save(model, path), or pass module:factory"
        )
        raise UserError(msg)
    return loaded


def _from_transformers(path: Path) -> nn.Module:
    need("transformers")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # An unset `trust_remote_code` prompts at the terminal.
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(path, **options)
    # The saved class, for its names; else the model without a head.
    saved = (config.architectures or ["AutoModel"])[0]
    cls: Any = getattr(transformers, saved, transformers.AutoModel)
    model, found = cls.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        print(
            f"ferrohook: randomly initialized, as {path} does not contain them: "
            f"{', '.join(missing)}",
            file=sys.stderr,
        )
    loaded: nn.Module = model
    return loaded
