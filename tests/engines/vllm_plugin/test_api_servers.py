"""vLLM with several API servers: a request uses its own vectors."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx
import safetensors.torch

import ferrohook as fh
import support.engines
from ferrohook.engines.vllm import plugin
from ferrohook.engines.vllm.supported import refusals
from support.engine_scenes import PROMPT
from support.engines import Change, Job
from support.vllm_engine import EOS, WIDTH, Answer
from support.vllm_server import KEY, NEW, body, serving

if TYPE_CHECKING:
    from pathlib import Path

NAMED = """{"version": 1, "entries": [{"type": "on", "what": "model.layers.1",
"hook": {"type": "Add", "vector": {"tensor": "calm"}}}]}"""


def test_vectors_that_one_server_takes_are_those_of_all(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection comes to one of them by chance."""
    monkeypatch.setattr(support.engines, "EOS", EOS)
    folder, model = models["llama"]

    def ask(method: str, path: str, **sent: Any) -> httpx.Response:
        return httpx.request(method, f"{address}{path}", headers=KEY, timeout=120, **sent)

    with serving(folder, tmp_path / "log", **{"api-server-count": 2}) as server:
        address = server.address
        sent = body(Job(PROMPT)) | {"vllm_xargs": {"ferrohook": NAMED}}
        for number in range(4):
            vector = torch.linspace(-2, 2, WIDTH).roll(number * 7)
            data = safetensors.torch.save({"calm": vector})
            put = ask("PUT", "/v1/ferrohook/vectors", content=data)
            assert put.is_success, put.text
            job = Job(PROMPT, (Change(1, fh.Add(vector), None),))
            for _ in range(6):
                answer = ask("POST", "/v1/completions", json=sent)
                assert answer.is_success, answer.text
                job.check(model, Answer(answer.json()["choices"][0]["token_ids"], {}), NEW)
        assert ask("GET", "/v1/ferrohook/vectors").json() == {"calm": [WIDTH]}
        assert ask("DELETE", "/v1/ferrohook/vectors/calm").is_success
        for _ in range(6):
            answer = ask("POST", "/v1/completions", json=sent)
            assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
            assert "no vector 'calm' was uploaded" in answer.text
        kept = fh.Plan(fh.keep("model.norm")).to_json()
        answer = ask("POST", "/v1/completions", json=sent | {"vllm_xargs": {"ferrohook": kept}})
        assert answer.status_code == httpx.codes.BAD_REQUEST
        assert "captures with several API servers is refused" in answer.text


def test_data_parallelism_with_a_load_balancer_of_others_is_refused(models: Any) -> None:
    """An engine core of a model without experts takes itself for the only one."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    model, hybrid = str(models["llama"][0]), {"hybrid data parallelism"}
    for changes, refused in (
        ({}, set()),
        ({"data_parallel_hybrid_lb": True, "data_parallel_start_rank": 0}, hybrid),
    ):
        sizes = {"data_parallel_size": 4, "data_parallel_size_local": 2, **changes}
        config = EngineArgs(model=model, enforce_eager=True, **sizes).create_engine_config()
        assert refusals(config).keys() == refused | {"data parallelism of experts"}
        config.parallel_config.reconfigure_for_independent_dp_rank()
        assert refusals(config).keys() == refused


def test_one_rank_that_refuses_plans_refuses_them_for_all(models: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    config = EngineArgs(model=str(models["llama"][0])).create_engine_config()
    engine = types.SimpleNamespace(vllm_config=config)
    answers = [b'{"modules": {}, "secret": ""}', b'{"refused": "its self-test failed"}']
    with pytest.raises(fh.HookError, match="its self-test failed"):
        plugin._connected(engine, answers, serves=True)
