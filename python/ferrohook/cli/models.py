"""The models that commands are given: `module:factory`, or what was saved."""

from __future__ import annotations

import importlib
import pickle
import sys
import zipfile
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrohook.cli.mistakes import Mistake, need, told

if TYPE_CHECKING:
    import argparse

    from torch import nn


def add_options(parser: argparse.ArgumentParser) -> None:
    """What says which model is meant."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:factory (an nn.Module, or what returns one when called without arguments), a "
        "file of torch.save(model), or a folder that transformers saved",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="load a file of torch.save(model), which runs whatever code its maker put in it",
    )


def load(model: str, *, trust: bool) -> nn.Module:
    """The model that is meant.

    Raises:
        Mistake: there is none, or it cannot be loaded.
    """
    # As `python` would: what is here can be imported, also by what is unpickled.
    if "" not in sys.path:
        sys.path.insert(0, "")
    path = Path(model)
    if path.is_dir():
        return _from_transformers(path)
    if path.is_file():
        return _from_file(path, trust=trust)
    if ":" in model:
        return _from_module(model)
    msg = f"{model!r} is neither module:factory nor a file or folder that exists"
    raise Mistake(msg)


def _from_module(model: str) -> nn.Module:
    module_name, _, attributes = model.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        hint = "is it installed, or in this folder?"
        if module_name.endswith(".py"):
            hint = f"write {module_name.removesuffix('.py')}:{attributes}, without .py"
        msg = f"cannot import {module_name!r}: {told(error)}; {hint}"
        raise Mistake(msg) from error
    except (Exception, SystemExit) as error:
        msg = f"importing {module_name!r} failed: {told(error)} (--traceback shows where)"
        raise Mistake(msg) from error
    try:
        made: object = reduce(getattr, attributes.split("."), module)
    except AttributeError as error:
        public = [name for name in vars(module) if not name.startswith("_")]
        closest = get_close_matches(attributes, public) or public[:5]
        msg = f"{module_name!r} has no {attributes!r}; it has {', '.join(closest) or 'nothing'}"
        raise Mistake(msg) from error
    return _module(made, model)


def _module(made: object, where: str) -> nn.Module:
    from torch import nn

    if isinstance(made, nn.Module):
        return made
    if not callable(made):
        msg = f"{where} is a {type(made).__name__}: name an nn.Module, or what returns one"
        raise Mistake(msg)
    try:
        result = made()
    except (Exception, SystemExit) as error:
        msg = f"{where}() failed: {told(error)} (it is called without arguments)"
        raise Mistake(msg) from error
    if not isinstance(result, nn.Module):
        msg = f"{where}() returned a {type(result).__name__}: an nn.Module was expected"
        raise Mistake(msg)
    return result


def _from_file(path: Path, *, trust: bool) -> nn.Module:
    import torch
    from torch import nn

    if not zipfile.is_zipfile(path):
        msg = f"{path} is no model: give a file of torch.save(model), or module:factory"
        raise Mistake(msg)
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not trust:
            msg = (
                f"loading {path} runs whatever code its maker put in it: "
                "if you trust them, say so with --trust"
            )
            raise Mistake(msg) from error
        loaded = _unpickled(path)
    except Exception as error:
        raise _unreadable(path, error) from error
    if not isinstance(loaded, nn.Module):
        msg = (
            f"{path} holds a {type(loaded).__name__}, no nn.Module: save the whole model by "
            "torch.save(model, path), or give module:factory"
        )
        raise Mistake(msg)
    return loaded


def _unpickled(path: Path) -> object:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> Mistake:
    return Mistake(f"cannot load {path}: {told(error)}; was it saved by torch.save(model, path)?")


def _from_transformers(path: Path) -> nn.Module:
    if not (path / "config.json").is_file():
        msg = f"{path} has no config.json: give a folder that save_pretrained wrote"
        raise Mistake(msg)
    need("transformers")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        # Without `trust_remote_code` it would ask at the terminal.
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(path, **options)
        # The class that was saved, for its names; else the model without a head.
        saved = (config.architectures or ["AutoModel"])[0]
        cls: Any = getattr(transformers, saved, transformers.AutoModel)
        model, found = cls.from_pretrained(path, output_loading_info=True, **options)
    except Exception as error:
        msg = f"transformers cannot load {path}: {told(error)}"
        raise Mistake(msg) from error
    if missing := sorted(found["missing_keys"]):
        print(f"ferrohook: random, not in {path}: {', '.join(missing)}", file=sys.stderr)
    loaded: nn.Module = model
    return loaded
