"""Options of an engine whose requests have plans."""

from __future__ import annotations

import dataclasses
from typing import Any, Self


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options that each engine has; an engine with more derives from it.

    Args:
        capture_bytes: most bytes that one request captures.
        vectors_bytes: most bytes of all uploaded vectors and dictionaries.
    """

    capture_bytes: int = 64 * 2**20
    vectors_bytes: int = 2**30

    @classmethod
    def read(cls, found: Any, place: str) -> Self:
        """Reads options of a dict.

        Args:
            found: options by name.
            place: where they stand, for errors.

        Raises:
            ValueError: an unknown option, or one of the wrong type.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        unknown = (
            min(found.keys() - {*defaults}, default=None) if isinstance(found, dict) else found
        )
        if unknown is not None:
            msg = f"{place} only has the options {', '.join(defaults)}; got {unknown!r}"
            raise ValueError(msg)
        for name, value in found.items():
            kind = type(defaults[name])
            if kind is int and (type(value) is not int or value < 1):
                msg = f"{name} of {place} must be an int of at least 1; got {value!r}"
                raise ValueError(msg)
            if kind is bool and type(value) is not bool:
                msg = f"{name} of {place} must be a bool; got {value!r}"
                raise ValueError(msg)
        return cls(**found)
