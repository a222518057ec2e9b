"""Reads plans from JSON. Text from anybody: every size is bounded, and no code of it runs."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from ferrohook.captures.tensor_files import FORMATS
from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.dictionaries.features import NUMBERS, Feature
from ferrohook.effects.interventions import KINDS
from ferrohook.effects.routing import ROUTES
from ferrohook.gates.aggregation import ema, window
from ferrohook.gates.conditions import Combined, Condition, above, below, between, ramp
from ferrohook.gates.readings import READINGS
from ferrohook.plans.entries import Entry, KeepOptions, gate, keep, on, stop
from ferrohook.plans.writing import FLAGS, INTEGERS, VECTORS, VERSION
from ferrohook.util.arguments import check_encodes, describe, expect
from ferrohook.util.texts import missing_package

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_STORED: Final = {name: str(it).removeprefix("torch.") for it, name in FORMATS.items()}
"""Names of dtypes, by their names in files of safetensors."""
_DTYPES: Final = {str(it)[6:]: it for it in vars(torch).values() if isinstance(it, torch.dtype)}
_SEQUENCES: Final = {"tuple": tuple, "set": frozenset}
_LONGEST: Final = 1024
"""Characters of a name or a glob, at most."""
_LONGEST_REGEX: Final = 256
_DEEPEST: Final = 8
"""Lists within lists, at most."""
_LONGEST_PATH: Final = 64
"""Steps of an `output_index`."""
_MOST_DIMENSIONS: Final = 8
_MOST_INDICES: Final = 2**16
"""Members of the lists in `slice=` of all entries, at most."""
_DEEPEST_CONDITION: Final = 16
"""Conditions within conditions, at most."""
_MOST_CONDITIONS: Final = 1024
"""Conditions of all entries, at most."""
_MOST_ARGUMENTS: Final = 3
_MOST_IDS: Final = 1024
"""Token ids of a reading, at most."""
_DIGITS: Final = 19
_INT64: Final = 2**63


class JsonLimits(NamedTuple):
    """Limits of a text; see `Plan.from_json`."""

    regex: bool = False
    max_text: int = 2**24
    max_entries: int = 256
    max_selectors: int = 4096
    max_bytes: int = 2**26


class _Object(dict[str, Any]):
    """A JSON object, and one of its keys that came twice."""

    twice: str | None = None

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> _Object:
        made = cls(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            made.twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return made


def read(
    text: str | bytes | Mapping[str, Any],
    tensors: Mapping[str, Tensor] | str | os.PathLike[str] | None,
    limits: JsonLimits,
    dictionaries: Mapping[str, Dictionary] | None = None,
) -> list[Entry]:
    """Reads entries from JSON; see `Plan.from_json`."""
    found = text if isinstance(text, Mapping) else _parsed(text, limits)
    fields = _fields(found, "the plan", {"version", "entries"}, {"version", "entries"})
    version = fields["version"]
    if version != VERSION or isinstance(version, bool):
        msg = f"version: this ferrohook reads plans of version {VERSION}, got {_short(version)}"
        raise ValueError(msg)
    entries = fields["entries"]
    if not isinstance(entries, list) or len(entries) > limits.max_entries:
        got = f"{len(entries):,}" if isinstance(entries, list) else _short(entries)
        msg = f"entries: expected a list of at most max_entries={limits.max_entries:,}, got {got}"
        raise ValueError(msg)
    with _tensors(tensors) as lookup:
        reader = _Reader(limits, lookup, dictionaries or {})
        return [reader.entry(each, f"entries[{place}]") for place, each in enumerate(entries)]


def _parsed(text: str | bytes, limits: JsonLimits) -> Any:
    expect(text, str | bytes, "from_json needs a str, bytes or the dict that json.loads returned")
    if len(text) > limits.max_text:
        msg = f"the plan has {len(text):,} characters, more than max_text={limits.max_text:,}"
        raise ValueError(msg)
    try:
        # Numbers beyond any use are read as infinity, which is refused where it stands.
        return json.loads(
            text.decode() if isinstance(text, bytes) else text,
            object_pairs_hook=_Object.of,
            parse_int=lambda text: int(text) if len(text.lstrip("-")) <= _DIGITS else math.inf,
        )
    except RecursionError:
        msg = "the plan is nested too deeply"
    except ValueError as error:
        msg = f"the plan is not valid JSON: {error}"
    raise ValueError(msg) from None


class _TensorSource(NamedTuple):
    """A tensor that was uploaded or lies in a file."""

    dtype: str
    shape: list[int]
    load: Callable[[], Tensor]


@contextlib.contextmanager
def _tensors(
    tensors: Mapping[str, Tensor] | str | os.PathLike[str] | None,
) -> Iterator[Callable[[str], _TensorSource | None]]:
    """Opens named tensors; yields their look-up by name."""
    if tensors is None or isinstance(tensors, Mapping):
        given = tensors or {}

        def uploaded(name: str) -> _TensorSource | None:
            tensor = given.get(name)
            if tensor is None:
                return None
            expect(tensor, Tensor, f"tensors[{name!r}] must be a tensor")
            dtype = str(tensor.dtype).removeprefix("torch.")
            return _TensorSource(dtype, list(tensor.shape), tensor.detach)

        yield uploaded
        return
    try:
        import safetensors  # noqa: PLC0415 (optional)
    except ModuleNotFoundError as error:
        msg = missing_package("from_json with a file of tensors", "safetensors")
        raise ModuleNotFoundError(msg, name="safetensors") from error
    path = Path(tensors)
    try:
        opened = safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        msg = f"{path} is not a safetensors file: {error}"
        raise ValueError(msg) from error
    with opened as file:
        names = {*file.keys()}

        def stored(name: str) -> _TensorSource | None:
            if name not in names:
                return None
            header = file.get_slice(name)
            dtype = str(header.get_dtype())
            return _TensorSource(
                _STORED.get(dtype, dtype), header.get_shape(), lambda: file.get_tensor(name)
            )

        yield stored


class _Reader:
    """Reads the entries of one text."""

    def __init__(
        self,
        limits: JsonLimits,
        lookup: Callable[[str], _TensorSource | None],
        dictionaries: Mapping[str, Dictionary],
    ) -> None:
        self._limits = limits
        self._dictionaries = dictionaries
        self._lookup = lookup
        self._bytes = 0
        self._selectors = 0
        self._indices = 0
        self._conditions = 0
        self._gates: set[str] = set()

    def entry(self, value: Any, path: str) -> Entry:
        kind = _type(value, path, _ENTRIES)
        allowed = {"type", *_ENTRIES[kind]}
        fields = _fields(value, path, allowed, _NEEDED[kind])
        own: dict[str, Any] = {}
        if kind != "stop":
            self._count_selectors(1, f"{path}.what")
            own["what"] = self._selector(fields.get("what"), f"{path}.what")
        if kind == "on":
            own["hook"] = self._hook(fields["hook"], f"{path}.hook")
        if kind == "gate":
            own["reading"] = self._reading(fields["reading"], f"{path}.reading")
            name = _text(fields["name"], f"{path}.name")
            if name in self._gates:
                msg = f"{path}: the plan has a gate {_short(name)} already"
                raise ValueError(msg)
            self._gates.add(name)
        for name in fields.keys() - {"type", "what", "hook", "reading"}:
            it, place = fields[name], f"{path}.{name}"
            if name == "slice":
                own[name] = self._index(it, place)
            elif name == "features" and it is not None:
                own[name] = self._dictionary(it, place)
            elif name == "index" and isinstance(it, list):
                own[name] = _ids(it, place)
            elif name == "when" and (it is not None or kind == "stop"):
                own[name] = self._condition(it, place)
            else:
                own[name] = _read_option(name, it, place)
        self._count_features(own.get("features"), own.get("index"), path)
        with _named(path):
            return _MAKERS[kind](**own)

    def _hook(self, value: Any, path: str) -> Any:
        kind = _type(value, path, {**KINDS, **ROUTES})
        if kind in ROUTES:
            return self._route(value, path, kind)
        cls = KINDS[kind]
        if cls is Feature:
            return self._feature(value, path)
        own = {"type", "output_index", *cls.fields}
        fields = dict(_fields(value, path, own, set()))
        del fields["type"]
        for name, it in fields.items():
            if name == cls.vector_field:
                fields[name] = self._tensor(it, f"{path}.{name}")
            elif name == "output_index":
                fields[name] = _part(it, f"{path}.{name}")
            else:
                fields[name] = _plain(it, f"{path}.{name}")
        with _named(path):
            return cls(**fields)

    def _feature(self, value: Any, path: str) -> Feature:
        own = {"type", "dictionary", "index", "only_active", "unit", "output_index", *NUMBERS}
        fields = dict(_fields(value, path, own, {"dictionary", "index"}))
        del fields["type"]
        for name, it in fields.items():
            place = f"{path}.{name}"
            if name == "dictionary":
                fields[name] = self._dictionary(it, place)
            elif name == "output_index":
                fields[name] = _part(it, place)
            elif isinstance(it, list):
                if len(it) > _MOST_IDS:
                    msg = f"{place}: expected at most {_MOST_IDS} numbers, got {len(it):,}"
                    raise ValueError(msg)
                fields[name] = [_plain(each, place) for each in it]
            else:
                fields[name] = _plain(it, place)
        self._count_features(fields["dictionary"], fields["index"], path)
        with _named(path):
            return Feature(**fields)

    def _count_features(self, dictionary: Dictionary | None, index: Any, path: str) -> None:
        """Counts the weights of features that the plan copies."""
        if dictionary is not None and index is not None:
            features = len(index) if isinstance(index, list) else 1
            width = dictionary.d_in + dictionary.d_out
            self._count_bytes(features * width * dictionary.dtype.itemsize, path)

    def _dictionary(self, value: Any, path: str) -> Dictionary:
        name = _text(value, path)
        found = self._dictionaries.get(name)
        if found is None:
            msg = f"{path}: no dictionary named {_short(name)} was passed as dictionaries="
            raise ValueError(msg)
        expect(found, Dictionary, f"dictionaries[{name!r}] must be a Dictionary")
        if found.name != name:
            msg = f"dictionaries[{name!r}] must have that name, got the name {found.name!r}"
            raise ValueError(msg)
        return found

    def _route(self, value: Any, path: str, kind: str) -> Any:
        """Reads experts that tokens take."""
        cls = ROUTES[kind]
        names = {field.name for field in dataclasses.fields(cls)}
        fields = dict(_fields(value, path, {"type", *names}, {"ids"}))
        del fields["type"]
        for name, it in fields.items():
            place = f"{path}.{name}"
            if name == "start":
                fields[name] = _plain(it, place)
            elif it is not None:
                fields[name] = self._tensor(it, place, VECTORS if name == "weights" else INTEGERS)
        with _named(path):
            return cls(**fields)

    def _condition(self, value: Any, path: str, depth: int = 0) -> Condition:
        """Reads a condition on gates."""
        kinds = {*_COMPARISONS, *_COMBINED, "not"}
        kind = next(iter(value), None) if isinstance(value, Mapping) and len(value) == 1 else None
        if kind not in kinds or depth > _DEEPEST_CONDITION:
            msg = (
                f"{path}: expected an object with one key of {', '.join(sorted(kinds))}, nested at "
                f"most {_DEEPEST_CONDITION} deep, got {_short(value)}"
            )
            raise ValueError(msg)
        self._conditions += 1
        if self._conditions > _MOST_CONDITIONS:
            msg = f"{path}: the plan has more than {_MOST_CONDITIONS} conditions"
            raise ValueError(msg)
        place = f"{path}.{kind}"
        inner = _fields(value, path, kinds, set())[kind]
        if kind == "not":
            return ~self._condition(inner, place, depth + 1)
        if kind in _COMPARISONS:
            plain = [_plain(each, place) for each in _listed(inner, place)]
            with _named(place):
                return _COMPARISONS[kind](*plain)
        if not isinstance(inner, list) or len(inner) < 2:  # noqa: PLR2004 (a pair)
            msg = f"{place}: expected a list of at least two conditions, got {_short(inner)}"
            raise ValueError(msg)
        own = [self._condition(each, place, depth + 1) for each in inner]
        return Combined.of(*own, needs_all=kind == "and")

    def _reading(self, value: Any, path: str) -> Any:
        cls = READINGS[_type(value, path, READINGS)]
        names = {field.name for field in dataclasses.fields(cls)}
        fields = dict(_fields(value, path, {"type", *names}, set()))
        del fields["type"]
        for name, it in fields.items():
            place = f"{path}.{name}"
            if name == "dictionary":
                fields[name] = self._dictionary(it, place)
            elif isinstance(it, Mapping):
                fields[name] = self._tensor(it, place)
            elif isinstance(it, list):
                fields[name] = _ids(it, place)
            else:
                fields[name] = _plain(it, place)
        self._count_features(fields.get("dictionary"), 0, path)
        with _named(path):
            return cls(**fields)

    def _tensor(self, value: Any, path: str, dtypes: Mapping[str, torch.dtype] = VECTORS) -> Tensor:
        by_name = isinstance(value, Mapping) and "tensor" in value
        names = {"tensor"} if by_name else {"dtype", "shape", "base64"}
        fields = _fields(value, path, names, names)
        if by_name:
            name = _text(fields["tensor"], f"{path}.tensor")
            found = self._lookup(name)
            if found is None:
                msg = f"{path}: no tensor named {_short(name)} was passed as tensors="
                raise ValueError(msg)
            dtype, shape, load = found
        else:
            dtype = _text(fields["dtype"], f"{path}.dtype")
            shape = _shape(fields["shape"], f"{path}.shape")
            load = None
        if dtype not in dtypes:
            msg = (
                f"{path}: the dtype of a tensor must be one of {', '.join(dtypes)}, got "
                f"{_short(dtype)}"
            )
            raise ValueError(msg)
        size = math.prod(shape) * dtypes[dtype].itemsize
        self._count_bytes(size, path)
        with _named(path):
            own = dtypes[dtype]
            made = _decoded(fields["base64"], own, shape, size) if load is None else load()
        if made.is_floating_point() and not bool(made.isfinite().all()):
            msg = f"{path}: the tensor contains NaN or infinity"
            raise ValueError(msg)
        return made

    def _count_bytes(self, size: int, path: str) -> None:
        self._bytes += size
        if self._bytes > self._limits.max_bytes:
            msg = f"{path}: the plan's tensors exceed max_bytes={self._limits.max_bytes:,}"
            raise ValueError(msg)

    def _count_selectors(self, count: int, path: str) -> None:
        self._selectors += count
        if self._selectors > self._limits.max_selectors:
            msg = f"{path}: the plan has more than max_selectors={self._limits.max_selectors:,}"
            raise ValueError(msg)

    def _selector(self, value: Any, path: str, depth: int = 0) -> Any:
        if value is None and not depth:
            return None
        if isinstance(value, str):
            return _text(value, path)
        if isinstance(value, Mapping) and "regex" in value:
            return self._regex(value, path)
        members, made = _members(value, path, depth)
        if made is None:
            msg = (
                f"{path}: expected a path, a glob, a regex or a list of these, got {_short(value)}"
            )
            raise ValueError(msg)
        self._count_selectors(len(members), path)
        listed = [
            self._selector(each, f"{path}[{place}]", depth + 1)
            for place, each in enumerate(members)
        ]
        return _made(made, listed, path)

    def _regex(self, value: Mapping[str, Any], path: str) -> re.Pattern[str]:
        fields = _fields(value, path, {"regex", "flags"}, {"regex"})
        if not self._limits.regex:
            msg = f"{path}: a regex may run forever: pass regex=True if you trust its author"
            raise ValueError(msg)
        pattern = _text(fields["regex"], f"{path}.regex", _LONGEST_REGEX)
        flags = fields.get("flags", [])
        fits = isinstance(flags, list) and len(flags) <= len(FLAGS)
        if not fits or not all(map(_is_flag, flags)):
            msg = (
                f"{path}.flags: expected a list of {', '.join(map(str, FLAGS))}, got "
                f"{_short(flags)}"
            )
            raise ValueError(msg)
        with _named(path):
            return re.compile(pattern, sum(FLAGS[each] for each in {*flags}))

    def _index(self, value: Any, path: str, depth: int = 0) -> Any:
        if value == "...":
            return ...
        if isinstance(value, Mapping) and "slice" in value:
            return _slice(value, path)
        members, made = _members(value, path, depth)
        if made is not None:
            self._indices += len(members)
            if self._indices > _MOST_INDICES:
                msg = f"{path}: the plan has more than {_MOST_INDICES:,} indices: use slices"
                raise ValueError(msg)
            index = _made(made, [self._index(each, path, depth + 1) for each in members], path)
            if made is list and _repeats(index):  # would make the tensor larger
                msg = f"{path}: a list of indices must not contain one twice"
                raise ValueError(msg)
            return index
        plain = _plain(value, path)
        if isinstance(plain, str | float):
            msg = f'{path}: expected ints, "...", slices or lists, got {_short(plain)}'
            raise ValueError(msg)  # noqa: TRY004 (a text has no types of Python's)
        return plain


_ENTRIES: Final = {
    "on": frozenset(inspect.signature(on).parameters),
    "keep": frozenset(("what", "label", *KeepOptions.__annotations__)),
    "gate": frozenset(inspect.signature(gate).parameters),
    "stop": frozenset(("when",)),
}
"""Names of the fields of an entry, by its type."""
_NEEDED: Final = {
    "on": {"what", "hook"},
    "keep": set(),
    "gate": {"name", "what", "reading"},
    "stop": {"when"},
}
_MAKERS: Final[Mapping[str, Callable[..., Entry]]] = {
    "on": on,
    "keep": keep,
    "gate": gate,
    "stop": stop,
}
_CALLS: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    "over": {"window": window, "ema": ema},
    "strength": {"ramp": ramp},
}
"""Options whose values are made by a function, with the functions by name."""
_COMBINED: Final = ("and", "or")
_COMPARISONS: Final[Mapping[str, Callable[..., Condition]]] = {
    "above": above,
    "below": below,
    "between": between,
}


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Names the place in the text in an error."""
    try:
        yield
    except Exception as error:  # torch's, for a device say, is of any class
        msg = f"{path}: {error}"
        raise ValueError(msg) from error


