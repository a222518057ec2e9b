"""SGLang's `Engine`, whose scheduler and detokenizer run in separate processes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

import ferrohook as fh
import support.engines
from ferrohook.engines import sglang
from ferrohook.engines.sglang import front_end
from ferrohook.engines.sglang.supported import CAPABILITIES
from ferrohook.engines.wire import GATES
from ferrohook.gates.streaming import extend, numbers_of
from support.dictionary_jobs import dictionaries, random_feature_jobs
from support.engine_scenes import Given
from support.engines import Change, Job
from support.feature_tables import check_features
from support.serving import EOS, WIDTH, Answer, random_jobs, save_model
from support.sglang_engine import ENVIRONMENT, OPTIONS
from support.sglang_server import NEW, custom

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ferrohook.gates.streaming import GateValues

PROMPT = [*range(10, 60)]
VECTOR = torch.linspace(-2, 2, WIDTH)
TESTS = {
    "several answers to a prompt (`n > 1`)": (
        "test_sglang_engine.py::test_the_prompt_of_several_answers_is_captured_once"
    ),
    "structured outputs": "test_sglang_server.py::test_structured_outputs",
    "weights replaced in place": "test_sglang_engine.py::test_weights_replaced_in_place",
    "beam search": "test_sglang_engine.py::test_beams_are_refused",
    "LoRA": "test_scheduler.py::test_configurations_are_refused_by_name",
    "data parallelism": "test_scheduler.py::test_configurations_are_refused_by_name",
    "embedding models": "test_scheduler.py::test_configurations_are_refused_by_name",
    "other routes, such as `/v1/responses` and `/v1/realtime`": (
        "test_sglang_server.py::test_each_route_serves_a_plan_whole_or_refuses_it"
    ),
    "memory saver": "test_scheduler.py::test_configurations_are_refused_by_name",
}
"""Test of each row of the page's table."""
JOB = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),), ("model.layers.1", "model.norm"))


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def engine(llama: Any) -> Iterator[Any]:
    """Runs after all tests that use the scheduler of this process, whose settings it replaces.

    Its end kills all children of this process, hence the separate file.
    """
    os.environ.update(ENVIRONMENT)
    from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415 (reads the environment)

    made = Engine(model_path=str(llama[0]), **OPTIONS)
    yield made
    made.shutdown()


