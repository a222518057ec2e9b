"""Patching: replaces classes of modules by name while models are made.

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

from ferrohook.compat.transformers.declarations import DECLARATION, declared_by, declares
from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.arguments import describe, expect, expect_module
from ferrohook.util.suggestions import closest_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

# Not held while user code runs. Reentrant, as a finaliser may run while it is held.
_LOCK = threading.RLock()
_MAPPING: dict[str, type[nn.Module]] = {}


def register_patch_mapping(mapping: Mapping[str, type[nn.Module]], overwrite: bool = False) -> None:  # noqa: FBT001, FBT002 (transformers' signature)
    """Registers replacement classes, for `apply_patches` and `patch_output_recorders`.

    Args:
        mapping: dict from a class's name, or a regex for names (`re.search`), to the subclass of
            `nn.Module` that replaces it. An exact name goes before every regex, an earlier regex
            before a later one.
        overwrite: replace an entry of the same key.

    Raises:
        HookTypeError: a key is not a str, or a replacement is not a subclass of `nn.Module`.
        ValueError: a key does not compile, or is registered already. Nothing is registered then.
    """
    expect(mapping, Mapping, "the mapping must be a dict from names to classes")
    entries = dict(mapping)
    for key, replacement in entries.items():
        _check_entry(key, replacement)
    with _LOCK:
        registered = [key for key in entries if key in _MAPPING]
        if not registered or overwrite:
            _MAPPING.update(entries)
            return
    msg = f"{registered[0]!r} already has a replacement: pass overwrite=True to replace it"
    raise ValueError(msg)


def _check_entry(key: str, replacement: object) -> None:
    expect(key, str, "a key must be the name of a class or a regex")
    if not (isinstance(replacement, type) and issubclass(replacement, nn.Module)):
        msg = (
            f"the replacement of {key!r} must be a subclass of nn.Module, got "
            f"{describe(replacement)}"
        )
        raise HookTypeError(msg)
    try:
        re.compile(key)
    except re.error as error:
        msg = f"{key!r} is neither a class's name nor a regex: {error}"
        raise ValueError(msg) from error


def unregister_patch_mapping(keys: Iterable[str]) -> None:
    """Removes replacements by key.

    Raises:
        ValueError: a key is not registered. Nothing is removed then.
        HookTypeError: `keys` is a single str.
    """
    if isinstance(keys, str):
        msg = f"unregister_patch_mapping needs a list of keys, got the str {keys!r}"
        raise HookTypeError(msg)
    keys = list(keys)
    with _LOCK:
        unknown = [key for key in keys if key not in _MAPPING]
        registered = list(_MAPPING)
        if not unknown:
            for key in keys:
                _MAPPING.pop(key, None)  # `keys` may have it twice
            return
    closest = ", ".join(map(repr, closest_to(str(unknown[0]), registered) or registered)) or "none"
    msg = f"{unknown[0]!r} has no replacement; the closest registered key is {closest}"
    raise ValueError(msg)


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """Returns the registered replacements by key."""
    with _LOCK:
        return dict(_MAPPING)


def clear_patch_mapping() -> None:
    """Removes all replacements."""
    with _LOCK:
        _MAPPING.clear()


def _find_replacement(name: str, mapping: Mapping[str, type[nn.Module]]) -> type[nn.Module] | None:
    if name in mapping:
        return mapping[name]
    matches = (new for key, new in mapping.items() if re.search(key, name))
    return next(matches, None)


class _Slot:
    """An attribute of a Python module that has replacements."""

    def __init__(self, module: ModuleType, name: str, original: type) -> None:
        self.module = module
        self.name = name
        self._original = original
        # Replacements with their owners, the current one last.
        self._stack: list[tuple[object, type]] = []

    def put(self, owner: object, replacement: type) -> None:
        self._stack.append((owner, replacement))
        setattr(self.module, self.name, replacement)

    def take(self, owner: object) -> bool:
        """Removes the replacements of `owner`; returns True if none is left."""
        current = vars(self.module).get(self.name)
        ours = any(current is replacement for _, replacement in self._stack)
        self._stack = [entry for entry in self._stack if entry[0] is not owner]
        if ours:  # else other code has set the attribute since
            setattr(self.module, self.name, self._stack[-1][1] if self._stack else self._original)
        return not self._stack


_SLOTS: dict[tuple[int, str], _Slot] = {}
_SLOTS_LOCK = threading.RLock()


@contextmanager
def apply_patches(*packages: str) -> Iterator[None]:
    """Replaces classes by the registered ones, for models that are made inside the block.

    Replaces each attribute of the packages' loaded Python modules that is a subclass of `nn.Module`
    and whose name a key matches. Leaving restores the classes, after an exception too; each of
    overlapping blocks removes only its own replacements. The replacement is global to the process:
    other threads make models of the replacements meanwhile.

    Args:
        *packages: names of packages; default: transformers.
    """
    mapping = get_patch_mapping()
    owner = object()
    put: list[tuple[int, str]] = []
    try:
        for module in _loaded(packages or ("transformers",)):
            for name in dir(module):
                replacement = _find_replacement(name, mapping)
                if replacement is None:
                    continue
                value: Any = None
                # A lazy attribute may fail to load.
                with suppress(AttributeError, ImportError, TypeError):
                    value = getattr(module, name)
                if isinstance(value, type) and issubclass(value, nn.Module):
                    key = id(module), name
                    with _SLOTS_LOCK:
                        # Read again: without the lock it may be another thread's replacement.
                        original = vars(module).get(name, value)
                        slot = _SLOTS.setdefault(key, _Slot(module, name, original))
                        put.append(key)  # before `put`, so `finally` undoes one that raises
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
    """Makes a model record the replacements of the classes that it declares.

    For a model that was made in `apply_patches`: its class declares the original classes. The
    model and its sub-models get their own declarations; other instances are not changed.

    Raises:
        HookTypeError: `model` is not an `nn.Module`.
        HookError: transformers' `capture_outputs` decorates a forward whose recorders are to
            change. It reads the class's declaration, which transformers' function changes.
    """
    expect_module(model, "patch_output_recorders needs")
    mapping = get_patch_mapping()
    changes = []
    for module in model.modules() if mapping else ():
        if not declares(module):
            continue
        declared = declared_by(module)
        patched = {key: _patched(recorder, mapping) for key, recorder in declared.items()}
        if patched != declared:
            if _decorated_by_transformers(module):
                msg = (
                    "transformers' capture_outputs decorates the forward of "
                    f"{type(module).__name__} and ignores what an instance declares: use "
                    "transformers.monkey_patching.patch_output_recorders"
                )
                raise HookError(msg)
            changes.append((module, patched))
    for module, patched in changes:
        vars(module)[DECLARATION] = patched


def _decorated_by_transformers(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    while forward is not None:
        names = getattr(forward, "__globals__", {})
        if names.get("__name__") == "transformers.utils.output_capturing":
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _patched(recorder: Any, mapping: Mapping[str, type[nn.Module]]) -> Any:
    """Returns a recorder, or a list of them, with its class replaced."""
    if isinstance(recorder, list):
        return [_patched(each, mapping) for each in recorder]
    if isinstance(recorder, str | type):
        own = recorder if isinstance(recorder, str) else recorder.__name__
        return _find_replacement(own, mapping) or recorder
    target = getattr(recorder, "target_class", None)
    name = target.__name__ if target is not None else getattr(recorder, "class_name", None)
    replacement = _find_replacement(name, mapping) if name else None
    if replacement is None or not dataclasses.is_dataclass(recorder) or isinstance(recorder, type):
        return recorder
    return dataclasses.replace(recorder, target_class=replacement)
