"""Plans for the requests of transformers' continuous batching."""

from ferrohook.engines.transformers.batching import Attached as Attached
from ferrohook.engines.transformers.batching import attach as attach
from ferrohook.engines.transformers.batching import capabilities_of as capabilities_of
from ferrohook.engines.transformers.batching import generate_batch as generate_batch
from ferrohook.engines.transformers.supported import CAPABILITIES as CAPABILITIES

__all__ = ["CAPABILITIES", "Attached", "attach", "capabilities_of", "generate_batch"]
