"""What `run_with_cache` keeps, and how."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ferrohook._core import Collector, record_all
from ferrohook.activations import ActivationCache
from ferrohook.errors import StaleActivationError
from ferrohook.priorities import BEHIND_ALL
from ferrohook.tensors import map_tensors, share_memory
from ferrohook.versions import check_unchanged, versions_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ferrohook._core import ScopeBase
    from ferrohook.points.hook_point import HookPoint
    from ferrohook.points.slices import Slice

Copy: TypeAlias = Literal["checked", "clone", "ref"]

# Where the heads are apart, the position is the last dimension but two.
_BY_HEAD = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_result")


class _Kept:
    """A value, and the versions of its tensors where reading it checks them."""

    __slots__ = ("_value", "_versions")

    def __init__(self, value: Any, *, checked: bool = False) -> None:
        self._value = map_tensors(_counting, value) if checked else value
        self._versions = versions_of(self._value) if checked else None

    def read(self, name: str) -> Any:
        if self._versions is not None:
            check_unchanged(self._value, self._versions, name)
        return self._value

    def peek(self) -> Any:
        return self._value

    def apart(self) -> _Kept:
        return self


def _counting(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


class _Recorded:
    """What the native recorder kept for one point."""

    __slots__ = ("_checked", "_collector", "_place")

    def __init__(self, collector: Collector, place: int, checked: bool) -> None:
        self._collector = collector
        self._place = place
        self._checked = checked

    def read(self, _name: str) -> Any:
        return self._collector.values(self._place)[-1]

    def peek(self) -> Any:
        return self._collector.values(self._place, stale=True)[-1]

    def apart(self) -> _Kept | _Recorded:
        """The same without the collector, which holds those of the other points too."""
        try:
            return _Kept(self.read(""), checked=self._checked)
        except StaleActivationError:
            return self


class _Entries(MutableMapping[str, Any]):
    def __init__(self, recorded: Callable[[], dict[str, _Kept | _Recorded]]) -> None:
        self._recorded = recorded

    @cached_property
    def kept(self) -> dict[str, _Kept | _Recorded]:
        # When they are first asked for. What recorded them is let go then.
        recorded, self._recorded = self._recorded, dict
        return recorded()

    def __getitem__(self, name: str) -> Any:
        return self.kept[name].read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.kept[name] = _Kept(value)

    def __delitem__(self, name: str) -> None:
        del self.kept[name]
        # What is let go is to be freed.
        self.kept = {name: kept.apart() for name, kept in self.kept.items()}

    def __contains__(self, name: object) -> bool:
        return name in self.kept  # without reading

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.kept))

    def __len__(self) -> int:
        return len(self.kept)


class PointCache(ActivationCache, MutableMapping[str, Any]):
    """The activations that passed hook points, by name, in the order in which those first fired.

    A gradient is under the name with `_grad` behind it. It can be changed as a dict can;
    `dict(cache)` is one.
    """

    _activations: _Entries

    def __init__(self, recorded: Callable[[], dict[str, _Kept | _Recorded]] = dict) -> None:
        """Begins with what was recorded."""
        super().__init__(_Entries(recorded))

    def __setitem__(self, name: str, value: Any) -> None:
        self._activations[name] = value

    def __delitem__(self, name: str) -> None:
        del self._activations[name]

    def clear(self) -> None:
        """Lets everything go."""
        self._activations.kept.clear()

    def _peek(self, name: str) -> Any:
        return self._activations.kept[name].peek()

    def keep(self, name: str, kept: _Kept | _Recorded) -> None:
        """Puts what is read by itself under a name."""
        self._activations.kept[name] = kept


class Keeping(NamedTuple):
    """How activations are to be kept."""

    device: torch.device | None
    remove_batch_dim: bool
    pos_slice: Slice
    copy: Copy

    @property
    def sliced(self) -> bool:
        """Whether only a part is kept, which depends on the point."""
        return self.pos_slice.mode != "identity"

    @property
    def as_it_is(self) -> bool:
        """Whether a tensor is kept without becoming another, but for a copy."""
        return self.device is None and not self.remove_batch_dim and not self.sliced

    def cut(self, tensor: Tensor, name: str, pos_dim: int | None) -> Tensor:
        """What is kept of a tensor.

        Args:
            tensor: detached, in the layout of the hooks.
            name: of the point; it tells the dimension of the position.
            pos_dim: that dimension with the batch still there, if the point declares it.
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
        # A slice is not to keep all of the tensor alive.
        own = self.copy == "clone" or self.sliced
        return result.clone() if own and share_memory(result, tensor) else result


