"""A model that was trained, in vLLM: its stream has massive activations, which random ones lack."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

from ferrohook.engines.vllm.plugin import connect
from support.quantity_plans import ABSENT, differing
from support.smollm2 import loaded, saved, wrong_plans
from support.vllm_engine import serve_plans, start, stop


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_has_the_quantities_and_answers_of_transformers(dtype: str) -> None:
    model = loaded(dtype)
    llm = start(saved(), dtype=dtype, kv_cache_memory_bytes=2**28)
    try:
        assert differing(model, connect(llm).modules.named.table) <= ABSENT
        assert wrong_plans(model, lambda asked: serve_plans(llm, asked)) == {}
    finally:
        stop(llm)
