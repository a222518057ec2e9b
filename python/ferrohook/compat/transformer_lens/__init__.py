"""Hook points: identity modules that exist to be hooked, and models that are made of them.

The names and the behaviour are TransformerLens', so that code written for it runs by changing an
import. The migration page lists the differences.
"""

# A `HookPoint` instruments itself when it is created, so it is called, copied, saved and compiled
# as any instrumented module. `add_hook` registers the `LensHandle` itself, which receives the
# called point as an argument: copies need no care, and a point's lists of hooks are read from its
# registry. `hooks` is a scope; with `reset_hooks_end=False` its hooks belong to a frame that
# stands outermost in the context and is taken out with its last hook. `run_with_cache` registers
# native recorders of one collector in a scope; where a conversion or a slice treats points
# differently, the hooks of `get_caching_hooks`. `wrap` registers a hook with each module that sends
# a tensor through a point.

from ferrohook.compat.transformer_lens.caching import PointCache
from ferrohook.compat.transformer_lens.hook_point import (
    AliasedHookPoint,
    HookFunction,
    HookPoint,
    LensHandle,
    TensorConversion,
)
from ferrohook.compat.transformer_lens.names import NamesFilter, SetupError
from ferrohook.compat.transformer_lens.root import HookedRootModule
from ferrohook.compat.transformer_lens.slices import Slice, SliceInput

__all__ = [
    "AliasedHookPoint",
    "HookFunction",
    "HookPoint",
    "HookedRootModule",
    "LensHandle",
    "NamesFilter",
    "PointCache",
    "SetupError",
    "Slice",
    "SliceInput",
    "TensorConversion",
]
