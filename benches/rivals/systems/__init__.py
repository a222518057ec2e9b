"""Systems that play the scenes, each by its documented way: a file for each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benches.rivals.systems.base import System

SYSTEMS: Final = ("torch", "transformer_lens", "nnsight", "nnterp", "tdhook", "ferrohook")
"""Names of files of this folder."""


def system_of(name: str) -> type[System]:
    """Returns a system; imports its library.

    Raises:
        ValueError: there is none of the name.
    """
    if name not in SYSTEMS:
        msg = f"a system is one of {', '.join(SYSTEMS)}; got {name!r}"
        raise ValueError(msg)
    found: Any = importlib.import_module(f"benches.rivals.systems.by_{name}")
    made: type[System] = found.SYSTEM
    return made
