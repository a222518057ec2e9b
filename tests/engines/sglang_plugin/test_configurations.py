"""Schedulers of other configurations, each in a separate process, as one process has one."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

from support.quantity_plans import ABSENT
from support.scripts import result_of
from support.smollm2 import saved


def served(
    kind: str, requests: int, options: dict[str, object], environment: dict[str, str]
) -> dict[str, Any]:
    """Serves random requests and all plans of quantities; returns what came of them, all right."""
    arguments = ["--kind", kind, "--requests", str(requests), "--options", json.dumps(options)]
    found = result_of("support.sglang_random", *arguments, **environment)
    assert found["wrong"] == []
    assert found["answered"] == requests
    assert found["wrong_plans"] == {}
    assert {*found["differing"]} <= ABSENT
    assert found["open"] == 0
    return found


@pytest.mark.parametrize(
    ("kind", "options", "environment"),
    [
        (
            "qwen2",
            {"page_size": 16, "disable_overlap_schedule": True},
            {"SGLANG_TEST_RETRACT": "1"},
        ),
        (
            "llama",
            {"disable_radix_cache": True, "chunked_prefill_size": 16, "enable_mixed_chunk": True},
            {"SGLANG_TEST_RETRACT": "1", "SGLANG_ENABLE_TORCH_INFERENCE_MODE": "1"},
        ),
        ("llama", {"model_impl": "transformers"}, {"SGLANG_TEST_RETRACT": "1"}),
    ],
)
def test_random_requests(
    kind: str,
    options: dict[str, object],
    environment: dict[str, str],
    request: pytest.FixtureRequest,
) -> None:
    number = request.config.getoption("requests") or 40
    found = served(kind, number, options, environment)
    assert found["retractions"] > 0


@pytest.mark.parametrize(("kind", "number"), [("mixtral", 0), ("qwen3_moe", 10), ("glm4_moe", 0)])
def test_mixtures_of_experts(kind: str, number: int) -> None:
    """Random requests name modules by transformers' paths, which Mixtral does not have here."""
    served(kind, number, {"chunked_prefill_size": 16, "enable_mixed_chunk": True}, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_was_trained(dtype: str) -> None:
    """Its stream has massive activations, which random ones lack."""
    saved()  # skips without its weights
    found = result_of("support.sglang_trained", dtype)
    assert {*found["differing"]} <= ABSENT
    assert found["wrong_plans"] == {}
