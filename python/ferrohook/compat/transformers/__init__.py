"""Outputs of layers that a model declares, added to the output of its forward, and class patching.

Names and behaviour match transformers' `capture_outputs` and `monkey_patching`; any
`nn.Module` class can declare its records.
"""

# The first recording of a model makes an installation: a hook (`RecordedLayer`) on each declared
# layer, which runs after all others. The model's other modules are instrumented too: PyTorch's way
# to call them costs more, and a forward that alternates between both evicts each from the
# processor's caches. A layer asks its thread, then its context for the innermost call, so a
# sub-model keeps its parent from recording it, and hands that the output. On a thread without a
# call the owner is found by the tensors that calls know, or the output is dropped with an
# `UnattributedWarning`. The lists of a traced call become outputs of its graph; layers find it
# through the thread-local variable, which Dynamo can follow. An installation is never changed: each
# recording call compares the modules with it, and makes a new one where they differ.

from ferrohook.compat.transformers.declarations import OutputRecorder
from ferrohook.compat.transformers.defaults import merge_with_config_defaults
from ferrohook.compat.transformers.forwards import capture_outputs
from ferrohook.compat.transformers.layers import uninstall
from ferrohook.compat.transformers.patching import (
    apply_patches,
    clear_patch_mapping,
    get_patch_mapping,
    patch_output_recorders,
    register_patch_mapping,
    unregister_patch_mapping,
)
from ferrohook.errors import UnattributedWarning

__all__ = [
    "OutputRecorder",
    "UnattributedWarning",
    "apply_patches",
    "capture_outputs",
    "clear_patch_mapping",
    "get_patch_mapping",
    "merge_with_config_defaults",
    "patch_output_recorders",
    "register_patch_mapping",
    "uninstall",
    "unregister_patch_mapping",
]
