"""Detectors and controllers: hooks as objects, by mi_crow's names."""

# A `Hook` is an object whose bound method is the registered callable; a deep copy of a module
# copies it along. `enabled` is its handle's. One lock for all `Layers` keeps a hook on one
# layer at most. A detector collects into a `ContextDict`. A context cannot be distinguished from
# its copy, so values are never changed in place: each write puts a new key into the dict's context
# variable, by which the dict finds the contents, weakly. A controller receives the activations
# themselves, as a copy would double the cost of a call; a write shows in the tensor's version.
# Inference tensors have no version and Dynamo does not know it: there a controller receives a copy.

from ferrohook.compat.mi_crow.controllers import (
    Controller,
    FunctionController,
    InterventionController,
)
from ferrohook.compat.mi_crow.detectors import (
    Detector,
    LayerActivationDetector,
    ModelInputDetector,
    ModelOutputDetector,
)
from ferrohook.compat.mi_crow.hooks import Hook, HookError, HookType
from ferrohook.compat.mi_crow.layers import Layers
from ferrohook.compat.mi_crow.sources import DetectedTensors as _DetectedTensors  # noqa: F401 (registers them with `collect`)
from ferrohook.compat.mi_crow.tensors import (
    apply_modification_to_output,
    extract_tensor_from_input,
    extract_tensor_from_output,
)

__all__ = [
    "Controller",
    "Detector",
    "FunctionController",
    "Hook",
    "HookError",
    "HookType",
    "InterventionController",
    "LayerActivationDetector",
    "Layers",
    "ModelInputDetector",
    "ModelOutputDetector",
    "apply_modification_to_output",
    "extract_tensor_from_input",
    "extract_tensor_from_output",
]
