"""Native detectors for services: hooks that run in Rust and count statistics of activations.

Any number of threads may share one. `snapshot` has the statistics of all modules, `modules` a
detector for each of them. `merge` adds the statistics of another detector, such as one unpickled
from another process.

Examples:
    >>> watch = NonFiniteDetector()
    >>> handles = fh.register(model, "encoder.*", watch)
    >>> watch
    NonFiniteDetector(tensors=12, affected=3, nan=5, inf=0, first='encoder.2')
    >>> watch.modules["encoder.2"].snapshot()
    {'tensors': 1, 'affected': 1, 'nan': 5, 'inf': 0}
"""

from __future__ import annotations

from ferrohook._core import CallCounter as CallCounter
from ferrohook._core import LatencyDetector as LatencyDetector
from ferrohook._core import NativeDetector as NativeDetector
from ferrohook._core import NonFiniteDetector as NonFiniteDetector
from ferrohook._core import NormDetector as NormDetector
from ferrohook._core import ShapeDetector as ShapeDetector
from ferrohook.detectors.reductions import reduce as _reduce  # noqa: F401 (native detectors import it)

__all__ = [
    "CallCounter",
    "LatencyDetector",
    "NativeDetector",
    "NonFiniteDetector",
    "NormDetector",
    "ShapeDetector",
]


def __dir__() -> list[str]:
    return __all__
