"""`ContextDict`: a dict with separate contents in each context (`contextvars`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import TypeVar
from weakref import ref

from torch import Tensor

from ferrohook.host_copies import HostCopies

V = TypeVar("V")


class _ContentKey:
    """The key of one content, held by the contexts that share it."""

    __slots__ = ("__weakref__",)


# Variables of deleted dicts, for reuse: a context never releases a variable that it has set.
_FREE: list[ContextVar[_ContentKey | None]] = []


class ContextDict(MutableMapping[str, V]):
    """A dict with separate contents in each context (`contextvars`).

    A copied context starts with the contents of the original. Contents are freed with the last
    context that has them, or with the dict.
    """

    # A context is indistinguishable from its copy, so contents are immutable: writes replace them
    # under a new key.

    def __init__(self) -> None:
        self._variable: ContextVar[_ContentKey | None]
        self._free = _FREE  # `__del__` may run after the module's globals are cleared
        try:
            self._variable = _FREE.pop()
        except IndexError:
            self._variable = ContextVar("collected", default=None)
        self._contents: dict[ref[_ContentKey], Mapping[str, V]] = {}

    def __del__(self) -> None:
        self._contents.clear()
        self._free.append(self._variable)

    def read(self) -> Mapping[str, V]:
        """Returns the contents in this context; read-only."""
        content_key = self._variable.get()
        # A reused variable may still have an earlier dict's key.
        return {} if content_key is None else self._contents.get(ref(content_key), {})

    def replace(self, content: Mapping[str, V]) -> None:
        """Replaces the contents in this context; the caller must not change `content` later."""
        content_key = _ContentKey()
        # The weak reference frees the content with the last context that has the key.
        self._contents[ref(content_key, self._contents.pop)] = content
        self._variable.set(content_key)

    def __getitem__(self, key: str) -> V:
        return self.read()[key]

    def __setitem__(self, key: str, value: V) -> None:
        self.replace({**self.read(), key: value})

    def __delitem__(self, key: str) -> None:
        content = dict(self.read())
        del content[key]
        self.replace(content)

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def clear(self) -> None:
        """Removes all items in this context."""
        self.replace({})

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Contents belong to a context and are not copied or pickled.
        return type(self), ()

    def __repr__(self) -> str:
        return repr(dict(self))


class TensorDict(ContextDict[Tensor]):
    """A `ContextDict` of tensors; reading one finishes its copy from the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = HostCopies()

    def __getitem__(self, key: str) -> Tensor:
        self.copies.finish()
        return super().__getitem__(key)
