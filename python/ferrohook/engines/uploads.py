"""Vectors and dictionaries that clients upload, and that their plans name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, TypeAlias, TypeVar

from torch import Tensor

from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.engines.wire import (
    NOUNS,
    Upload,
    bytes_of,
    digest_of,
    header_of,
    packed_uploads,
    unpacked_uploads,
)
from ferrohook.errors import HookError
from ferrohook.plans import Plan
from ferrohook.util.arguments import expect

U = TypeVar("U", Tensor, Dictionary)

_MOST_UPLOADS: Final = 10_000
_LONGEST_NAME: Final = 200
_SHOWN: Final = 10
"""Names in an error."""
_Found: TypeAlias = tuple[Any, str]
"""An upload and its digest."""


class Uploads(Mapping[str, Upload]):
    """Vectors and dictionaries that were uploaded, by name.

    Args:
        most_bytes: of all of them, those included that requests on their way may still need.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._named: dict[str, tuple[Upload, str]] = {}
        self._replaced: dict[str, int] = {}
        """Bytes of uploads whose names mean others by now, by digest, the oldest first."""

    def packed(self, uploads: Mapping[str, Upload]) -> tuple[bytes, dict[str, str]]:
        """Returns uploads as safetensors by their digests, and these by name.

        Raises:
            HookTypeError: one is neither a tensor nor a dictionary.
            HookError: a name means an upload of the other kind.
            ValueError: there would be too many, or too many bytes of them; or a name is too long.
        """
        for name, each in uploads.items():
            expect(
                each, Tensor | Dictionary, f"the vector {name[:_LONGEST_NAME]!r} must be a tensor"
            )
        self._check_room(uploads)  # digests take time
        self._check_kinds(uploads)
        digests = {name: digest_of(each) for name, each in uploads.items()}
        by_digest = {digests[name]: each for name, each in uploads.items()}
        return packed_uploads(by_digest), digests

    def _check_room(self, uploads: Mapping[str, Upload]) -> None:
        if any(len(name) > _LONGEST_NAME for name in uploads):
            msg = f"the name of an upload must not be longer than {_LONGEST_NAME} characters"
            raise ValueError(msg)
        # A copy: another API server's uploads may be taken over meanwhile.
        named = {name: it for name, (it, _) in self._named.copy().items()} | {**uploads}
        if len(named) > _MOST_UPLOADS:
            msg = (
                f"at most {_MOST_UPLOADS:,} vectors and dictionaries can be uploaded, got "
                f"{len(named):,}: drop some"
            )
            raise ValueError(msg)
        size = _bytes_of(named.values())
        if size > self.most_bytes:
            msg = (
                f"the vectors and dictionaries would take {size:,} bytes, more than "
                f"vectors_bytes={self.most_bytes:,}: drop some"
            )
            raise ValueError(msg)

    def _check_kinds(self, uploads: Mapping[str, Upload]) -> None:
        for name, each in uploads.items():
            if name in self._named and _noun_of(each) != (former := _noun_of(self[name])):
                msg = f"a {former} has the name {name!r}: drop it first, or choose another name"
                raise HookError(msg)

    def put(self, uploads: Mapping[str, Upload], digests: Mapping[str, str]) -> list[str]:
        """Names uploads. Scheduled requests still need the former ones of these names.

        Returns:
            The digests of replaced uploads beyond the limit, which are forgotten.
        """
        for name, each in uploads.items():
            if (former := self._named.get(name)) is not None:
                if former[1] == digests[name]:
                    continue
                self._replaced[former[1]] = bytes_of(former[0])
            own = each.detach().cpu().clone() if isinstance(each, Tensor) else each
            self._named[name] = own, digests[name]
        named = {digest for _, digest in self._named.values()}
        for digest in named & self._replaced.keys():
            del self._replaced[digest]
        size = _bytes_of(it for it, _ in self._named.values())
        gone = []
        while self._replaced and size + sum(self._replaced.values()) > self.most_bytes:
            gone.append(next(iter(self._replaced)))
            del self._replaced[gone[-1]]
        return gone

    def digests(self) -> list[str]:
        """Returns the digests of the uploads."""
        return [digest for _, digest in self._named.values()]

    def sync(self, data: bytes) -> list[str]:
        """Takes over names and uploads of another process, as its worker has them.

        Args:
            data: safetensors of the uploads whose digests are new here, by these; the digests of
                all names are metadata.

        Returns:
            Digests that are forgotten, see `put`.
        """
        names: dict[str, str] = json.loads(header_of(data)["__metadata__"]["names"])
        for name in self._named.keys() - names.keys():
            del self._named[name]
        known = {digest: each for each, digest in self._named.values()}
        known |= unpacked_uploads(data)
        return self.put({name: known[digest] for name, digest in names.items()}, names)

    def drop(self, name: str, kind: type[Upload] = Tensor) -> str:
        """Drops a name; returns the digest of its upload.

        Raises:
            KeyError: no upload of the kind has the name.
        """
        if not isinstance(self._named[name][0], kind):
            raise KeyError(name)
        return self._named.pop(name)[1]

    def __getitem__(self, name: str) -> Upload:
        return self._named[name][0]

    def of_kind(self, kind: type[U]) -> dict[str, tuple[U, str]]:
        """Returns the uploads of a kind and their digests, by name."""
        named = self._named.items()
        return {name: (it, digest) for name, (it, digest) in named if isinstance(it, kind)}

    def find(self, name: str, kind: type[Upload]) -> _Found:
        """Returns an upload of a kind, and its digest.

        Raises:
            ValueError: none has the name.
        """
        found = self._named.get(name)
        if found is None or not isinstance(found[0], kind):
            named = self._named.copy().items()  # another thread may upload
            names = [it for it, (each, _) in named if isinstance(each, kind)]
            there = ", ".join(itertools.islice(names, _SHOWN)) or "none"
            more = ", ..." if len(names) > _SHOWN else ""
            shown = name[:_LONGEST_NAME]
            msg = f"no {NOUNS[kind]} {shown!r} was uploaded; uploaded: {there}{more}"
            raise ValueError(msg)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter([*self._named])

    def __len__(self) -> int:
        return len(self._named)


