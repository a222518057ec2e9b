"""Plans for requests of SGLang: a plug-in that SGLang finds by its entry point.

Examples:
    >>> from ferrohook.engines.sglang import activations, custom_params
    >>> steer = fh.on("model.layers.5", fh.Add(vector))
    >>> plan = fh.Plan(steer, fh.keep("model.layers.*"))
    >>> params = {"temperature": 0, "custom_params": custom_params(plan)}
    >>> answer = engine.generate(input_ids=ids, sampling_params=params)
    >>> activations(answer).acts["model.layers.3"].shape
    torch.Size([31, 4096])
"""

from __future__ import annotations

from ferrohook.engines.sglang.clients import activations as activations
from ferrohook.engines.sglang.clients import custom_params as custom_params
from ferrohook.engines.sglang.clients import drop_dictionaries as drop_dictionaries
from ferrohook.engines.sglang.clients import drop_vectors as drop_vectors
from ferrohook.engines.sglang.clients import put_dictionaries as put_dictionaries
from ferrohook.engines.sglang.clients import put_vectors as put_vectors
from ferrohook.engines.sglang.harvest import collect_prompts as collect_prompts
from ferrohook.engines.sglang.supported import CAPABILITIES as CAPABILITIES
from ferrohook.engines.wire import Captured as Captured

__all__ = [
    "CAPABILITIES",
    "Captured",
    "activations",
    "custom_params",
    "drop_dictionaries",
    "drop_vectors",
    "put_dictionaries",
    "put_vectors",
]