def params(plan: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": NEW, **custom(plan)}


def check(llama: Any, job: Job, given: dict[str, Any]) -> None:
    acts = sglang.activations(given).acts if job.captures else {}
    job.check(llama[1], Answer([*given["output_ids"]], acts), NEW)


def test_plans_and_captures(llama: Any, engine: Any) -> None:
    jobs = (JOB, Job(PROMPT))
    asked = [params(job.plan) for job in jobs]
    given = engine.generate(input_ids=[PROMPT, PROMPT], sampling_params=asked)
    for job, each in zip(jobs, given, strict=True):
        check(llama, job, each)
    *_, last = engine.generate(input_ids=PROMPT, sampling_params=asked[0], stream=True)
    check(llama, JOB, last)


def test_streams_carry_the_values_of_gates(llama: Any, engine: Any) -> None:
    """Each request streams its own values, beside one without a plan."""
    jobs = [it for it in random_jobs(24, seed=3, gates=1.0) if it.gated][:6]
    asked = [*map(params, [*(job.plan for job in jobs), None])]
    prompts = [*(job.prompt for job in jobs), PROMPT]
    last: dict[int, Any] = {}
    streamed: dict[int, list[Any]] = {}
    for each in engine.generate(input_ids=prompts, sampling_params=asked, stream=True):
        last[each["index"]] = each
        streamed.setdefault(each["index"], []).append(each["meta_info"].get(GATES))
    assert len(streamed) == len(prompts)
    assert not any(streamed.pop(len(jobs)))
    assert not {GATES, "ferrohook_captures"} & last[len(jobs)]["meta_info"].keys()
    for number, chunks in streamed.items():
        check(llama, jobs[number], last[number])
        joined: GateValues = {}
        for each in filter(None, chunks):
            extend(joined, each)
        captured = sglang.activations(last[number])
        assert sum(map(bool, chunks)) >= len(last[number]["output_ids"]) // 2
        assert joined["g"]["positions"] == captured.positions["@gate.g"].tolist()
        values = torch.tensor(numbers_of(joined["g"]))
        torch.testing.assert_close(values, captured.acts["@gate.g"], rtol=0, atol=0, equal_nan=True)


def test_incremental_streams_have_all_captures(
    llama: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is streamed once."""
    monkeypatch.setattr(engine.tokenizer_manager, "incremental_streaming_output", True)
    jobs = random_jobs(8, seed=3, gates=0.5)
    asked = [params(job.plan) for job in jobs]
    texts: list[list[int]] = [[] for _ in jobs]
    last: dict[int, Any] = {}
    prompts = [job.prompt for job in jobs]
    for each in engine.generate(input_ids=prompts, sampling_params=asked, stream=True):
        texts[each["index"]] += each["output_ids"]
        last[each["index"]] = each
    assert max(map(len, texts)) > 2
    for number, (job, text) in enumerate(zip(jobs, texts, strict=True)):
        check(llama, job, {**last[number], "output_ids": text})


def answers(engine: Any, jobs: list[Job], n: int) -> list[Any]:
    """Asks for n answers to each of some prompts, sampled."""
    asked = [params(job.plan) | {"n": n, "temperature": 1.0} for job in jobs]
    found: list[Any] = engine.generate(
        input_ids=[job.prompt for job in jobs], sampling_params=asked
    )
    assert len(found) == n * len(jobs)
    return found


def cached(llama: Any, jobs: list[Job], given: list[Any]) -> list[int]:
    """Returns the tokens that answers read from the cache; their captures must be right."""
    n = len(given) // len(jobs)
    for number, each in enumerate(given):
        job = jobs[number // n]
        acts = sglang.activations(each).acts if job.captures else {}
        job.check_acts(llama[1], Answer([*each["output_ids"]], acts))
    return [each["meta_info"]["cached_tokens"] for each in given]


def test_the_prompt_of_several_answers_is_captured_once(
    llama: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Change(1, fh.Add(VECTOR), "generated")
    jobs = [
        Job([each, *PROMPT[1:]], (change,), JOB.kept)
        for each, change in ((3, later), (4, JOB.changes[0]), (5, later))
    ]
    whole = len(PROMPT) - 1  # the last token runs for its logits
    given = answers(engine, jobs, 3)
    assert cached(llama, jobs, given) == [whole] * 9
    assert len({tuple(each["output_ids"]) for each in given}) == 9
    assert cached(llama, [jobs[0]] * 2, answers(engine, [jobs[0]] * 2, 2)) == [whole] * 4
    monkeypatch.setattr(front_end, "ANSWERS", "another key")
    assert cached(llama, jobs, answers(engine, jobs, 3)) == [0] * 9


def test_several_answers_to_random_requests(llama: Any, engine: Any) -> None:
    """Whose gates read the prompt themselves."""
    jobs = [job for job in random_jobs(36, seed=5, gates=0.5) if job.plan is not None]
    cached(llama, jobs, answers(engine, jobs, 3))
    for job in jobs[:6]:
        cached(llama, [job], answers(engine, [job], 4))


def test_weights_replaced_in_place(llama: Any, engine: Any, tmp_path: Path) -> None:
    model = save_model("llama", tmp_path, seed=1)
    engine.update_weights_from_disk(str(tmp_path))
    try:
        check(
            (tmp_path, model),
            JOB,
            engine.generate(input_ids=PROMPT, sampling_params=params(JOB.plan)),
        )
    finally:
        engine.update_weights_from_disk(str(llama[0]))
    check(llama, JOB, engine.generate(input_ids=PROMPT, sampling_params=params(JOB.plan)))


def test_beams_are_refused(engine: Any) -> None:
    """SGLang gives them other parameters, without the plan."""
    asked = params(JOB.plan) | {"beam_width": 2}
    with pytest.raises(ValueError, match="beam search is not supported"):
        engine.generate(input_ids=PROMPT, sampling_params=asked)


def test_each_row_of_the_page_is_tested() -> None:
    check_features("sglang", TESTS, CAPABILITIES.refused)


def test_several_answers_without_tokens_are_refused(engine: Any) -> None:
    asked = params(JOB.plan) | {"n": 2, "max_new_tokens": 0}
    with pytest.raises(ValueError, match="n > 1 needs new tokens"):
        engine.generate(input_ids=PROMPT, sampling_params=asked)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (fh.keep("model.layers.99"), "closest names"),
        (fh.keep("model.layers.1", max_bytes=1), "max_bytes"),
    ],
)
def test_plans_that_are_bad_or_fail(engine: Any, entry: Any, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        engine.generate(input_ids=PROMPT, sampling_params=params(fh.Plan(entry)))


def test_vectors_by_name(llama: Any, engine: Any) -> None:
    sglang.put_vectors(engine, {"calm": VECTOR})
    hook = {"type": "Add", "vector": {"tensor": "calm"}}
    entries = [{"type": "on", "what": "model.layers.1", "hook": hook}]
    asked = params(json.dumps({"version": 1, "entries": entries}))
    job = Job(PROMPT, JOB.changes)
    check(llama, job, engine.generate(input_ids=PROMPT, sampling_params=asked))
    sglang.drop_vectors(engine, ["calm"])
    with pytest.raises(KeyError):
        sglang.drop_vectors(engine, ["calm"])
    with pytest.raises(ValueError, match="no vector 'calm' was uploaded; uploaded: none"):
        engine.generate(input_ids=PROMPT, sampling_params=asked)
    with pytest.raises(fh.HookTypeError, match="the vector 'calm' must be a tensor"):
        sglang.put_vectors(engine, {"calm": [1.0]})  # type: ignore[dict-item]


def test_dictionaries_by_name(llama: Any, engine: Any) -> None:
    made = dictionaries()
    sglang.put_dictionaries(engine, made.values())
    jobs = random_feature_jobs(4)

    def ask() -> Any:
        asked = [params(job.plan) for job in jobs]
        return engine.generate(input_ids=[job.prompt for job in jobs], sampling_params=asked)

    for job, each in zip(jobs, ask(), strict=True):
        job.check(llama[1], Given([*each["output_ids"]], *sglang.activations(each), 0))
    sglang.drop_dictionaries(engine, [each.name for each in made.values()])
    with pytest.raises(KeyError):
        sglang.drop_dictionaries(engine, ["sae/relu"])
    with pytest.raises(ValueError, match=r"no dictionary 'sae/\w+' was uploaded; uploaded: none"):
        ask()
