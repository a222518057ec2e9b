"""Releases of vLLM that were tried, and the configurations that are refused."""

from __future__ import annotations

import importlib
import re
from typing import Any, Final, NoReturn

from ferrohook.engines.support import Capabilities

_METHODS: Final = ("ngram", "suffix", "draft_model", "eagle")
"""Methods of speculative decoding whose drafts are served."""
CAPABILITIES: Final = Capabilities(
    engine="vllm",
    version=importlib.import_module("vllm").__version__,
    tried=("0.32", "0.33"),
    served=(
        "interventions and captures of a request, at positions",
        "interventions under conditions, gates, stop() and features of uploaded dictionaries",
        "eager engines: any module that runs once per forward, and routes",
        "compiled engines: the outputs of the modules named as sites",
        "chunked prefill, prefix caching, preemption, aborts, async scheduling",
        "speculative decoding by ngram, suffix, draft models and EAGLE",
        "data parallelism with vLLM's own load balancer, for models without experts",
        "tensor parallelism, for modules that have the same tensors on all ranks",
        "compiled engines with piecewise CUDA graphs, for the sites that pass the self-test",
        "several answers to a prompt (n > 1), each with captures of its own",
        "LoRA adapters, structured outputs, several API servers",
        "pauses, and weights that are replaced in place",
        "in process, and over HTTP through vllm_xargs",
    ),
    refused={
        "python functions": "plans are sent between processes as JSON",
        "pipeline parallelism": "each worker has only some of the layers; not tested",
        "data parallelism of experts": (
            "its ranks step together, which CPUs do not support; not tested"
        ),
        "hybrid data parallelism": "your load balancer may send an upload to one server and the "
        "requests to another; not tested",
        "context parallelism": "each worker has only some of the rows; not tested",
        "sequence parallelism": "each worker has only some of the rows; not tested",
        "microbatches": "a forward has only some of the rows; not tested",
        "adaptive verification of drafts": "only the device knows the rows of each request: start "
        "with enable_adaptive_verification=False in speculative_config",
        "drafts by other methods": "only these were tested: " + ", ".join(_METHODS),
        "KV transfer": "a connector may ignore the cache salt of a plan; not tested",
        "fast prefill with shared KV": "layers skip rows of the prompt",
        "encoders and decoders": "rows of the encoder are not positions of the request",
        "pooling models": "plans are sent in SamplingParams",
        "compilation without sites": "vLLM's graph does not contain hooks: name the modules with "
        "additional_config={'ferrohook': {'sites': 'model.layers.*'}}, "
        "or enforce_eager=True",
        "compilation of transformers' models": "sites must be tensors of shape (tokens, width), "
        "but theirs have one more dimension: start with "
        "enforce_eager=True",
        "full CUDA graphs": "a replay does not run Python, and so no hooks: start with "
        "compilation_config={'cudagraph_mode': 'PIECEWISE'}, whose graphs are cut at the sites, "
        "with 'NONE', or with enforce_eager=True",
        "sleep mode": "tensors of hooks on the device may be discarded with weights; not tested",
        "diffusion": "a forward reruns tokens that may still change",
        "beam search": "vLLM does not pass extra_args to the beams",
        "streamed inputs": "the length of the prompt is not final",
    },
)
"""See `ferrohook.engines.capabilities`."""


def is_newer() -> bool:
    """True if the installed release is newer than the tried ones."""
    return _numbers(CAPABILITIES.version) > max(map(_numbers, CAPABILITIES.tried))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# An untried release may have another.
_CLIENT_ERROR: Any = getattr(
    importlib.import_module("vllm.exceptions"), "VLLMValidationError", Exception
)


class BadPlanError(_CLIENT_ERROR, ValueError):  # type: ignore[misc]  # vLLM has no types here
    """Plan with which a request must not be scheduled: vLLM answers 400."""


def refuse(feature: str) -> NoReturn:
    """Refuses the plan of a request that uses a refused feature.

    Raises:
        BadPlanError: always.
    """
    msg = f"{feature} is not supported with vllm: {CAPABILITIES.refused[feature]}"
    raise BadPlanError(msg)


def refusals(config: Any, *, has_sites: bool = False) -> dict[str, str]:
    """Returns the refused features that a `VllmConfig` uses, with the reasons.

    Args:
        config: the `VllmConfig`.
        has_sites: modules were named that a compiled engine serves.
    """
    parallel, compilation = config.parallel_config, config.compilation_config
    model, cache = config.model_config, config.cache_config
    drafts = config.speculative_config
    graphs = getattr(compilation.cudagraph_mode, "name", "NONE")
    used = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        # The engine cores of a model without experts are on their own: each says that it is one.
        "data parallelism of experts": parallel.data_parallel_size > 1,
        "hybrid data parallelism": parallel.local_engines_only,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "sequence parallelism": bool(parallel.use_sequence_parallel_moe),
        "microbatches": bool(parallel.use_ubatching),
        "adaptive verification of drafts": drafts is not None
        and bool(drafts.enable_adaptive_verification),
        "drafts by other methods": drafts is not None and drafts.method not in _METHODS,
        "KV transfer": config.kv_transfer_config is not None,
        "fast prefill with shared KV": bool(cache.kv_sharing_fast_prefill),
        "encoders and decoders": bool(model.is_encoder_decoder),
        "pooling models": model.runner_type != "generate",
        "compilation without sites": bool(compilation.mode) and not has_sites,
        "compilation of transformers' models": bool(compilation.mode)
        and model.using_transformers_backend(),
        # Only vLLM's compiler cuts graphs at sites.
        "full CUDA graphs": graphs not in {"NONE", "PIECEWISE"}
        or (graphs == "PIECEWISE" and not compilation.mode),
        "sleep mode": bool(model.enable_sleep_mode),
        "diffusion": bool(model.is_diffusion),
    }
    return {feature: CAPABILITIES.refused[feature] for feature, is_used in used.items() if is_used}