def _short(value: Any) -> str:
    plain = isinstance(value, str | int | float | None)
    text = repr(value) if plain else "an object" if isinstance(value, dict) else describe(value)
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004 (a line)


def _fields(value: Any, path: str, allowed: set[str], needed: set[str]) -> Mapping[str, Any]:
    """Validates the keys of an object."""
    if not isinstance(value, Mapping):
        msg = f"{path}: expected an object, got {_short(value)}"
        raise ValueError(msg)  # noqa: TRY004 (a text has no types of Python's)
    if isinstance(value, _Object) and value.twice is not None:
        msg = f"{path}: the key {_short(value.twice)} appears twice"
        raise ValueError(msg)
    if unknown := value.keys() - allowed:
        names = ", ".join(sorted(allowed))
        msg = f"{path}: unknown key {_short(min(unknown, key=str))}: the keys are {names}"
        raise ValueError(msg)
    if missing := needed - value.keys():
        msg = f"{path}: the key {min(missing)!r} is missing"
        raise ValueError(msg)
    return value


def _type(value: Any, path: str, types: Mapping[str, Any]) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and isinstance(kind, str) and kind in types:
        return kind
    msg = f"{path}: expected an object whose type is one of {', '.join(types)}, got {_short(kind)}"
    raise ValueError(msg)


