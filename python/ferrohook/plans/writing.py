"""Writes plans as JSON."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import operator
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import torch
from torch import Tensor

from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.dictionaries.features import Feature, options_of
from ferrohook.effects.interventions import KINDS
from ferrohook.effects.routing import Replay, Route
from ferrohook.errors import HookTypeError
from ferrohook.gates.aggregation import Ema, Window
from ferrohook.gates.conditions import Combined, Comparison, Condition, Not, Ramp
from ferrohook.gates.readings import READINGS, Reading
from ferrohook.plans.entries import Entry, GateEntry, HookEntry, StopEntry, dictionary_in
from ferrohook.util.arguments import describe
from ferrohook.util.texts import name_of

VERSION: Final = 1
VECTORS: Final = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")
}
"""Dtypes of tensors in JSON, by name."""
INTEGERS: Final = {
    name: getattr(torch, name) for name in ("uint8", "uint16", "int16", "int32", "int64")
}
"""Dtypes of ids of experts in JSON, by name."""
FLAGS: Final = {
    str(flag.name): flag for flag in (re.ASCII, re.IGNORECASE, re.MULTILINE, re.DOTALL, re.VERBOSE)
}
"""Flags of regexes in JSON, by name."""


def written(entries: tuple[Entry, ...]) -> str:
    """Writes entries as JSON; see `Plan.to_json`."""
    listed = [_entry(entry, f"entries[{number}]") for number, entry in enumerate(entries)]
    _check_dictionaries(entries)
    return json.dumps({"version": VERSION, "entries": listed}, allow_nan=False)


def _check_dictionaries(entries: tuple[Entry, ...]) -> None:
    """Refuses two dictionaries of one name, which a reader could not tell apart."""
    found: dict[str | None, Dictionary] = {}
    for number, entry in enumerate(entries):
        own = dictionary_in(entry)
        if own is not None and found.setdefault(own.name, own) != own:
            msg = f"entries[{number}]: the plan has two dictionaries named {own.name!r}"
            raise ValueError(msg)


def _dictionary(dictionary: Dictionary, path: str) -> str:
    if dictionary.name is None:
        msg = (
            f"{path}: JSON has dictionaries by name, and this one has none: pass name= to "
            "Dictionary or Dictionary.load"
        )
        raise ValueError(msg)
    return dictionary.name


def _entry(entry: Entry, path: str) -> dict[str, Any]:
    if isinstance(entry, StopEntry):
        return {"type": "stop", "when": _condition(entry.when, f"{path}.when")}
    own: dict[str, Any] = {"what": _selector(entry.what, f"{path}.what")}
    if entry.at is not None:
        own["at"] = _at(entry.at, f"{path}.at")
    if isinstance(entry, HookEntry):
        hook = _hook(entry.hook, f"{path}.hook")
        options = entry.options | _dependence(entry, path)
        return {"type": "on", **own, "hook": hook, "phase": entry.phase, **options}
    if isinstance(entry, GateEntry):
        gate = entry.gate
        own = {"name": gate.name, **own, "reading": _reading(gate.reading, f"{path}.reading")}
        own |= {"over": _over(gate.over), "by": gate.by, "lag": gate.lag}
        options = {name: _option(name, it, f"{path}.{name}") for name, it in entry.options.items()}
        return {"type": "gate", **own, **options}
    if entry.label is not None:
        own["label"] = entry.label
    options = {name: _option(name, it, f"{path}.{name}") for name, it in entry.options.items()}
    return {"type": "keep", **own, **options}


def _dependence(entry: HookEntry, path: str) -> dict[str, Any]:
    """Writes the options with which an entry depends on gates."""
    found: dict[str, Any] = {}
    if (when := entry.options.get("when")) is not None:
        found["when"] = _condition(when, f"{path}.when")
    if isinstance(strength := entry.options.get("strength"), Ramp):
        found["strength"] = {"ramp": [strength.gate, strength.start, strength.end]}
    return found


def _condition(condition: Condition, path: str) -> dict[str, Any]:
    match condition:
        case Comparison(gate, low, None, _):
            return {"above": [gate, low]}
        case Comparison(gate, None, high, _):
            return {"below": [gate, high]}
        case Comparison(gate, low, high, _):
            return {"between": [gate, low, high]}
        case Combined(conditions, needs_all):
            return {"and" if needs_all else "or": [_condition(it, path) for it in conditions]}
        case Not(one):
            return {"not": _condition(one, path)}
    msg = f"{path}: JSON has conditions on gates, not {describe(condition)}"
    raise HookTypeError(msg)


def _over(over: Any) -> Any:
    if isinstance(over, Window):
        return {"window": over.size}
    return {"ema": over.decay} if isinstance(over, Ema) else over


def _reading(reading: Reading, path: str) -> dict[str, Any]:
    cls = type(reading)
    if READINGS.get(cls.__name__) is not cls:
        msg = f"{path}: JSON has no reading {describe(reading)}"
        raise HookTypeError(msg)
    found: dict[str, Any] = {"type": cls.__name__}
    for field in dataclasses.fields(reading):
        value, place = getattr(reading, field.name), f"{path}.{field.name}"
        if isinstance(value, Tensor):
            found[field.name] = _value(value, place)
        elif isinstance(value, Dictionary):
            found[field.name] = _dictionary(value, place)
        elif value is not None:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _hook(hook: Any, path: str) -> dict[str, Any]:
    cls = type(hook)
    if isinstance(hook, Route | Replay):
        return {"type": cls.__name__} | {
            it.name: _value(value, f"{path}.{it.name}", VECTORS | INTEGERS)
            for it in dataclasses.fields(hook)
            if (value := getattr(hook, it.name)) is not None
        }
    if KINDS.get(cls.__name__) is not cls:
        name = getattr(hook, "__qualname__", None) or describe(hook)
        msg = (
            f"{path}: {name} is not an intervention, and JSON cannot hold Python functions or "
            "objects"
        )
        raise HookTypeError(msg)
    if isinstance(hook, Feature):
        name = _dictionary(hook.dictionary, f"{path}.dictionary")
        fields = {"dictionary": name, **options_of(hook)}
    else:
        values = zip(cls.fields, hook.values, strict=True)
        fields = {name: _value(it, f"{path}.{name}") for name, it in values if it is not None}
    if hook.output_index is not None:
        fields["output_index"] = _option("output_index", hook.output_index, path)
    return {"type": cls.__name__, **fields}


def _value(value: Tensor | float, path: str, dtypes: Mapping[str, torch.dtype] = VECTORS) -> Any:
    if not isinstance(value, Tensor):
        _check_finite(math.isfinite(value), path)
        return value
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        msg = (
            f"{path}: the dtype of a tensor in JSON must be one of {', '.join(dtypes)}, got {dtype}"
        )
        raise HookTypeError(msg)
    if value.requires_grad:
        msg = f"{path}: a tensor that requires grad has no fixed values: pass tensor.detach()"
        raise HookTypeError(msg)
    data = value.cpu().contiguous()
    _check_finite(bool(data.isfinite().all()), path)
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype, "shape": list(data.shape), "base64": base64.b64encode(raw).decode()}


def _check_finite(finite: bool, path: str) -> None:  # noqa: FBT001 (of two callers above)
    if not finite:
        msg = f"{path}: JSON cannot hold NaN or infinity"
        raise ValueError(msg)


def _selector(what: Any, path: str) -> Any:
    if what is None or isinstance(what, str):
        return what
    if isinstance(what, re.Pattern) and isinstance(what.pattern, str):
        flags = re.RegexFlag(what.flags) & ~re.UNICODE
        unknown = flags & ~re.RegexFlag(sum(FLAGS.values()))
        if not unknown:
            names = {"flags": [name for name, flag in FLAGS.items() if flag in flags]}
            return {"regex": what.pattern, **(names if flags else {})}
    if isinstance(what, list | tuple):
        members = [_selector(each, f"{path}[{place}]") for place, each in enumerate(what)]
        return members if isinstance(what, list) else {"tuple": members}
    if isinstance(what, AbstractSet):
        return {"set": sorted((_selector(each, path) for each in what), key=json.dumps)}
    name = name_of(what)
    msg = f"{path}: JSON can hold only paths, globs, regexes of str and lists of these, not {name}"
    raise HookTypeError(msg)


def _at(at: Any, path: str) -> Any:
    if isinstance(at, slice):
        return {"slice": [at.start, at.stop, at.step]}
    if callable(at):
        name = getattr(at, "__qualname__", None) or describe(at)
        msg = (
            f"{path}: JSON can hold only names, ints and slices of positions, not the function "
            f"{name}"
        )
        raise HookTypeError(msg)
    return at


def _option(name: str, value: Any, path: str) -> Any:
    if name in {"device", "dtype"}:
        return str(value).removeprefix("torch.")
    if name == "features":
        return _dictionary(value, path)
    if name == "index":
        return list(value)
    if name == "slice":
        return _index(value, path)
    if name == "output_index" and isinstance(value, tuple):
        return [_option("a step", step, path) for step in value]
    if not isinstance(value, str | int):
        msg = f"{path}: JSON can hold only strings and ints here, got {describe(value)}"
        raise HookTypeError(msg)
    return value


def _index(index: Any, path: str) -> Any:
    if index is None or isinstance(index, bool | int):
        return index
    if index is ...:
        return "..."
    if isinstance(index, slice):
        bounds = (index.start, index.stop, index.step)
        return {"slice": [None if each is None else operator.index(each) for each in bounds]}
    if isinstance(index, list | tuple):
        members = [_index(each, path) for each in index]
        return members if isinstance(index, list) else {"tuple": members}
    msg = (
        f"{path}: JSON can hold only ints, slices, and lists and tuples of these, got "
        f"{describe(index)}"
    )
    raise HookTypeError(msg)
