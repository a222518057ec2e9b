"""Detectors and controllers: hooks as objects, by mi_crow's names."""

from ferrohook.interventions.controllers import Controller as Controller
from ferrohook.interventions.controllers import FunctionController as FunctionController
from ferrohook.interventions.detectors import Detector as Detector
from ferrohook.interventions.detectors import LayerActivationDetector as LayerActivationDetector
from ferrohook.interventions.detectors import ModelInputDetector as ModelInputDetector
from ferrohook.interventions.detectors import ModelOutputDetector as ModelOutputDetector
from ferrohook.interventions.hooks import Hook as Hook
from ferrohook.interventions.hooks import HookError as HookError
from ferrohook.interventions.hooks import HookType as HookType
from ferrohook.interventions.layers import Layers as Layers
from ferrohook.interventions.sources import DetectedTensors as _DetectedTensors  # noqa: F401 (registers them with `collect`)
from ferrohook.interventions.tensors import (
    apply_modification_to_output as apply_modification_to_output,
)
from ferrohook.interventions.tensors import extract_tensor_from_input as extract_tensor_from_input
from ferrohook.interventions.tensors import extract_tensor_from_output as extract_tensor_from_output

__all__ = [
    "Controller",
    "Detector",
    "FunctionController",
    "Hook",
    "HookError",
    "HookType",
    "LayerActivationDetector",
    "Layers",
    "ModelInputDetector",
    "ModelOutputDetector",
    "apply_modification_to_output",
    "extract_tensor_from_input",
    "extract_tensor_from_output",
]
