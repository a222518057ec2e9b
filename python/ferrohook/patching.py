"""Patching: replaces module classes by name while models are constructed.

Names and behaviour follow `transformers.monkey_patching`.
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

# Never held while user code runs; recursive, as a finaliser may run under it.
_LOCK = threading.RLock()
_MAPPING: dict[str, type[nn.Module]] = {}


def register_patch_mapping(mapping: Mapping[str, type[nn.Module]], overwrite: bool = False) -> None:  # noqa: FBT001, FBT002 (transformers' signature)
    """Registers replacement classes, for `apply_patches` and `patch_output_recorders`.

    Args:
        mapping: from a class name, or a regex that `re.search` looks for in names, to the subclass
            of `nn.Module` that replaces it. An exact name precedes every regex, and a regex those
            registered after it.
        overwrite: replace the classes of registered keys.

    Raises:
        HookTypeError: a key is no str, or a replacement is no subclass of `nn.Module`.
        ValueError: a key does not compile, or is registered; nothing was registered.
    """
    if not isinstance(mapping, Mapping):
        msg = f"the mapping is a dict from names to classes, got {describe(mapping)}"
        raise HookTypeError(msg)
    added = dict(mapping)
    for key, replacement in added.items():
        _check(key, replacement)
    with _LOCK:
        registered = [key for key in added if key in _MAPPING]
        if not registered or overwrite:
            _MAPPING.update(added)
            return
    msg = f"{registered[0]!r} has a replacement: pass overwrite=True for another"
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
    """Removes replacements by key.

    Raises:
        ValueError: a key is not registered; nothing was removed.
        HookTypeError: `keys` is a str.
    """
    if isinstance(keys, str):
        msg = f"unregister_patch_mapping takes a list of keys, got the str {keys!r}"
        raise HookTypeError(msg)
    keys = list(keys)
    with _LOCK:
        unknown = [key for key in keys if key not in _MAPPING]
        registered = list(_MAPPING)
        if not unknown:
            for key in keys:
                _MAPPING.pop(key, None)  # `keys` may repeat it
            return
    closest = ", ".join(map(repr, closest_to(str(unknown[0]), registered) or registered)) or "none"
    msg = f"{unknown[0]!r} has no replacement; the closest key registered is {closest}"
    raise ValueError(msg)


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """Returns the registered replacements by key."""
    with _LOCK:
        return dict(_MAPPING)


def clear_patch_mapping() -> None:
    """Removes all replacements."""
    with _LOCK:
        _MAPPING.clear()


def _replacement(name: str, mapping: Mapping[str, type[nn.Module]]) -> type[nn.Module] | None:
    if name in mapping:
        return mapping[name]
    matches = (new for key, new in mapping.items() if re.search(key, name))
    return next(matches, None)


class _Slot:
    """A patched attribute of a Python module."""

    def __init__(self, module: ModuleType, name: str, original: type) -> None:
        self.module = module
        self.name = name
        self._original = original
        # Replacements by owner; the last is the attribute's value.
        self._stack: list[tuple[object, type]] = []

    def put(self, owner: object, replacement: type) -> None:
        self._stack.append((owner, replacement))
        setattr(self.module, self.name, replacement)

    def take(self, owner: object) -> bool:
        """Removes the replacements of `owner`; returns True if none is left."""
        current = vars(self.module).get(self.name)
        ours = any(current is replacement for _, replacement in self._stack)
        self._stack = [entry for entry in self._stack if entry[0] is not owner]
        if ours:  # else other code has set the attribute meanwhile
            setattr(self.module, self.name, self._stack[-1][1] if self._stack else self._original)
        return not self._stack


_SLOTS: dict[tuple[int, str], _Slot] = {}
_SLOTS_LOCK = threading.RLock()


@contextmanager
def apply_patches(*packages: str) -> Iterator[None]:
    """Replaces registered classes in packages, for models constructed meanwhile.

    Replaces each attribute of the packages' loaded Python modules that is a subclass of
    `nn.Module` and whose name a key matches. Leaving restores them, after an exception too; of
    overlapping blocks, each removes its own replacements alone. Module attributes are global:
    models that other threads construct meanwhile use the replacements too.

    Args:
        *packages: names of packages; transformers by default.
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
                # A lazy attribute may fail to load.
                with suppress(AttributeError, ImportError, TypeError):
                    found = getattr(module, name)
                if isinstance(found, type) and issubclass(found, nn.Module):
                    key = id(module), name
                    with _SLOTS_LOCK:
                        # Read under the lock: `found` may be another thread's replacement.
                        original = vars(module).get(name, found)
                        slot = _SLOTS.setdefault(key, _Slot(module, name, original))
                        put.append(key)  # first: `finally` removes it if `slot.put` raises
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
    """Updates a model's declared output recorders to the replacement classes.

    For a model constructed in `apply_patches`, whose class still declares the original classes. The
    model and its sub-models get declarations of their own; other instances keep theirs.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """
    expect_module(model, "patch_output_recorders takes")
    mapping = get_patch_mapping()
    for module in model.modules() if mapping else ():
        if not declares(module):
            continue
        declared = declared_by(module)
        patched = {key: _patched(recorder, mapping) for key, recorder in declared.items()}
        if patched != declared:
            vars(module)[DECLARATION] = patched


def _patched(recorder: Any, mapping: Mapping[str, type[nn.Module]]) -> Any:
    """Substitutes the replacement class in a recorder or a list of them."""
    if isinstance(recorder, list):
        return [_patched(each, mapping) for each in recorder]
    if isinstance(recorder, str | type):
        return (
            _replacement(recorder if isinstance(recorder, str) else recorder.__name__, mapping)
            or recorder
        )
    target = getattr(recorder, "target_class", None)
    name = target.__name__ if target is not None else getattr(recorder, "class_name", None)
    replacement = _replacement(name, mapping) if name else None
    if replacement is None or not dataclasses.is_dataclass(recorder) or isinstance(recorder, type):
        return recorder
    return dataclasses.replace(recorder, target_class=replacement)
