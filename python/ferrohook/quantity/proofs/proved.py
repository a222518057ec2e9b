"""Quantities of a model that are proved, and for each other one the reason."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrohook.effects.routing import Routing
    from ferrohook.quantity.anatomy.observe import ObservedTensor
    from ferrohook.quantity.anatomy.subjects import Example


@dataclasses.dataclass
class Proved:
    """A quantity at a place, with the equation that proves it."""

    name: str
    site: ObservedTensor
    shape: tuple[int, ...]
    equation: str
    residual: float = 0.0
    multiplier: float = 1.0
    """Factor of the tensor at the place."""
    writable: bool = False
    point: str | None = None
    """Point inside the attention module at the site, see `ferrohook.attach.attention`."""
    stream_factor: float | None = None
    """Factor of the quantity in the stream after the last block; None if it is not a term of it."""
    routing: Routing | None = None
    """Parts where a module returns ids of experts and their weights, for such ids."""
    experts: int | None = None
    """Number of experts, for their ids; None if it is not known."""


@dataclasses.dataclass
class Findings:
    """All that looking at a model showed."""

    proved: list[Proved]
    missing: dict[str, str]
    """Reasons of quantities that are not there, or not proved."""
    example: Example
    times: Mapping[ObservedTensor, int]
    """Time at which a forward passed each tensor, for tensors that it passed once."""
