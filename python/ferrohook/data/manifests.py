"""Manifests: descriptions of a run of `collect` (model, data, options), and differences."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ferrohook.attach.classes import plain_class
from ferrohook.data.fingerprints import fingerprint, fingerprints_of
from ferrohook.errors import ResumeError
from ferrohook.names.select import select
from ferrohook.plans import Plan
from ferrohook.util.tensors import tensors_in
from ferrohook.util.texts import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn


def manifest(
    model: nn.Module,
    selection: Iterable[str],
    forward: Callable[..., object] | None,
    options: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Describes a run in plain data.

    Args:
        model: the model; its parameters and buffers count by their fingerprints, its modules by
            the name of their class and by training mode.
        selection: a text for each source of tensors.
        forward: the function that runs a batch; it counts by its name.
        options: further options; a function counts by its name, tensors and a plan by their
            fingerprints, other values by their text.
    """
    modules = select(model)
    _reshard(modules.values())
    return {
        "selection": sorted(selection),
        "options": {
            "forward": None if forward is None else _name(forward),
            "modules in training mode": sum(module.training for module in modules.values()),
            **{name: _text(value) for name, value in (options or {}).items()},
        },
        "modules": {name: _name(plain_class(type(it))) for name, it in modules.items()},
        "tensors": fingerprints_of(_parameters_and_buffers(modules)),
    }


def _reshard(modules: Iterable[nn.Module]) -> None:
    """Shards the parameters that FSDP2 left whole after a forward, as before the first one."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 (takes seconds)

    for module in modules:
        if isinstance(module, FSDPModule):
            FSDPModule.reshard(module)


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _text(value: object) -> str:
    if callable(value):
        return _name(value)
    has_tensors = next(tensors_in(value), None) is not None
    return fingerprint(value) if has_tensors or isinstance(value, Plan) else repr(value)


def _parameters_and_buffers(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}" if name else key: tensor
        for name, module in modules.items()
        for tensors in (module._parameters, module._buffers)
        for key, tensor in list(tensors.items())
        if tensor is not None
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names the differences between two manifests; empty if they are equal."""
    if not _is_manifest(before):
        return ["its manifest was not written by `collect`"]
    selections = (dict.fromkeys(each["selection"]) for each in (before, now))
    options = [
        f"option {name!r}: {before['options'].get(name)!r}, now {now['options'].get(name)!r}"
        for name in now["options"] | before["options"]
        if now["options"].get(name) != before["options"].get(name)
    ]
    return [
        *_changes("selection", *selections),
        *options,
        *_changes("classes of modules", before["modules"], now["modules"]),
        *_changes("parameters and buffers", before["tensors"], now["tensors"]),
    ]


def check_same(run: str, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Refuses to resume a run that was made of something else.

    Raises:
        ResumeError: it was; the message names the differences.
    """
    if before is not None and (found := differences(before, now)):
        msg = (
            f"run {run!r} does not match this call ({'; '.join(found)}): pass the same model "
            "and options, or another run"
        )
        raise ResumeError(msg)


def _is_manifest(read: object) -> bool:
    """Validates a manifest that was read from a file."""
    if not isinstance(read, Mapping):
        return False
    mappings = (read.get(part) for part in ("options", "modules", "tensors"))
    names = read.get("selection")
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return texts and all(isinstance(each, Mapping) for each in mappings)


def _changes(kind: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changes = {
        "added": [name for name in now if name not in before],
        "missing": [name for name in before if name not in now],
        "changed": [name for name in now if name in before and now[name] != before[name]],
    }
    found = ", ".join(f"{listed(names)} {word}" for word, names in changes.items() if names)
    return [f"{kind}: {found}"] if found else []
