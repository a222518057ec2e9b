"""Plans for requests of engines that batch continuously.

`ferrohook.engines.transformers` serves transformers' continuous batching,
`ferrohook.engines.vllm` vLLM, `ferrohook.engines.sglang` SGLang. Each is imported on first use,
with its engine.
"""

from __future__ import annotations

import importlib

from ferrohook.engines.steps import Span as Span
from ferrohook.engines.steps import Step as Step
from ferrohook.engines.support import Capabilities as Capabilities

__all__ = ["Capabilities", "Span", "Step", "capabilities"]

ENGINES = ("transformers", "vllm", "sglang")


def capabilities(engine: str) -> Capabilities:
    """Tells the features that an engine serves or refuses under ferrohook.

    Args:
        engine: "transformers", "vllm" or "sglang"; it is imported.

    Raises:
        ValueError: an engine without an adapter.
        ModuleNotFoundError: the engine is not installed.
    """
    if engine not in ENGINES:
        msg = f"an engine is one of {', '.join(ENGINES)}; got {engine!r}"
        raise ValueError(msg)
    found: Capabilities = importlib.import_module(f"ferrohook.engines.{engine}").CAPABILITIES
    return found
