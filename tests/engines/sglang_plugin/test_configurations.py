"""Schedulers of other configurations, each in a separate process, as one process has one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

TESTS = Path(__file__).parents[2]


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
    command = [sys.executable, "-W", "ignore", "-m", "support.sglang_random", "--kind", kind]
    command += ["--requests", str(number), "--options", json.dumps(options)]
    ran = subprocess.run(
        command,
        cwd=TESTS,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["answered"] == number
    assert found["retractions"] > 0
    assert found["wrong_plans"] == {}
    assert found["open"] == 0
