"""Patching: classes of modules replaced by name while models are made.

Names and behaviour are those of `transformers.monkey_patching`.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from ferrohook.arguments import describe, expect_module
from ferrohook.errors import HookTypeError
from ferrohook.recording.declarations import DECLARATION, declared_by, declares
from ferrohook.suggestions import closest_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

__all__ = [
    "apply_patches",
    "clear_patch_mapping",
    "get_patch_mapping",
    "patch_output_recorders",
    "register_patch_mapping",
    "unregister_patch_mapping",
]

# Never held while code of the user's runs. A finaliser may come in between.
_LOCK = threading.RLock()
_MAPPING: dict[str, type[nn.Module]] = {}


def register_patch_mapping(mapping: Mapping[str, type[nn.Module]], overwrite: bool = False) -> None:  # noqa: FBT001, FBT002 (transformers' signature)
    """Registers replacements of classes, for `apply_patches` and `patch_output_recorders`.

    Args:
        mapping: from a class's name, or a regex that is searched for in names (`re.search`), to the
            subclass of `nn.Module` that replaces it. An exact name goes before every regex, and a
            regex before those registered after it.
        overwrite: replace what is registered under the same key.

    Raises:
        HookTypeError: a key that is no str, or a replacement that is no subclass of `nn.Module`.
        ValueError: a key that does not compile, or is registered. Nothing was registered then.
    """
    if not isinstance(mapping, Mapping):
        msg = f"the mapping is a dict from names to classes, got {describe(mapping)}"
        raise HookTypeError(msg)
    given = dict(mapping)
    for key, replacement in given.items():
        _check(key, replacement)
    with _LOCK:
        known = [key for key in given if key in _MAPPING]
        if not known or overwrite:
            _MAPPING.update(given)
            return
    msg = f"{known[0]!r} has a replacement: pass overwrite=True for another"
    raise ValueError(msg)


def _check(key: object, replacement: object) -> None:
    if not isinstance(key, str):
        msg = f"a key is the name of a class or a regex, got {describe(key)}"
        raise HookTypeError(msg)
    if not (isinstance(replacement, type) and issubclass(replacement, nn.Module)):
        msg = f"the replacement of {key!r} is a subclass of nn.Module, got {describe(replacement)}"
        raise HookTypeError(msg)
    try:
        re.compile(key)
    except re.error as error:
        msg = f"{key!r} is neither a class's name nor a regex: {error}"
        raise ValueError(msg) from error


def unregister_patch_mapping(keys: Iterable[str]) -> None:
    """Removes replacements, by the keys that they were registered under.

    Raises:
        ValueError: a key that is not registered. Nothing was removed then.
        HookTypeError: a single str.
    """
    if isinstance(keys, str):
        msg = f"unregister_patch_mapping takes a list of keys, got the str {keys!r}"
        raise HookTypeError(msg)
    keys = list(keys)
    with _LOCK:
        unknown = [key for key in keys if key not in _MAPPING]
        known = list(_MAPPING)
        if not unknown:
            for key in keys:
                _MAPPING.pop(key, None)  # it may be named twice
            return
    closest = ", ".join(map(repr, closest_to(str(unknown[0]), known) or known)) or "none"
    msg = f"{unknown[0]!r} has no replacement; the closest key registered is {closest}"
    raise ValueError(msg)


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """The replacements that are registered, by key."""
    with _LOCK:
        return dict(_MAPPING)


def clear_patch_mapping() -> None:
    """Removes all replacements."""
    with _LOCK:
        _MAPPING.clear()


def _replacement(name: str, mapping: Mapping[str, type[nn.Module]]) -> type[nn.Module] | None:
    if name in mapping:
        return mapping[name]
    fits = (new for key, new in mapping.items() if re.search(key, name))
    return next(fits, None)


class _Slot:
    """An attribute of a Python module, while replacements stand in it."""

    def __init__(self, module: ModuleType, name: str, original: type) -> None:
        self.module = module
        self.name = name
        self._original = original
        # By those that put them there: the last one still there is the one that stands.
        self._stack: list[tuple[object, type]] = []

    def put(self, owner: object, replacement: type) -> None:
        self._stack.append((owner, replacement))
        setattr(self.module, self.name, replacement)

    def take(self, owner: object) -> bool:
        """Takes out what `owner` put in, and gives whether nothing is left."""
        standing = vars(self.module).get(self.name)
        ours = any(standing is replacement for _, replacement in self._stack)
        self._stack = [entry for entry in self._stack if entry[0] is not owner]
        if ours:  # and nobody's who set the attribute since
            setattr(self.module, self.name, self._stack[-1][1] if self._stack else self._original)
        return not self._stack


_SLOTS: dict[tuple[int, str], _Slot] = {}
_SLOTS_LOCK = threading.RLock()


@contextmanager
def apply_patches(*packages: str) -> Iterator[None]:
    """Replaces classes by those registered, for the models that are made meanwhile.

    Wherever a loaded Python module of the packages has a subclass of `nn.Module` under a name that
    a key matches. Leaving restores them, after an exception too; of blocks that overlap, each takes
    out its own replacements alone. A Python module's attributes are the whole process's: other
    threads make models of the replacements meanwhile.

    Args:
        *packages: the names of packages; transformers where none is given.
    """
    mapping = get_patch_mapping()
    owner = object()
    put: list[tuple[int, str]] = []
    try:
        for module in _loaded(packages or ("transformers",)):
            for name in dir(module):
                replacement = _replacement(name, mapping)
                if replacement is None:
                    continue
                found: Any = None
                # Where it is loaded lazily, it may not load.
                with suppress(AttributeError, ImportError, TypeError):
                    found = getattr(module, name)
                if isinstance(found, type) and issubclass(found, nn.Module):
                    key = id(module), name
                    with _SLOTS_LOCK:
                        # Read under the lock: before it another thread's stood there, perhaps.
                        original = vars(module).get(name, found)
                        slot = _SLOTS.setdefault(key, _Slot(module, name, original))
                        put.append(key)  # first: it is taken out if this raises
                        slot.put(owner, replacement)
        yield
    finally:
        for key in put:
            with _SLOTS_LOCK:
                if _SLOTS[key].take(owner):
                    del _SLOTS[key]


def _loaded(packages: tuple[str, ...]) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if any(name == package or name.startswith(f"{package}.") for package in packages)
        and hasattr(module, "__dict__")
    ]


def patch_output_recorders(model: nn.Module) -> None:
    """Has a model record the classes that replace those it declares.

    For a model that was made in `apply_patches`: what its class declares names the classes of
    before. The model and its sub-models get declarations of their own; other instances of their
    classes keep theirs.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """
    expect_module(model, "patch_output_recorders takes")
    mapping = get_patch_mapping()
    for module in model.modules() if mapping else ():
        if not declares(module):
            continue
        declared = declared_by(module)
        patched = {key: _patched(given, mapping) for key, given in declared.items()}
        if patched != declared:
            vars(module)[DECLARATION] = patched


def _patched(given: Any, mapping: Mapping[str, type[nn.Module]]) -> Any:
    """A recorder, or a list of them, with the replacement for its class."""
    if isinstance(given, list):
        return [_patched(each, mapping) for each in given]
    if isinstance(given, str | type):
        return _replacement(given if isinstance(given, str) else given.__name__, mapping) or given
    target = getattr(given, "target_class", None)
    name = target.__name__ if target is not None else getattr(given, "class_name", None)
    replacement = _replacement(name, mapping) if name else None
    if replacement is None or not dataclasses.is_dataclass(given) or isinstance(given, type):
        return given
    return dataclasses.replace(given, target_class=replacement)
