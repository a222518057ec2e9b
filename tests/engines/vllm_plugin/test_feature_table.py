"""Features of vLLM beside plans, in this process: each served as the page has it, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from ferrohook.engines.vllm.plugin import register
from ferrohook.engines.vllm.supported import CAPABILITIES
from support.engines import Change, Job
from support.feature_tables import check_features
from support.serving import WIDTH, Answer, save_model
from support.vllm_engine import EOS, sampling

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEW = 12
PROMPT = [*range(10, 80)]
JOB = Job(
    PROMPT,
    (Change(1, fh.Add(torch.linspace(-2, 2, WIDTH)), "generated"),),
    ("model.layers.2",),
)
TESTS = {
    "LoRA adapters": "test_lora.py::test_plans_on_a_model_with_an_adapter",
    "several API servers": "test_api_servers.py::test_random_requests",
    "data parallelism": "test_api_servers.py::test_failures_come_from_all_ranks",
    "structured outputs": "test_feature_table.py::test_structured_outputs",
    "several answers to a prompt (`n > 1`)": (
        "test_answers.py::test_answers_are_those_of_requests_for_one_answer"
    ),
    "`/v1/responses`": "test_server.py::test_each_route_serves_a_plan_whole_or_refuses_it",
    "pauses": "test_feature_table.py::test_a_pause",
    "weights replaced in place": "test_feature_table.py::test_weights_replaced_in_place",
    "beam search": "test_server.py::test_beam_search_and_chats_refuse_what_they_would_drop",
    "pooling models": "test_feature_table.py::test_pooling_refuses_a_plan",
    "other routes, such as `/v1/embeddings`": (
        "test_server.py::test_each_route_serves_a_plan_whole_or_refuses_it"
    ),
    "WebSockets, such as `/v1/realtime`": "test_feature_table.py::test_realtime_refuses_a_plan",
    "sleep mode": "test_plugin.py::test_configurations_are_refused_by_name",
}
"""Test of each row of the page's table."""


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


def test_each_row_of_the_page_is_tested() -> None:
    check_features("vllm", TESTS, CAPABILITIES.refused)


def taken(llm: Any, output: Any) -> Answer:
    acts = vllm.activations(llm, output).acts
    return Answer([*output.outputs[0].token_ids], acts)


def test_structured_outputs(models: Any, llm: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

    choices = ["w5w6w7", "w8w9"]  # as the grammar joins words
    params = sampling(JOB.plan, NEW, structured_outputs=StructuredOutputsParams(choice=choices))
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert output.outputs[0].text.replace(" ", "") in choices
    JOB.check_acts(models["llama"][1], taken(llm, output))


def test_a_pause(models: Any, llm: Any) -> None:
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    engine.add_request("paused", {"prompt_token_ids": PROMPT}, sampling(JOB.plan, NEW))
    for _ in range(4):
        engine.step()
    core.pause_scheduler("keep")
    for _ in range(3):
        assert engine.step() == []
    core.resume_scheduler()
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += (each for each in engine.step() if each.finished)
    JOB.check(models["llama"][1], taken(llm, outputs[0]), NEW)


@pytest.fixture
def replaced(llm: Any, models: Any, tmp_path: Path) -> Iterator[Any]:
    """A model whose weights the engine has now."""
    model = save_model("llama", tmp_path, seed=1)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
    llm.reset_prefix_cache()
    yield model
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models["llama"][0])})
    llm.reset_prefix_cache()


def test_weights_replaced_in_place(models: Any, llm: Any, replaced: Any) -> None:
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling(JOB.plan, NEW), use_tqdm=False)
    answer = taken(llm, output)
    JOB.check(replaced, answer, NEW)
    with pytest.raises(AssertionError):
        JOB.check(models["llama"][1], answer, NEW)


def test_pooling_refuses_a_plan(llm: Any) -> None:
    """vLLM would take it for an argument of its pooler, and ignore it."""
    from vllm import PoolingParams  # noqa: PLC0415

    params = PoolingParams(task="embed", extra_kwargs=vllm.extra_args(fh.Plan(JOB.plan.entries[0])))
    with pytest.raises(ValueError, match="pooling models is not supported with vllm"):
        llm.llm_engine.add_request("pooled", {"prompt_token_ids": PROMPT}, params)


def test_realtime_refuses_a_plan() -> None:
    """vLLM's route takes the model of its `session.update`, and ignores all other fields."""
    from vllm.entrypoints.speech_to_text.realtime import api_router  # noqa: PLC0415

    register()
    app = FastAPI()
    app.include_router(api_router.router)
    app.state.args = None  # one of vLLM's
    app.state.openai_serving_realtime = SimpleNamespace(
        model_config=SimpleNamespace(), _is_model_supported=lambda _model: True
    )
    update = {"type": "session.update", "model": "m"}
    with TestClient(app).websocket_connect("/v1/realtime") as socket:
        assert socket.receive_json()["type"] == "session.created"
        socket.send_json(update)
        socket.send_json({"type": "unknown"})
        assert socket.receive_json()["code"] == "unknown_event"  # the update was taken
        socket.send_json({**update, "vllm_xargs": vllm.extra_args(JOB.plan)})
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
    assert (closed.value.code, closed.value.reason) == (
        1008,
        "ferrohook plans are not supported here",
    )
