"""Releases of transformers that were tried, and the configurations that are refused."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers

from ferrohook.engines.support import Capabilities

CAPABILITIES: Final = Capabilities(
    engine="transformers",
    version=transformers.__version__,
    tried=("5.19", "5.23", "5.24"),
    served=(
        "python hooks",
        "interventions",
        "captures",
        "positions",
        "chunked prefill",
        "prefix sharing",
        "preemption",
        "forks",
        "cancelling",
        "streaming",
    ),
    refused={
        "CUDA graphs": (
            "a replayed graph does not run hooks; pass "
            "ContinuousBatchingConfig(use_cuda_graph=False)"
        ),
        "compilation": (
            "hooks that are registered after a compilation may not fire; pass neither "
            "varlen_compile_config, decode_compile_config nor default_compile_level"
        ),
        "tensor parallelism": "not tested: the tensors of a module may be shards",
        "float16 with eager attention": (
            "products of one request's queries and another's keys may overflow, and masks do not "
            'hide that; load the model with attn_implementation="sdpa" or in bfloat16'
        ),
    },
)


def check_features(manager: Any) -> None:
    """Refuses a manager that is set up for a feature among `CAPABILITIES.refused`.

    Raises:
        HookError: it is.
    """
    config, model = manager.continuous_batching_config, manager.model
    eager = "eager" in str(model.config._attn_implementation)
    for feature, is_used in (
        ("CUDA graphs", any(config.cuda_graph_booleans)),
        ("compilation", config.varlen_compile_config or config.decode_compile_config),
        ("tensor parallelism", manager.distributed_helper.tp_size > 1),
        ("float16 with eager attention", model.dtype == torch.float16 and eager),
    ):
        if is_used:
            CAPABILITIES.refuse(feature)