class UploadsOfPlan:
    """Uploads that one plan may name; records which ones it names.

    Args:
        find: returns the upload of a name and a kind, and its digest.
    """

    def __init__(self, find: Callable[[str, type[Upload]], _Found]) -> None:
        self.used: dict[str, str] = {}
        """Digests of the uploads that were looked up, by name."""
        self.vectors = _Named(Tensor, find, self.used)
        """The vectors that were looked up."""
        self.dictionaries = _Named(Dictionary, find, self.used)
        """The dictionaries that were looked up."""

    @classmethod
    def travelled(
        cls, vectors: Mapping[str, Tensor], dictionaries: Mapping[str, _Found] | None = None
    ) -> UploadsOfPlan:
        """Returns the uploads that came with the plan; only digests of named ones count.

        Args:
            vectors: by name.
            dictionaries: with their digests, by name.
        """

        def find(name: str, kind: type[Upload]) -> _Found:
            if dictionaries and name in dictionaries:  # a name has one digest
                found = dictionaries[name]
            else:
                found = vectors[name], digest_of(vectors[name])
            if not isinstance(found[0], kind):
                raise KeyError(name)
            return found

        return cls(find)

    def plan(self, text: str) -> Plan:
        """Reads a plan that may name them.

        Raises:
            HookTypeError, ValueError: see `Plan.from_json`; or an upload is missing.
        """
        return Plan.from_json(text, self.vectors, dictionaries=self.dictionaries)


class _Named(Mapping[str, U], Generic[U]):
    """Uploads of a kind, found as they are looked up."""

    def __init__(
        self,
        kind: type[U],
        find: Callable[[str, type[Upload]], _Found],
        used: dict[str, str],
    ) -> None:
        self._kind: type[Upload] = kind
        self._find = find
        self._used = used
        self._found: dict[str, U] = {}

    def __getitem__(self, name: str) -> U:
        if name not in self._found:
            self._found[name], self._used[name] = self._find(name, self._kind)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __bool__(self) -> bool:
        return True  # asked for names, although it has none yet


def may_name_uploads(text: str) -> bool:
    """Returns True if a plan as JSON may name uploads."""
    return any(it in text for it in ('"tensor"', '"dictionary"', '"features"', "\\u"))


def _noun_of(upload: Upload) -> str:
    return next(noun for kind, noun in NOUNS.items() if isinstance(upload, kind))


def _bytes_of(uploads: Iterable[Upload]) -> int:
    return sum(map(bytes_of, uploads))
