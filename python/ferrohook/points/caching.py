"""What `run_with_cache` keeps, and how."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ferrohook._core import Collector, Recorder
from ferrohook.activations import _BEHIND_ALL, ActivationCache, _share, map_tensors, tensors_in
from ferrohook.errors import StaleActivationError
from ferrohook.instrumentation import _KEY

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
        self._versions = _versions(self._value) if checked else None

    def read(self, name: str) -> Any:
        if self._versions is not None and self._versions != _versions(self._value):
            msg = (
                f"{name!r} was changed in place after it was captured: capture with "
                'copy="clone" to keep what it was'
            )
            raise StaleActivationError(msg)
        return self._value

    def peek(self) -> Any:
        return self._value

    def apart(self) -> _Kept:
        return self


def _counting(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _versions(value: Any) -> list[int]:
    # Inference tensors count none.
    return [tensor._version for tensor in tensors_in(value) if not tensor.is_inference()]


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
    def __init__(self) -> None:
        self.kept: dict[str, _Kept | _Recorded] = {}

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

    def __init__(self) -> None:
        super().__init__(_Entries())

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
        return result.clone() if own and _share(result, tensor) else result


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
        # The points in the order of their first calls, where Python sees them.
        self._seen: dict[str, None] = {}
        self._places: dict[str, tuple[Collector, int]] = {}
        registries = [vars(point)[_KEY].registry for point in points.values()]
        if keeping.sliced or any(point.hook_conversion for point in points.values()):
            for name, point in points.items():
                self._places[name] = self._collector([name], self._convert(name, point)), 0
        else:
            shared = self._collector(list(points), self._convert_alike())
            self._places = {name: (shared, place) for place, name in enumerate(points)}
        for registry, (collector, place) in zip(registries, self._places.values(), strict=True):
            recorder = Recorder(collector, place, False, None)
            registry.register("forward", recorder, priority=_BEHIND_ALL, scope=scope)

    def _collector(self, names: list[str], convert: Callable[[Any], Any] | None) -> Collector:
        return Collector(
            names,
            detach=True,
            copy=self._keeping.copy,
            keep=1,
            convert=convert,
            grads=self._grads,
            max_bytes=None,
            stop=None,
        )

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

    def _ran(self) -> list[str]:
        if self._seen or not self._places:
            return list(self._seen)
        collector, _ = next(iter(self._places.values()))
        names = list(self._places)
        return [names[place] for place in collector.ran()]

    def cache(self) -> PointCache:
        """What was kept so far."""
        names = self._ran()
        checked = self._keeping.copy == "checked"
        cache = PointCache()
        cache._activations.kept = {name: _Recorded(*self._places[name], checked) for name in names}
        # As a backward pass gets to them.
        for name in reversed(names) if self._grads else ():
            collector, place = self._places[name]
            gradients = collector.gradients(place)[-1]
            if any(gradient is not None for gradient in gradients):
                cache[f"{name}_grad"] = gradients[0] if len(gradients) == 1 else gradients
        return cache