class SavingHook:
    """A hook that puts what it sees into a cache."""

    def __init__(
        self, cache: MutableMapping[str, Any], key: str, point: HookPoint, keeping: Keeping
    ) -> None:
        self._cache = cache
        self._key = key
        self._point = point
        self._keeping = keeping

    def __call__(self, tensor: Any, hook: Any) -> None:
        """Keeps the tensor, or the tensors of a structure; None is no gradient."""
        if tensor is None:
            return
        name, pos_dim = hook.name or self._key, self._point.pos_dim

        def cut(each: Tensor) -> Tensor:
            return self._keeping.cut(each.detach(), name, pos_dim)

        value = map_tensors(cut, tensor)
        if isinstance(self._cache, PointCache):
            kept = _Kept(value, checked=self._keeping.copy == "checked")
            self._cache.keep(self._key, kept)
        else:
            self._cache[self._key] = value


class Recording:
    """The native recording of hook points, for the calls of one scope."""

    def __init__(
        self, points: dict[str, HookPoint], keeping: Keeping, scope: ScopeBase, *, grads: bool
    ) -> None:
        self._keeping = keeping
        self._grads = grads
        self._names = list(points)
        # One for all, or one for each where they are kept in different ways.
        self._shared: Collector | None = None
        self._collectors: dict[str, Collector] = {}
        # In the order of the first calls, which Python sees in the latter case.
        self._seen: dict[str, None] = {}
        if keeping.sliced or any(map(_CONVERSION, points.values())):
            for name, point in points.items():
                convert = self._convert(name, point)
                self._collectors[name] = self._record({name: point}, convert, scope)
        else:
            self._shared = self._record(points, self._convert_alike(), scope)

    def _record(
        self,
        points: dict[str, HookPoint],
        convert: Callable[[Tensor], Tensor] | None,
        scope: ScopeBase,
    ) -> Collector:
        collector = Collector(
            list(points),
            detach=True,
            copy=self._keeping.copy,
            keep=1,
            convert=convert,
            grads=self._grads,
            max_bytes=None,
            stop=None,
        )
        record_all(collector, list(points.values()), BEHIND_ALL, scope)
        return collector

    def _convert_alike(self) -> Callable[[Tensor], Tensor] | None:
        keeping = self._keeping
        return None if keeping.as_it_is else lambda tensor: keeping.cut(tensor, "", None)

    def _convert(self, name: str, point: HookPoint) -> Callable[[Tensor], Tensor]:
        conversion, pos_dim = point.hook_conversion, point.pos_dim

        def convert(tensor: Tensor) -> Tensor:
            self._seen.setdefault(name)
            converted = tensor if conversion is None else conversion.convert(tensor)
            return self._keeping.cut(converted, name, pos_dim)

        return convert

    def _recorded(self) -> dict[str, tuple[Collector, int]]:
        """Where each point was recorded that ran, in the order of their first calls."""
        shared = self._shared
        if shared is None:
            return {name: (self._collectors[name], 0) for name in self._seen}
        return {self._names[place]: (shared, place) for place in shared.ran()}

    def cache(self) -> PointCache:
        """What was kept until it is first looked at."""
        return PointCache(self._kept)

    def _kept(self) -> dict[str, _Kept | _Recorded]:
        recorded = self._recorded()
        checked = self._keeping.copy == "checked"
        kept: dict[str, _Kept | _Recorded] = {
            name: _Recorded(collector, place, checked)
            for name, (collector, place) in recorded.items()
        }
        # As a backward pass gets to them.
        for name in reversed(list(recorded)) if self._grads else ():
            collector, place = recorded[name]
            gradients = collector.gradients(place)[-1]
            if any(gradient is not None for gradient in gradients):
                kept[f"{name}_grad"] = _Kept(gradients[0] if len(gradients) == 1 else gradients)
        return kept


_CONVERSION = attrgetter("_hook_conversion")
