"""Dicts of which each context has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import TypeVar
from weakref import ref

from torch import Tensor

from ferrohook.host_copies import HostCopies

V = TypeVar("V")


class _Mark:
    """Stands in a context for what was written there."""

    __slots__ = ("__weakref__",)


# Of dicts that are gone: a context holds on to every variable that it ever had a value for.
_FREE: list[ContextVar[_Mark | None]] = []


class ContextDict(MutableMapping[str, V]):
    """A dict of which each context (`contextvars`) has its own.

    A context that has written nothing reads what the one it was copied from had then. What a
    context wrote goes with it, and with the dict.
    """

    # A copied context has the same values, and there is no asking which context this is. So what
    # is written is never changed, only replaced, under a new mark.

    def __init__(self) -> None:
        self._mark: ContextVar[_Mark | None]
        self._free = _FREE  # at the interpreter's end the module has no variables any more
        try:
            self._mark = _FREE.pop()
        except IndexError:
            self._mark = ContextVar("collected", default=None)
        self._contents: dict[ref[_Mark], Mapping[str, V]] = {}

    def __del__(self) -> None:
        self._contents.clear()
        self._free.append(self._mark)

    def read(self) -> Mapping[str, V]:
        """What this context has, not to be changed."""
        mark = self._mark.get()
        # It may be that of an earlier dict with this variable.
        return {} if mark is None else self._contents.get(ref(mark), {})

    def replace(self, content: Mapping[str, V]) -> None:
        """Writes all of it anew; the caller lets go of `content`."""
        mark = _Mark()
        # What is written goes when the last context that knows of it does.
        self._contents[ref(mark, self._contents.pop)] = content
        self._mark.set(mark)

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
        """Empties that of this context."""
        self.replace({})

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # What was collected stays with its context.
        return type(self), ()

    def __repr__(self) -> str:
        return repr(dict(self))


class TensorDict(ContextDict[Tensor]):
    """The same for tensors, which are complete when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = HostCopies()

    def __getitem__(self, key: str) -> Tensor:
        self.copies.finish()
        return super().__getitem__(key)
