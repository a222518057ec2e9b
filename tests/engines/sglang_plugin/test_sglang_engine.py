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
from ferrohook.engines.wire import GATES
from ferrohook.gates.streaming import extend, numbers_of
from support.dictionary_jobs import dictionaries, random_feature_jobs
from support.engine_scenes import Given
from support.engines import Change, Job
from support.serving import EOS, WIDTH, Answer, random_jobs
from support.sglang_engine import ENVIRONMENT, OPTIONS
from support.sglang_server import NEW, custom

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrohook.gates.streaming import GateValues

PROMPT = [*range(10, 60)]
VECTOR = torch.linspace(-2, 2, WIDTH)
JOB = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),), ("model.layers.1", "model.norm"))


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def engine(llama: Any) -> Iterator[Any]:
    """Comes behind all that use the scheduler of this process, whose settings it replaces.

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
    """Of each request its own, beside one without a plan."""
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
    """They carry each token once."""
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
