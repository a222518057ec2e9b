"""`ContextDict`: a dict with separate contents in each context (`contextvars`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar
from weakref import ref

from torch import Tensor

from ferrohook.captures.versions import check_unchanged
from ferrohook.util.host_copies import HostCopies

V = TypeVar("V")


class _ContentKey:
    """The key of one content, held by the contexts that share it."""

    __slots__ = ("__weakref__",)


class Content(NamedTuple):
    """Findings of a detector in one context; immutable."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    versions: Mapping[str, int]
    """Versions of the tensors that are references and are checked."""


EMPTY = Content({}, {}, {})
Activations: TypeAlias = "tuple[Tensor, int | None]"
"""Content of a `LayerActivationDetector`, expanded when read: its tensor, and the version."""

# Variables of deleted contents, for reuse: a context never releases a variable that it has set.
_FREE: list[ContextVar[_ContentKey | None]] = []


class Contents:
    """The contents of one detector, separate in each context (`contextvars`).

    A copied context starts with the contents of the original. Contents are freed with the last
    context that has them, or with the detector.
    """

    # A context is indistinguishable from its copy, so contents are immutable: writes replace them
    # under a new key.

    def __init__(self) -> None:
        self.copies = HostCopies()
        self._variable: ContextVar[_ContentKey | None]
        self._free = _FREE  # `__del__` may run after the module's globals are cleared
        try:
            self._variable = _FREE.pop()
        except IndexError:
            self._variable = ContextVar("collected", default=None)
        self._contents: dict[ref[_ContentKey], Content | Activations] = {}
        self._forget = self._contents.pop
        # True once a content may have more than what the detector's class collects.
        self.extended = False

    def __del__(self) -> None:
        self._contents.clear()
        self._free.append(self._variable)

    def read(self) -> Content:
        """Returns the content in this context."""
        content_key = self._variable.get()
        # A reused variable may still have an earlier detector's key.
        content = EMPTY if content_key is None else self._contents.get(ref(content_key), EMPTY)
        if isinstance(content, Content):
            return content
        tensor, version = content
        name = "activations"
        versions = {} if version is None else {name: version}
        return Content({f"{name}_shape": tuple(tensor.shape)}, {name: tensor}, versions)

    def replace(self, content: Content | Activations) -> None:
        """Replaces the content in this context; the caller must not change it later."""
        content_key = _ContentKey()
        # The weak reference frees the content with the last context that has the key.
        self._contents[ref(content_key, self._forget)] = content
        self._variable.set(content_key)

    def collect(
        self,
        own: Collection[str],
        tensors: Mapping[str, Tensor],
        versions: Mapping[str, int] = EMPTY.versions,
    ) -> None:
        """Replaces the tensors of these names, and their shapes; all else stays."""
        shapes = {f"{name}_shape": tuple(tensor.shape) for name, tensor in tensors.items()}
        former = self.read() if self.extended else EMPTY
        replaced = {*own, *(f"{name}_shape" for name in own)}

        def left(items: Mapping[str, V]) -> dict[str, V]:
            return {name: item for name, item in items.items() if name not in replaced}

        metadata = left(former.metadata) | shapes
        versions = left(former.versions) | {**versions}
        self.replace(Content(metadata, left(former.tensors) | {**tensors}, versions))

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Contents belong to a context and are not copied or pickled.
        return type(self), ()


if TYPE_CHECKING:

    class _MappingDict(dict[str, V]):
        pass

else:

    class _MappingDict(MutableMapping[str, V], dict):
        """A dict whose methods go through the subclass's own."""


class ContextDict(_MappingDict[V]):
    """View of a detector's metadata, whose contents are separate in each context (`contextvars`).

    A dict, for code that asks for one. Reading and writing go to the contents; code in C that
    skips the methods (`json.dumps` of an empty one) sees them as they were when the view was made.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        dict.update(self, self._read())

    def _read(self) -> Mapping[str, V]:
        return self._contents.read().metadata

    def replace(self, items: Mapping[str, V]) -> None:
        """Replaces the items in this context; the caller must not change them later."""
        self._contents.extended |= bool(items)
        self._contents.replace(self._contents.read()._replace(metadata=items))
        dict.clear(self)
        dict.update(self, items)

    def __getitem__(self, key: str) -> V:
        return self._read()[key]

    def __setitem__(self, key: str, value: V) -> None:
        self.replace({**self._read(), key: value})

    def __delitem__(self, key: str) -> None:
        items = dict(self._read())
        del items[key]
        self.replace(items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __reversed__(self) -> Iterator[str]:
        return reversed(dict(self._read()))

    def __len__(self) -> int:
        return len(self._read())

    def clear(self) -> None:
        """Removes all items in this context."""
        self.replace({})

    def copy(self) -> dict[str, V]:
        """Returns a plain dict of the items in this context."""
        return dict(self)

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return dict(self) | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return other | dict(self) if isinstance(other, dict) else NotImplemented

    def __ior__(self, other: Mapping[str, V] | Iterable[tuple[str, V]]) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))


class TensorDict(ContextDict[Tensor]):
    """A `ContextDict` of tensors; reading one finishes its copy from the GPU, and checks it."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents  # code in C gets no tensor unchecked

    def _read(self) -> Mapping[str, Tensor]:
        return self._contents.read().tensors

    def replace(self, items: Mapping[str, Tensor]) -> None:
        """Replaces the items in this context; the caller must not change them later."""
        content = self._contents.read()
        same = content.tensors
        versions = {
            name: version
            for name, version in content.versions.items()
            if name in items and items[name] is same[name]
        }
        self._contents.extended |= bool(items)
        self._contents.replace(Content(content.metadata, items, versions))

    def __getitem__(self, key: str) -> Tensor:
        content = self._contents.read()
        tensor = content.tensors[key]
        self._contents.copies.finish()
        if key in content.versions:
            check_unchanged(tensor, [content.versions[key]], key)
        return tensor
