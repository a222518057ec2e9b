"""`PointCache`: the activations that `run_with_cache` collects, and the hooks that fill it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from ferrohook._core import Collector, record_all
from ferrohook.attach.priorities import BEHIND_ALL
from ferrohook.captures.cache import ActivationCache
from ferrohook.captures.versions import check_unchanged, versions_of
from ferrohook.errors import StaleActivationError
from ferrohook.util.tensors import as_leaf, map_tensors, share_memory

if TYPE_CHECKING:
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

    def __init__(self, value: Any, *, checked: bool = False) -> None:
        self._value = map_tensors(_with_version_tag, value) if checked else value
        self._versions = versions_of(self._value) if checked else None

    def read(self, name: str) -> Any:
        if self._versions is not None:
            check_unchanged(self._value, self._versions, name)
        return self._value

    def peek(self) -> Any:
        return self._value

    def without_collector(self) -> _CachedValue:
        return self


def _with_version_tag(tensor: Tensor) -> Tensor:  # inference tensors have none
    return tensor.clone() if tensor.is_inference() else tensor


class _RecordedValue:
    """The value of one point in a native collector."""

    __slots__ = ("_checked", "_collector", "_index")

    def __init__(self, collector: Collector, index: int, checked: bool) -> None:
        self._collector = collector
        self._index = index
        self._checked = checked

    def read(self, _name: str) -> Any:
        return self._collector.read(self._index)[-1]

    def peek(self) -> Any:
        return self._collector.read(self._index, stale=True)[-1]

    def without_collector(self) -> _Entry:
        """A copy free of the collector, which keeps the other points' tensors alive."""
        try:
            return _CachedValue(self.read(""), checked=self._checked)
        except StaleActivationError:
            return self


_Entry: TypeAlias = "_CachedValue | _RecordedValue"


class _Entries(MutableMapping[str, Any]):
    def __init__(self, recorded: Callable[[], dict[str, _Entry]]) -> None:
        self._recorded = recorded

    @cached_property
    def entries(self) -> dict[str, _Entry]:
        recorded, self._recorded = self._recorded, dict  # releases the recorder
        return recorded()

    def __getstate__(self) -> dict[str, Any]:
        # Without the collectors; nothing writes to the tensors of a copy but its reader.
        entries = {name: _CachedValue(map_tensors(as_leaf, self[name])) for name in self}
        return {"_recorded": dict, "entries": entries}

    def __getitem__(self, name: str) -> Any:
        return self.entries[name].read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.entries[name] = _CachedValue(value)

    def __delitem__(self, name: str) -> None:
        del self.entries[name]
        # A deleted activation is freed at once.
        self.entries = {name: entry.without_collector() for name, entry in self.entries.items()}

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

    def __new__(cls, recorded: Callable[[], dict[str, _Entry]] = dict) -> Self:  # noqa: D102 (see the class)
        # Copies pass the entries themselves.
        entries = recorded if isinstance(recorded, _Entries) else _Entries(recorded)
        return super().__new__(cls, entries)

    def __init__(self, recorded: Callable[[], dict[str, _Entry]] = dict) -> None:
        """Starts with recorded activations, read at the first look-up."""
        del recorded  # the base has them
        super().__init__(self._activations)

    def __setitem__(self, name: str, value: Any) -> None:
        self._activations[name] = value

    def __delitem__(self, name: str) -> None:
        del self._activations[name]

    def clear(self) -> None:
        """Removes all activations."""
        self._activations.entries.clear()

    def _peek(self, name: str) -> Any:
        return self._activations.entries[name].peek()

    def put(self, name: str, entry: _Entry) -> None:
        """Stores an entry, whose own `read` gives its value."""
        self._activations.entries[name] = entry


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
        return result.clone() if own and share_memory(result, tensor) else result


