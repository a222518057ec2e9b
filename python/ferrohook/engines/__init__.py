"""Plans for requests of engines that batch continuously.

`ferrohook.engines.transformers` serves transformers' continuous batching,
`ferrohook.engines.vllm` vLLM, `ferrohook.engines.sglang` SGLang. Each is imported on first use,
with its engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ferrohook.engines.support import Capabilities as Capabilities

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Capabilities", "capabilities"]


def __dir__() -> list[str]:
    return __all__


ENGINES = ("transformers", "vllm", "sglang")


def capabilities(engine: str, model: nn.Module | None = None) -> Capabilities:
    """Returns the features that an engine serves or refuses under ferrohook.

    Args:
        engine: "transformers", "vllm" or "sglang"; it is imported.
        model: a model of transformers, which is examined for `quantities`.

    Raises:
        ValueError: an engine without an adapter; or a model for an engine that loads its own.
        ModuleNotFoundError: the engine is not installed.
        HookError: the model cannot be examined, see `fh.quantities`.
    """
    if engine not in ENGINES:
        msg = f"engine must be one of {', '.join(ENGINES)}; got {engine!r}"
        raise ValueError(msg)
    if model is not None and engine != "transformers":
        msg = (
            f"{engine} loads and inspects its model itself: ask its server for capabilities, and "
            "do not pass a model here"
        )
        raise ValueError(msg)
    adapter = importlib.import_module(f"ferrohook.engines.{engine}")
    found: Capabilities = adapter.CAPABILITIES if model is None else adapter.capabilities_of(model)
    return found
