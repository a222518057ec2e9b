"""vLLM with several API servers: a request uses its own vectors."""

from __future__ import annotations

import types
from concurrent.futures import ThreadPoolExecutor
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
from support.serving import wrong_answers
from support.vllm_engine import EOS, WIDTH, Answer
from support.vllm_server import KEY, NEW, body, serving

if TYPE_CHECKING:
    from pathlib import Path

NAMED = """{"version": 1, "entries": [{"type": "on", "what": "model.layers.1",
"hook": {"type": "Add", "vector": {"tensor": "calm"}}}]}"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_vectors_that_one_server_takes_are_those_of_all(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Replaced and dropped under load; each connection comes to one of the servers by chance."""
    monkeypatch.setattr(support.engines, "EOS", EOS)
    folder, model = models["llama"]
    vectors = [torch.linspace(-2, 2, WIDTH).roll(7 * number) for number in range(6)]
    jobs = [Job(PROMPT, (Change(1, fh.Add(vector), None),)) for vector in vectors]
    sent = body(Job(PROMPT)) | {"vllm_xargs": {"ferrohook": NAMED}}

    def ask(method: str, path: str, **sent: Any) -> httpx.Response:
        return httpx.request(method, f"{address}{path}", headers=KEY, timeout=300, **sent)

    def put(number: int) -> None:
        data = safetensors.torch.save({"calm": vectors[number]})
        answer = ask("PUT", "/v1/ferrohook/vectors", content=data)
        assert answer.is_success, answer.text

    def complete(_: int) -> Answer:
        answer = ask("POST", "/v1/completions", json=sent)
        assert answer.is_success, answer.text
        return Answer(answer.json()["choices"][0]["token_ids"], {})

    options = {"api-server-count": 2} | ({"data-parallel-size": ranks} if ranks > 1 else {})
    with serving(folder, tmp_path / "log", **options) as server, ThreadPoolExecutor(8) as pool:
        address = server.address
        put(0)
        for number in range(1, len(vectors)):
            beside = pool.map(complete, range(6))  # on their way, with this vector or the last
            put(number)
            for answer in pool.map(complete, range(6)):
                jobs[number].check(model, answer, NEW)
            for answer in beside:
                last_two = jobs[number - 1 : number + 1]
                wrong = [wrong_answers(model, [job], {0: answer}, NEW) for job in last_two]
                assert [] in wrong
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
