"""Recording: outputs of layers that a model declares, added to the output of its forward.

Names and behaviour are those of transformers' `capture_outputs`; any `nn.Module` class can declare
its records.
"""

from ferrohook.recording.declarations import OutputRecorder as OutputRecorder
from ferrohook.recording.defaults import merge_with_config_defaults as merge_with_config_defaults
from ferrohook.recording.forwards import capture_outputs as capture_outputs
from ferrohook.recording.layers import uninstall as uninstall

__all__ = ["OutputRecorder", "capture_outputs", "merge_with_config_defaults", "uninstall"]
