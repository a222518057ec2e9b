"""Vectors that clients upload, and that their plans name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import safetensors.torch
from torch import Tensor

from ferrohook.engines.wire import digest_of, header_of
from ferrohook.util.arguments import expect

_MOST_VECTORS: Final = 10_000
_LONGEST_NAME: Final = 200
_SHOWN: Final = 10
"""Names in an error."""


class Vectors(Mapping[str, Tensor]):
    """Vectors that were uploaded, by name.

    Args:
        most_bytes: of all of them, those included that requests on their way may still need.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._named: dict[str, tuple[Tensor, str]] = {}
        self._replaced: dict[str, int] = {}
        """Bytes of vectors whose names mean others by now, by digest, the oldest first."""

    def packed(self, vectors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, str]]:
        """Returns vectors as safetensors by their digests, and these by name.

        Raises:
            HookTypeError: a vector is no tensor.
            ValueError: there would be too many, or too many bytes of them; or a name is too long.
        """
        for name, vector in vectors.items():
            expect(vector, Tensor, f"the vector {name[:_LONGEST_NAME]!r} must be a tensor")
        self._check_room(vectors)  # digests take time
        plain = {name: vector.detach().cpu().contiguous() for name, vector in vectors.items()}
        digests = {name: digest_of(vector) for name, vector in plain.items()}
        by_digest = {digests[name]: vector.clone() for name, vector in plain.items()}
        return safetensors.torch.save(by_digest), digests

    def _check_room(self, vectors: Mapping[str, Tensor]) -> None:
        if any(len(name) > _LONGEST_NAME for name in vectors):
            msg = f"the name of a vector must not be longer than {_LONGEST_NAME} characters"
            raise ValueError(msg)
        named = {name: tensor for name, (tensor, _) in self._named.items()} | {**vectors}
        if len(named) > _MOST_VECTORS:
            msg = (
                f"at most {_MOST_VECTORS:,} vectors can be uploaded, got {len(named):,}: drop some"
            )
            raise ValueError(msg)
        size = _bytes_of(named.values())
        if size > self._most_bytes:
            msg = (
                f"the vectors would take {size:,} bytes, more than "
                f"vectors_bytes={self._most_bytes:,}: drop some"
            )
            raise ValueError(msg)

    def put(self, vectors: Mapping[str, Tensor], digests: Mapping[str, str]) -> list[str]:
        """Names vectors. Scheduled requests still need the former vectors of these names.

        Returns:
            The digests of replaced vectors beyond the limit, which are forgotten.
        """
        for name, vector in vectors.items():
            if (former := self._named.get(name)) is not None:
                if former[1] == digests[name]:
                    continue
                self._replaced[former[1]] = former[0].nbytes
            self._named[name] = vector.detach().cpu().clone(), digests[name]
        named = {digest for _, digest in self._named.values()}
        for digest in named & self._replaced.keys():
            del self._replaced[digest]
        size = _bytes_of(tensor for tensor, _ in self._named.values())
        gone = []
        while self._replaced and size + sum(self._replaced.values()) > self._most_bytes:
            gone.append(next(iter(self._replaced)))
            del self._replaced[gone[-1]]
        return gone

    def digests(self) -> list[str]:
        """Returns the digests of the vectors."""
        return [digest for _, digest in self._named.values()]

    def sync(self, data: bytes) -> None:
        """Takes over names and vectors of another process, as its worker has them.

        Args:
            data: safetensors of the vectors whose digests are new here, by these; the digests of
                all names are metadata.
        """
        names: dict[str, str] = json.loads(header_of(data)["__metadata__"]["names"])
        for name in self._named.keys() - names.keys():
            self.drop(name)
        known = {digest: vector for vector, digest in self._named.values()}
        known |= safetensors.torch.load(data)
        self.put({name: known[digest] for name, digest in names.items()}, names)

    def drop(self, name: str) -> str:
        """Drops a name; returns the digest of its vector.

        Raises:
            KeyError: no vector has the name.
        """
        return self._named.pop(name)[1]

    def __getitem__(self, name: str) -> Tensor:
        return self.find(name)[0]

    def find(self, name: str) -> tuple[Tensor, str]:
        """Returns a vector and its digest.

        Raises:
            ValueError: no vector has the name.
        """
        if (found := self._named.get(name)) is None:
            there = ", ".join(itertools.islice(self._named, _SHOWN)) or "none"
            more = ", ..." if len(self._named) > _SHOWN else ""
            msg = f"no vector {name[:_LONGEST_NAME]!r} was uploaded; uploaded: {there}{more}"
            raise ValueError(msg)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter([*self._named])

    def __len__(self) -> int:
        return len(self._named)

    def __bool__(self) -> bool:
        return True  # asked for names, although it may have none


class VectorsOfPlan(Mapping[str, Tensor]):
    """Vectors for one plan; records which ones the plan names.

    Args:
        vectors: that it may name.
        find: returns one of them and its digest.
    """

    def __init__(
        self, vectors: Mapping[str, Tensor], find: Callable[[str], tuple[Tensor, str]]
    ) -> None:
        self._vectors = vectors
        self._find = find
        self.used: dict[str, str] = {}
        """Digests of the vectors that were looked up, by name."""

    @classmethod
    def uploaded(cls, vectors: Vectors) -> VectorsOfPlan:
        """Returns the uploaded ones."""
        return cls(vectors, vectors.find)

    @classmethod
    def travelled(cls, vectors: Mapping[str, Tensor]) -> VectorsOfPlan:
        """Returns the vectors that came with the plan; only digests of named vectors count."""
        return cls(vectors, lambda name: (vectors[name], digest_of(vectors[name])))

    def __getitem__(self, name: str) -> Tensor:
        if name in self.used:
            return self._vectors[name]
        vector, self.used[name] = self._find(name)
        return vector

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __bool__(self) -> bool:
        return True  # asked for names, although it may have none


def _bytes_of(vectors: Iterable[Tensor]) -> int:
    return sum(vector.nbytes for vector in vectors)
