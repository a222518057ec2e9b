"""Plans for requests of vLLM: a plug-in that vLLM finds by its entry point.

Examples:
    >>> from ferrohook.engines.vllm import activations, extra_args
    >>> steer = fh.on("model.layers.5", fh.Add(vector))
    >>> plan = fh.Plan(steer, fh.keep("model.layers.*"))
    >>> params = SamplingParams(extra_args=extra_args(plan))
    >>> (output,) = llm.generate(prompt, params)
    >>> activations(llm, output).acts["model.layers.3"].shape
    torch.Size([31, 4096])
"""

from __future__ import annotations

from ferrohook.engines.vllm.clients import activations as activations
from ferrohook.engines.vllm.clients import drop_dictionaries as drop_dictionaries
from ferrohook.engines.vllm.clients import drop_vectors as drop_vectors
from ferrohook.engines.vllm.clients import extra_args as extra_args
from ferrohook.engines.vllm.clients import put_dictionaries as put_dictionaries
from ferrohook.engines.vllm.clients import put_vectors as put_vectors
from ferrohook.engines.vllm.harvest import collect_prompts as collect_prompts
from ferrohook.engines.vllm.supported import CAPABILITIES as CAPABILITIES
from ferrohook.engines.wire import Captured as Captured

__all__ = [
    "CAPABILITIES",
    "Captured",
    "activations",
    "drop_dictionaries",
    "drop_vectors",
    "extra_args",
    "put_dictionaries",
    "put_vectors",
]
