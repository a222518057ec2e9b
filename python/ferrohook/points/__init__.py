"""Hook points: identity modules that exist to be hooked, and models that are made of them.

The names and the behaviour are TransformerLens', so that code written for it runs by changing an
import. The migration page lists the differences.
"""

from ferrohook.points.caching import PointCache as PointCache
from ferrohook.points.hook_point import HookPoint as HookPoint
from ferrohook.points.lens_hooks import AliasedHookPoint as AliasedHookPoint
from ferrohook.points.lens_hooks import HookFunction as HookFunction
from ferrohook.points.lens_hooks import LensHandle as LensHandle
from ferrohook.points.lens_hooks import TensorConversion as TensorConversion
from ferrohook.points.names import NamesFilter as NamesFilter
from ferrohook.points.names import SetupError as SetupError
from ferrohook.points.root import HookedRootModule as HookedRootModule
from ferrohook.points.slices import Slice as Slice
from ferrohook.points.slices import SliceInput as SliceInput

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
