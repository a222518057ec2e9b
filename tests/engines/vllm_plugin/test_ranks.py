"""vLLM on two ranks of a CPU: plans act on all of them, the first one captures."""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from ferrohook.engines.model.modules import ModuleTable
from ferrohook.engines.vllm import self_test
from ferrohook.engines.vllm.calls import call
from support.engines import Change, Job
from support.vllm_engine import (
    EOS,
    LAYERS,
    WIDTH,
    Answer,
    random_jobs,
    sampling,
    serve,
    serve_at_once,
    start,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NEW = 12
PROMPT = [*range(10, 50)]
served = functools.partial(serve_at_once, prompt=PROMPT, new_tokens=NEW)
VECTOR = torch.linspace(-2, 2, WIDTH)
STEERED = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),))


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def engine(models: Any) -> Iterator[Any]:
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        made = start(models["llama"][0], tensor_parallel_size=2)
    yield made
    stop(made)


def states(engine: Any) -> list[dict[str, int]]:
    return [json.loads(each) for each in call(engine, "state")]


def check(model: Any, job: Job, output: Any) -> None:
    job.check(model, Answer([*output.outputs[0].token_ids], {}), NEW)


def test_random_requests(models: Any, engine: Any, request: pytest.FixtureRequest) -> None:
    _, model = models["llama"]
    jobs = random_jobs(request.config.getoption("requests") or 36, seed=83, gates=0.3)
    before = states(engine)[0]["steps"]
    answers = serve(engine, jobs, seed=89)
    assert len(answers) == len(jobs)
    for number, job in enumerate(jobs):
        job.check(model, answers[number], NEW)
    first, second = states(engine)
    assert first == second
    assert first["steps"] > before
    assert first["results"] == 0


def test_the_first_rank_captures(engine: Any) -> None:
    outputs = served(engine, {"kept": fh.Plan(fh.keep("model.layers.1")), "plain": None})
    served(engine, {"next": None})  # the workers learn with it that the others are finished
    assert [each["results"] for each in states(engine)] == [1, 0]
    assert len(vllm.activations(engine, outputs["kept"]).acts["model.layers.1"]) >= len(PROMPT)
    assert [each["results"] for each in states(engine)] == [0, 0]


@pytest.mark.parametrize(
    "shard",
    [
        "self_attn.qkv_proj",
        "self_attn.attn",
        "self_attn.o_proj",  # its input; without a KV cache attention gives all ranks the same
        "mlp.gate_up_proj",
        "mlp.act_fn",
        "mlp.down_proj",
    ],
)
def test_a_module_with_shards_is_refused_by_name(engine: Any, shard: str) -> None:
    plan = fh.Plan(fh.keep(f"model.layers.1.{shard}"))
    with pytest.raises(ValueError, match=rf"'model\.layers\.1\.{shard}' cannot.*tensor parallel"):
        engine.generate({"prompt_token_ids": PROMPT}, sampling(plan), use_tqdm=False)
    assert not engine.llm_engine.has_unfinished_requests()


def test_a_cache_is_shared_within_a_plan_only(models: Any, engine: Any) -> None:
    _, model = models["llama"]
    engine.reset_prefix_cache()
    cached = []
    for job in (STEERED, Job(PROMPT), STEERED, Job(PROMPT)):
        (output,) = served(engine, {"it": job.plan}).values()
        check(model, job, output)
        cached.append(bool(output.num_cached_tokens))
    assert cached == [False, False, True, True]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["admitted", "run"])
def test_a_plan_that_fails_on_one_rank_fails_its_request(
    models: Any, engine: Any, failing: int, when: str
) -> None:
    _, model = models["llama"]
    engine.reset_prefix_cache()
    width = WIDTH

    def spoil(wrapper: Any) -> None:
        import ferrohook  # noqa: PLC0415 (in the worker)

        if wrapper.rpc_rank != failing:
            return
        worker = wrapper.ferrohook
        admit = worker.admit

        def spoilt(
            request_id: str, prompt: int, _digest: str, _read: Any, key: str, **others: Any
        ) -> None:
            worker.admit = admit
            if when == "admitted":
                raise RuntimeError("out of luck")  # noqa: EM101, TRY003
            add = ferrohook.Add(torch.ones(width), output_index=7)  # a layer returns two tensors
            plan = ferrohook.Plan(ferrohook.on("model.layers.1", add))
            admit(request_id, prompt, "spoilt", lambda: plan, key, **others)

        worker.admit = spoilt

    engine.collective_rpc(spoil)
    outputs = served(engine, {"first": STEERED.plan, "second": STEERED.plan, "plain": None})
    (text,) = outputs["first"].outputs
    assert text.finish_reason == "error"
    assert [*text.token_ids] == []
    assert {"admitted": "out of luck", "run": "model.layers.1"}[when] in text.stop_reason
    check(model, STEERED, outputs["second"])
    check(model, Job(PROMPT), outputs["plain"])
    later = served(engine, {"later": STEERED.plan})["later"]
    check(model, STEERED, later)
    served(engine, {"last": None})
    assert [each["requests"] for each in states(engine)] == [0, 0]


def proved(engine: Any) -> Any:
    """Runs the proof in the process of the engine's core."""
    core = engine.llm_engine.engine_core.engine_core
    return self_test.prove(core, json.loads(call(engine, "describe")[0]))


def test_all_ranks_pass_the_self_test(engine: Any) -> None:
    found = proved(engine)
    assert len(found) > LAYERS
    assert all(not any(outcome.values()) for outcome in found.values())
    assert [each["results"] for each in states(engine)] == [0, 0]


def spoil_rows(wrapper: Any, *, only: int, name: str) -> None:
    """Makes one rank answer with the rows of a module moved by one position."""
    worker = wrapper.ferrohook
    if wrapper.rpc_rank != only:
        return
    captured = worker.captured

    def moved(*args: Any, **kwargs: Any) -> Any:
        acts, positions = captured(*args, **kwargs)
        if not worker.is_eager and name in acts:
            acts[name] = acts[name].roll(1, 0)
        return acts, positions

    worker.captured = moved


def keep_table(wrapper: Any) -> None:
    wrapper.kept = wrapper.ferrohook.served


def restore(wrapper: Any) -> None:
    vars(wrapper.ferrohook).pop("captured", None)
    wrapper.ferrohook.served = wrapper.kept


@pytest.mark.parametrize("rank", [0, 1])
def test_a_module_is_refused_that_is_wrong_on_one_rank(engine: Any, rank: int) -> None:
    engine.collective_rpc(keep_table)
    engine.collective_rpc(spoil_rows, kwargs={"only": rank, "name": "model.layers.1"})
    try:
        found = proved(engine)
        assert "differs by" in str(found.pop("model.layers.1")["capture"])
        assert all(not any(outcome.values()) for outcome in found.values())
        described = [json.loads(each) for each in call(engine, "describe")]
        for each in described:
            modules = ModuleTable.from_json(each["modules"])
            assert modules.table["model.layers.1"].refused is not None
            assert modules.table["model.layers.2"].refused is None
    finally:
        engine.collective_rpc(restore)
