"""`PointCache`: the activations that `run_with_cache` collects, and the hooks that fill it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from ferrohook._core import Collector, record_all
from ferrohook.attach.priorities import BEHIND_ALL
from ferrohook.captures import tensor_files
from ferrohook.captures.cache import ActivationCache
from ferrohook.captures.versions import check_unchanged, versions_of
from ferrohook.errors import StaleActivationError
from ferrohook.util.tensors import as_leaf, map_tensors, normal, share_memory

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ferrohook._core import Frame
    from ferrohook.compat.transformer_lens.hook_point import HookPoint
    from ferrohook.compat.transformer_lens.slices import Slice

Copy: TypeAlias = Literal["checked", "clone", "ref"]

# Points whose tensors have a dimension of heads: position is their last dimension but two.
_BY_HEAD = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_result")


class _CachedValue:
    """A cached value; with `checked`, reading it compares its tensors' version tags."""

    __slots__ = ("_value", "_versions")

    def __init__(self, value: Any, *, checked: bool = False, stale: bool = False) -> None:
        self._value = map_tensors(normal, value) if checked else value
        # No versions: a value that was changed before it was stored.
        self._versions = [] if stale else versions_of(self._value) if checked else None

    def read(self, name: str) -> Any:
        if self._versions is not None:
            check_unchanged(self._value, self._versions, name)
        return self._value

    def unchecked(self) -> Any:
        return self._value


class _Entries(MutableMapping[str, Any]):
    def __init__(self, recorded: Callable[[], dict[str, _CachedValue]]) -> None:
        self._recorded = recorded

    @cached_property
    def entries(self) -> dict[str, _CachedValue]:
        recorded, self._recorded = self._recorded, dict  # releases the recorder
        return recorded()

    def __getstate__(self) -> dict[str, Any]:
        # Nothing writes to the tensors of a copy but its reader.
        entries = {name: _CachedValue(map_tensors(as_leaf, self[name])) for name in self}
        return {"_recorded": dict, "entries": entries}

    def __getitem__(self, name: str) -> Any:
        return self.entries[name].read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.entries[name] = value if isinstance(value, _CachedValue) else _CachedValue(value)

    def __delitem__(self, name: str) -> None:
        del self.entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # without reading

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.entries))

    def __len__(self) -> int:
        return len(self.entries)