def _text(value: Any, path: str, longest: int = _LONGEST) -> str:
    if not isinstance(value, str) or len(value) > longest:
        msg = f"{path}: expected a string of at most {longest} characters, got {_short(value)}"
        raise ValueError(msg)
    check_encodes(value, path)
    return value


def _plain(value: Any, path: str) -> Any:
    """Validates a string, a bool, a number or null."""
    if isinstance(value, str):
        return _text(value, path)
    if value is None or (isinstance(value, int) and -_INT64 <= value < _INT64):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    msg = f"{path}: expected a string, a bool or a finite 64-bit number, got {_short(value)}"
    raise ValueError(msg)


def _part(value: Any, path: str) -> Any:
    """Validates an `output_index`, whose path is a list."""
    listed = isinstance(value, list)
    steps = value if listed else [] if value is None else [value]
    if not len(steps) <= _LONGEST_PATH or (listed and not steps) or not all(map(_is_step, steps)):
        msg = f"{path}: expected an int, a string, a list of these or null, got {_short(value)}"
        raise ValueError(msg)
    for step in steps:
        _plain(step, path)
    return tuple(steps) if listed else value


def _is_step(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _members(value: Any, path: str, depth: int) -> tuple[list[Any], Any]:
    """Returns the members of a list, tuple or set, and its class; None for anything else."""
    made: Any = list
    if isinstance(value, Mapping) and len(value) == 1 and (kind := next(iter(value))) in _SEQUENCES:
        made = _SEQUENCES[kind]
        value = _fields(value, path, {kind}, {kind})[kind]
    if not isinstance(value, list):
        return [], None
    if depth >= _DEEPEST:
        msg = f"{path}: lists must not be nested more than {_DEEPEST} deep"
        raise ValueError(msg)
    return value, made


def _made(made: Any, members: list[Any], path: str) -> Any:
    """Makes a list, tuple or set of its members."""
    try:
        return made(members)
    except TypeError as error:
        msg = f"{path}: a set must contain only strings and numbers, not lists, slices or sets"
        raise ValueError(msg) from error


def _slice(value: Mapping[str, Any], path: str) -> slice:
    bounds = _fields(value, path, {"slice"}, {"slice"})["slice"]
    fits = isinstance(bounds, list) and len(bounds) == 3  # noqa: PLR2004 (start, stop, step)
    if not fits or not all(
        _plain(each, path) is None or (isinstance(each, int) and not isinstance(each, bool))
        for each in bounds
    ):
        msg = f'{path}: expected {{"slice": [start, stop, step]}} with ints or null'
        raise ValueError(msg)
    return slice(*bounds)


def _call(value: Mapping[str, Any], path: str, makers: Mapping[str, Callable[..., Any]]) -> Any:
    """Reads an object with one key, the name of the function that its value goes to."""
    kind = next(iter(_fields(value, path, {*makers}, set())), None)
    if kind is None or len(value) != 1:
        msg = f"{path}: expected an object with one key of {', '.join(makers)}"
        raise ValueError(msg)
    given = value[kind]
    arguments = _listed(given, path) if isinstance(given, list) else [given]
    plain = [_plain(each, path) for each in arguments]
    with _named(path):
        return makers[kind](*plain)


def _listed(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ARGUMENTS:
        msg = f"{path}: expected a list of at most {_MOST_ARGUMENTS} values, got {_short(value)}"
        raise ValueError(msg)
    return value


def _ids(value: list[Any], path: str) -> list[int]:
    if len(value) > _MOST_IDS or not all(type(each) is int for each in value):
        msg = f"{path}: expected a list of at most {_MOST_IDS} ints"
        raise ValueError(msg)
    return [_plain(each, path) for each in value]


def _read_option(name: str, value: Any, path: str) -> Any:
    if name == "at" and isinstance(value, Mapping):
        return _slice(value, path)
    if name in _CALLS and isinstance(value, Mapping):
        return _call(value, path, _CALLS[name])
    if name == "output_index":
        return _part(value, path)
    plain = _plain(value, path)
    if name != "dtype" or plain is None:
        return plain
    if plain not in _DTYPES:
        msg = f"{path}: expected the name of a dtype, such as float16, got {_short(plain)}"
        raise ValueError(msg)
    return _DTYPES[plain]


def _repeats(index: list[Any]) -> bool:
    """True if a list of indices, not a mask, has one twice."""
    rows, flat = [index], []
    for row in rows:
        rows += [each for each in row if isinstance(each, list)]
        flat += [each for each in row if isinstance(each, int)]
    return not all(isinstance(each, bool) for each in flat) and len({*flat}) < len(flat)


def _shape(value: Any, path: str) -> list[int]:
    fits = isinstance(value, list) and len(value) <= _MOST_DIMENSIONS
    sizes = value if fits else [-1]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes):
        msg = f"{path}: expected a list of at most {_MOST_DIMENSIONS} ints of at least 0"
        raise ValueError(msg)
    return sizes


def _decoded(text: Any, dtype: torch.dtype, shape: list[int], size: int) -> Tensor:
    if not isinstance(text, str):
        msg = f"base64 must be a string, got {_short(text)}"
        raise ValueError(msg)  # noqa: TRY004 (a text has no types of Python's)
    raw = base64.b64decode(text, validate=True)
    if len(raw) != size:
        msg = f"a tensor of shape {shape} and {dtype} needs {size:,} bytes, base64 has {len(raw):,}"
        raise ValueError(msg)
    if not size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _is_flag(value: Any) -> bool:
    return isinstance(value, str) and value in FLAGS
