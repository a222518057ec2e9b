"""Shapes of vLLM's objects, for tests without an engine."""

from __future__ import annotations

import types
from typing import Any


def config(**changes: Any) -> Any:
    """The parts of a `VllmConfig` that are read."""
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "local_engines_only": False,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "use_sequence_parallel_moe": False,
        "use_ubatching": False,
    }
    by_transformers = changes.pop("by_transformers", False)
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(
            **{name: changes.pop(name, value) for name, value in parallel.items()}
        ),
        model_config=types.SimpleNamespace(
            is_encoder_decoder=False,
            runner_type="generate",
            is_diffusion=False,
            enable_sleep_mode=changes.pop("enable_sleep_mode", False),
            using_transformers_backend=lambda: by_transformers,
        ),
        cache_config=types.SimpleNamespace(kv_sharing_fast_prefill=False),
        compilation_config=types.SimpleNamespace(
            **{name: changes.pop(name, 0) for name in ("mode", "cudagraph_mode")}
        ),
        device_config=types.SimpleNamespace(device_type=changes.pop("device_type", "cpu")),
        scheduler_config=types.SimpleNamespace(
            max_num_seqs=8,
            max_num_batched_tokens=32,
            async_scheduling=changes.pop("async_scheduling", False),
        ),
        **{
            "speculative_config": None,
            "kv_transfer_config": None,
            "additional_config": {},
            **changes,
        },
    )
