"""Quantities: named tensors of a computation, found by looking at a model, proved by equations."""

from ferrohook.quantity.known import quantities as quantities
from ferrohook.quantity.known import remember as remember
from ferrohook.quantity.resolving import hooked_places_of as hooked_places_of
from ferrohook.quantity.resolving import places_of as places_of
from ferrohook.quantity.table import Quantities as Quantities
from ferrohook.quantity.table import Quantity as Quantity

__all__ = ["Quantities", "Quantity", "hooked_places_of", "places_of", "quantities", "remember"]
