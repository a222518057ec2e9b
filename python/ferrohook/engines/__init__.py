"""Plans for requests of engines that batch continuously.

`ferrohook.engines.transformers` serves transformers' continuous batching,
`ferrohook.engines.vllm` vLLM. Each is imported on first use, with its engine.
"""

from __future__ import annotations

from ferrohook.engines.steps import Span as Span
from ferrohook.engines.steps import Step as Step
from ferrohook.engines.support import Capabilities as Capabilities
from ferrohook.engines.support import capabilities as capabilities

__all__ = ["Capabilities", "Span", "Step", "capabilities"]