class SavingHook:
    """A hook that stores its tensor in a cache."""

    def __init__(
        self, cache: MutableMapping[str, Any], key: str, point: HookPoint, options: CacheOptions
    ) -> None:
        self._cache = cache
        self._key = key
        self._point = point
        self._options = options

    def __call__(self, tensor: Any, hook: Any) -> None:
        """Stores the tensor, or the tensors of a structure; None means no gradient."""
        if tensor is None:
            return
        name, pos_dim = hook.name or self._key, self._point.pos_dim

        def cut(each: Tensor) -> Tensor:
            return self._options.cut(each.detach(), name, pos_dim)

        value = map_tensors(cut, tensor)
        if isinstance(self._cache, PointCache):
            entry = _CachedValue(value, checked=self._options.copy == "checked")
            self._cache.put(self._key, entry)
        else:
            self._cache[self._key] = value


class CacheRecorder:
    """Native recorders on hook points, for the calls of one scope."""

    def __init__(
        self, points: dict[str, HookPoint], options: CacheOptions, scope: Frame, *, grads: bool
    ) -> None:
        self._options = options
        self._grads = grads
        self._names = list(points)
        # One collector for all points, or one each if a conversion or slice differs by point.
        self._shared: Collector | None = None
        self._collectors: dict[str, Collector] = {}
        # The points of `_collectors` in the order of their first calls.
        self._fired: dict[str, None] = {}
        if options.sliced or any(map(_conversion_of, points.values())):
            for name, point in points.items():
                convert = self._convert(name, point)
                self._collectors[name] = self._record({name: point}, convert, scope)
        else:
            self._shared = self._record(points, self._shared_convert(), scope)

    def _record(
        self,
        points: dict[str, HookPoint],
        convert: Callable[[Tensor], Tensor] | None,
        scope: Frame,
    ) -> Collector:
        collector = Collector(
            list(points),
            detach=True,
            copy=self._options.copy,
            keep=1,
            convert=convert,
            grads=self._grads,
            max_bytes=None,
            stop=None,
        )
        record_all(collector, list(points.values()), BEHIND_ALL, scope)
        return collector

    def _shared_convert(self) -> Callable[[Tensor], Tensor] | None:
        options = self._options
        return None if options.unchanged else lambda tensor: options.cut(tensor, "", None)

    def _convert(self, name: str, point: HookPoint) -> Callable[[Tensor], Tensor]:
        conversion, pos_dim = point.hook_conversion, point.pos_dim

        def convert(tensor: Tensor) -> Tensor:
            self._fired.setdefault(name)
            converted = tensor if conversion is None else conversion.convert(tensor)
            return self._options.cut(converted, name, pos_dim)

        return convert

    def _recorded(self) -> dict[str, tuple[Collector, int]]:
        """Collector and index of each point that fired, in the order of their first calls."""
        shared = self._shared
        if shared is None:
            return {name: (self._collectors[name], 0) for name in self._fired}
        return {self._names[index]: (shared, index) for index in shared.ran()}

    def cache(self) -> PointCache:
        """Returns a cache that reads the recorded values at its first look-up."""
        return PointCache(self._entries)

    def _entries(self) -> dict[str, _Entry]:
        recorded = self._recorded()
        checked = self._options.copy == "checked"
        entries: dict[str, _Entry] = {
            name: _RecordedValue(collector, index, checked)
            for name, (collector, index) in recorded.items()
        }
        # A backward pass reaches the points in reverse.
        for name in reversed(list(recorded)) if self._grads else ():
            collector, index = recorded[name]
            # As in TransformerLens, whose hooks store the gradient of each backward pass anew.
            gradients = [each[-1] if each else None for each in collector.gradients(index)[-1]]
            if any(gradient is not None for gradient in gradients):
                entries[f"{name}_grad"] = _CachedValue(
                    gradients[0] if len(gradients) == 1 else gradients
                )
        return entries


_conversion_of = attrgetter("_hook_conversion")
