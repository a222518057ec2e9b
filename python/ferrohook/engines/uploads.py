"""Vectors that clients upload, and that their plans name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import safetensors.torch
from torch import Tensor

from ferrohook.engines.wire import digest_of
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

    def check_room(self, vectors: Mapping[str, Tensor]) -> None:
        """Checks that more vectors may be named.

        Raises:
            ValueError: there would be too many, or too many bytes of them; or a name is too long.
        """
        if any(len(name) > _LONGEST_NAME for name in vectors):
            msg = f"names of vectors have at most {_LONGEST_NAME} characters"
            raise ValueError(msg)
        named = {name: tensor for name, (tensor, _) in self._named.items()} | {**vectors}
        if len(named) > _MOST_VECTORS:
            msg = f"there are at most {_MOST_VECTORS:,} vectors, got {len(named):,}: drop some"
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

    def drop(self, name: str) -> str | None:
        """Drops a name; returns its digest if no other name has it.

        Raises:
            KeyError: no vector has the name.
        """
        _, digest = self._named.pop(name)
        kept = any(digest == other for _, other in self._named.values())
        return None if kept else digest

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
            msg = f"no vector {name[:_LONGEST_NAME]!r} was uploaded; there: {there}{more}"
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
    """

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors
        self.used: dict[str, str] = {}
        """Digests of the vectors that were looked up, by name."""

    def __getitem__(self, name: str) -> Tensor:
        vector, self.used[name] = self._vectors.find(name)
        return vector

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __bool__(self) -> bool:
        return True  # asked for names, although it may have none


def packed_vectors(vectors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, str]]:
    """Returns vectors as safetensors by their digests, and these by name.

    Raises:
        HookTypeError: a vector is no tensor.
    """
    for name, vector in vectors.items():
        expect(vector, Tensor, f"the vector {name!r} is a tensor")
    plain = {name: vector.detach().cpu().contiguous() for name, vector in vectors.items()}
    digests = {name: digest_of(vector) for name, vector in plain.items()}
    by_digest = {digests[name]: vector.clone() for name, vector in plain.items()}
    return safetensors.torch.save(by_digest), digests


def _bytes_of(vectors: Iterable[Tensor]) -> int:
    return sum(vector.nbytes for vector in vectors)
