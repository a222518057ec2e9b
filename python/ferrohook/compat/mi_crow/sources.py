"""Detectors as sources of `collect`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from ferrohook.compat.mi_crow.detectors import Detector
from ferrohook.compat.mi_crow.layers import Layers
from ferrohook.data.fingerprints import fingerprint
from ferrohook.data.sources import Source, source_of
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ferrohook.data import Store
    from ferrohook.registration.scopes import Scope


class DetectedTensors(Source):
    """A detector as a source of `collect`."""

    def __init__(self, detector: Detector, model: nn.Module, store: Store) -> None:
        if detector.store not in (None, store):
            msg = (
                f"{detector} already has the store {detector.store!r}: pass this store to collect, "
                "or set the detector's store to None"
            )
            raise HookError(msg)
        signature = detector.layer_signature
        self._signature = detector._default_layer if signature is None else signature
        if detector.layer is None and self._signature is None:
            msg = (
                f"{detector} has no layer: set its layer_signature ('' for the model itself), or "
                "register it first"
            )
            raise HookError(msg)
        self._layers = Layers(model)
        self._detector = detector
        self._ran = False

    def attach(self, scope: Scope) -> None:
        """Registers the detector, if it is not registered."""
        detector = self._detector
        if detector.layer is None and self._signature is not None:
            self._layers.register_hook(self._signature, detector, scope=scope)
        self._layer = detector.layer or ""
        self._calls = self._count()
        detector.tensor_metadata.clear()  # from calls outside any batch

    def detach(self) -> None:
        """Unregisters the detector, if it was registered here."""
        self._layers.unregister_hook(self._detector)

    def _count(self) -> int:
        handle = self._detector._handle
        return 0 if handle is None else handle.calls

    def take(self) -> dict[str, dict[str, Tensor]]:
        """Returns copies of the detector's tensors."""
        # A detector may share tensors with the model, which writes to them in the next batch.
        collected = self._detector.tensor_metadata
        taken = {name: tensor.clone() for name, tensor in collected.items()}
        collected.clear()
        self._ran = self._ran or bool(taken) or self._count() > self._calls
        return {self._layer: taken} if taken else {}

    def contents(self) -> list[str]:
        """Describes the detector by its class, layer, time and options.

        Options are the arguments of its constructor that it keeps in attributes of their names.
        """
        detector = self._detector
        if not detector.enabled:
            return []
        layer = detector.layer
        if layer is None and self._signature is not None:
            layer = self._layers._find(self._signature)[0]
        kept = {**vars(detector)}
        options = [
            f"{name}={_text(kept[name])}"
            for name in inspect.signature(type(detector)).parameters
            if name in kept and name not in {"layer_signature", "store"}
        ]
        where = f"{detector.hook_type} of {layer!r}"
        return [f"{type(detector).__qualname__}({', '.join([where, *options])})"]

    def silent(self) -> list[str]:
        """Returns the detector's layer if it never ran."""
        return [] if self._ran or not self._detector.enabled else [self._layer]


def _text(value: object) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | torch.dtype)
    return repr(value) if plain else fingerprint(value)


source_of.register(Detector, DetectedTensors)
