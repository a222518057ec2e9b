"""Releases of SGLang that were tried, and the configurations that are refused."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from ferrohook.engines.support import Capabilities

CAPABILITIES: Final = Capabilities(
    engine="sglang",
    version=importlib.metadata.version("sglang"),
    tried=("0.5.23",),
    served=(
        "interventions and captures of a request, at positions",
        "any module that runs once per forward, gates, stop() and routes",
        "features of uploaded dictionaries",
        "chunked prompts, mixed chunks, the radix cache, retraction, aborts, overlap scheduling",
        "several answers to a prompt (n > 1), each with captures of its own",
        "structured outputs, and weights that are replaced in place",
        "in process, and over HTTP through custom_params",
    ),
    refused={
        "python functions": "plans are sent between processes as JSON",
        "tensor parallelism": "a layer's output may be a partial sum; not tested",
        "pipeline parallelism": "each worker has only some of the layers; not tested",
        "data parallelism": "captures would come from several schedulers; not tested",
        "DP attention": "each worker has only some of the rows, and padding; not tested",
        "context parallelism": "each worker has only some of the rows; not tested",
        "CUDA graphs": "a replayed graph does not run hooks: start with disable_cuda_graph=True",
        "compilation": "a compiled graph does not contain hooks: leave out enable_torch_compile",
        "speculative decoding": "rows of rejected drafts are not tokens; not tested",
        "disaggregated prefill": "a transfer may ignore the plan of a request; not tested",
        "caches outside the device": "they may ignore the plan of a request; not tested",
        "overlapped batches": "a forward has only some of the rows; not tested",
        "diffusion": "a forward reruns tokens that may still change",
        "LoRA": "not tested",
        "memory saver": "tensors of hooks on the device may be released with weights; not tested",
        "sliding windows and states": "values that a failed plan wrote there cannot be zeroed",
        "embedding models": "plans are sent in the sampling parameters",
        "multimodal models": "embeddings are computed before the forward; not tested",
        "the Rust server": "its answers have no captures",
        "beam search": "SGLang does not pass custom_params to the beams",
        "sessions": "one request continues the cache of another, which may have had another plan",
        "prompts as embeddings": "they have no tokens, which the cache is looked up by",
    },
)
"""See `ferrohook.engines.capabilities`."""

_POOLS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Pools of keys and values with a slot per token, the same in all layers."""


def refusals(scheduler: Any, args: Any) -> dict[str, str]:
    """Returns the refused features that a scheduler uses, with the reasons.

    Args:
        scheduler: the `Scheduler`.
        args: its `ServerArgs`.
    """
    runner, config = scheduler.tp_worker.model_runner, scheduler.model_config

    def has(*names: str) -> bool:
        return any(getattr(args, name, None) for name in names)

    def several(*names: str) -> bool:
        return any((getattr(args, name, None) or 1) > 1 for name in names)

    graphs = (runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner)
    used = {
        "tensor parallelism": several("tp_size"),
        "pipeline parallelism": several("pp_size"),
        "data parallelism": several("dp_size"),
        "DP attention": has("enable_dp_attention"),
        "context parallelism": several("attn_cp_size", "dcp_size"),
        "CUDA graphs": any(each is not None and not _is_eager(each) for each in graphs),
        "compilation": has("enable_torch_compile"),
        "speculative decoding": has("speculative_algorithm"),
        "disaggregated prefill": getattr(args, "disaggregation_mode", "null") != "null",
        "caches outside the device": has(
            "enable_hierarchical_cache",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
        ),
        "overlapped batches": has(
            "enable_two_batch_overlap", "enable_single_batch_overlap", "enable_pdmux"
        ),
        "diffusion": has("dllm_algorithm"),
        "LoRA": has("enable_lora", "lora_paths"),
        "memory saver": has("enable_memory_saver"),
        "sliding windows and states": type(runner.token_to_kv_pool).__name__ not in _POOLS,
        "embedding models": not scheduler.is_generation,
        "multimodal models": bool(config.is_multimodal),
        "the Rust server": getattr(scheduler, "rust_server", None) is not None,
        "sessions": has("enable_session_radix_cache", "enable_streaming_session"),
    }
    return {feature: CAPABILITIES.refused[feature] for feature, is_used in used.items() if is_used}


def _is_eager(runner: Any) -> bool:
    return type(runner).__name__ == "EagerRunner"