class PointCache(ActivationCache, MutableMapping[str, Any]):
    """The activations of hook points by name, in the order in which the points first fired.

    The gradient of `name` is under `name_grad`. A mutable mapping: `dict(cache)` makes a dict.
    """

    if TYPE_CHECKING:

        @property
        def _activations(self) -> _Entries: ...

    def __new__(cls, recorded: Callable[[], dict[str, _CachedValue]] = dict) -> Self:  # noqa: D102 (see the class)
        # Copies pass the entries themselves.
        entries = recorded if isinstance(recorded, _Entries) else _Entries(recorded)
        return super().__new__(cls, entries)

    def __init__(self, recorded: Callable[[], dict[str, _CachedValue]] = dict) -> None:
        """Starts with recorded activations, read at the first look-up."""
        del recorded  # the base has them
        super().__init__(self._activations)

    def __setitem__(self, name: str, value: Any) -> None:
        self._activations[name] = value

    def __delitem__(self, name: str) -> None:
        del self._activations[name]

    def __copy__(self) -> Self:
        entries = dict(self._activations.entries)
        return type(self)(lambda: entries)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `save` wrote, onto the CPU.

        Needs the package safetensors.
        """
        cache = cls()
        cache.update(tensor_files.load(path)["activations"])
        return cache

    def clear(self) -> None:
        """Removes all activations."""
        self._activations.entries.clear()

    def _unchecked(self, name: str) -> Any:
        return self._activations.entries[name].unchecked()


class CacheOptions(NamedTuple):
    """Options of a cache: device, batch dimension, positions, copies."""

    device: torch.device | None
    remove_batch_dim: bool
    pos_slice: Slice
    copy: Copy

    @property
    def sliced(self) -> bool:
        """True if a part of each tensor is cached; the dimension depends on the point."""
        return self.pos_slice.mode != "identity"

    @property
    def unchanged(self) -> bool:
        """True if tensors are cached without being moved, sliced or squeezed."""
        return self.device is None and not self.remove_batch_dim and not self.sliced

    def cut(self, tensor: Tensor, name: str, pos_dim: int | None) -> Tensor:
        """Returns the part of a tensor that is cached.

        Args:
            tensor: detached, in the layout of the hooks.
            name: the point's name; implies the position's dimension if `pos_dim` is None.
            pos_dim: the position's dimension, batch included, if the point declares one.
        """
        result = tensor
        if self.sliced and pos_dim is not None and -result.ndim <= pos_dim < result.ndim:
            result = self.pos_slice.apply(result, pos_dim)
        if self.remove_batch_dim and result.ndim and result.shape[0] == 1:
            result = result.squeeze(0)
        if self.sliced and pos_dim is None:
            dim = -3 if name.endswith(_BY_HEAD) else -2
            if result.ndim >= -dim:
                result = self.pos_slice.apply(result, dim)
        if self.device is not None:
            result = result.to(self.device)
        # A slice must not keep the whole tensor alive.
        own = self.copy == "clone" or self.sliced
        return result.clone() if own and share_memory(result, tensor) is not False else result


class SavingHook:
    """A hook that stores its tensor in a cache.

    Attributes:
        priority: its priority in `hooks`.
        open: False ends it, for the graphs that it is in.
    """

    def __init__(
        self,
        cache: MutableMapping[str, Any],
        key: str,
        point: HookPoint,
        options: CacheOptions,
        priority: int,
    ) -> None:
        self.priority = priority
        self.open = True
        self._cache = cache
        self._key = key
        self._point = point
        self._options = options

    def __call__(self, tensor: Any, hook: Any) -> None:
        """Stores the tensor, or the tensors of a structure; None means no gradient."""
        if tensor is None or not self.open:
            return
        name, pos_dim = hook.name or self._key, self._point.pos_dim

        def cut(each: Tensor) -> Tensor:
            return self._options.cut(each.detach(), name, pos_dim)

        value = map_tensors(cut, tensor)
        if isinstance(self._cache, PointCache) and self._options.copy == "checked":
            value = _CachedValue(value, checked=True)
        self._cache[self._key] = value


def recorded_cache(
    points: dict[str, HookPoint], options: CacheOptions, scope: Frame, *, grads: bool
) -> PointCache:
    """Records hook points natively, for the calls of a scope, whose values the cache then has."""
    names, checked = list(points), options.copy == "checked"
    collector = Collector(
        names,
        detach=True,
        copy=options.copy,
        keep=1,
        convert=None if options.unchanged else lambda tensor: options.cut(tensor, "", None),
        grads=grads,
        max_bytes=None,
        stop=None,
    )
    record_all(collector, list(points.values()), BEHIND_ALL, scope)

    def entry(index: int) -> _CachedValue:
        try:
            return _CachedValue(collector.read(index)[-1], checked=checked)
        except StaleActivationError:
            return _CachedValue(collector.read(index, stale=True)[-1], stale=True)

    def entries() -> dict[str, _CachedValue]:
        ran = collector.ran()
        found = {names[index]: entry(index) for index in ran}
        # A backward pass reaches the points in reverse.
        for index in reversed(ran) if grads else ():
            # As in TransformerLens, whose hooks store the gradient of each backward pass anew.
            last = [
                each[-1] if each else None for each in collector.gradients(index, stale=True)[-1]
            ]
            if any(gradient is not None for gradient in last):
                value = last[0] if len(last) == 1 else last
                found[f"{names[index]}_grad"] = _CachedValue(value)
        return found

    return PointCache(entries)
