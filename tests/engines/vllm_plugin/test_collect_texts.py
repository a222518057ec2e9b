"""`fh.collect` with an engine that generates a text after each prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
from ferrohook.engines import harvest
from support.engines import Change
from support.harvests import NAMES, check, collect, files_in, prompts_of, rows_in
from support.speculation import speculative_config
from support.vllm_engine import (
    LAYERS,
    WIDTH,
    sampling,
    scheduling_ahead,
    start,
    stop,
    texts_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    # Without chunks: with them a seed ends vLLM's V1 on a CPU.
    "sampled": ({"max_num_batched_tokens": 4096}, SAMPLED),
    "drafting": ({"speculative_config": speculative_config("ngram", Path())}, {}),
    "preempting": ({"num_gpu_blocks_override": 14, "max_num_batched_tokens": 40}, {}),
}
"""Options of engines, and of sampling."""


@pytest.fixture(scope="module", params=[*ENGINES])
def engine(request: pytest.FixtureRequest, models: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An engine, and options of its sampling."""
    options, sampled = ENGINES[request.param]
    llm = start(models["llama"][0], **options)
    yield llm, sampled
    stop(llm)


@pytest.mark.v2
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_texts(
    engine: tuple[Any, dict[str, Any]],
    models: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    (llm, sampled), model = engine, models["llama"][1]
    rng = random.Random(seed)  # noqa: S311 (tests)
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    change = Change(rng.randrange(LAYERS), fh.Add(vector), rng.choice([None, 0, "generated"]))
    plan = fh.Plan(fh.on(f"model.layers.{change.layer}", change.hook, at=change.at))
    ends: dict[str, Any] = [{"stop": ["w1", "w30"]}, {}, {"ignore_eos": True}, {}][seed]
    params = sampling(None, [20, 1, 9, 24][seed], **sampled, **ends)
    at = [None, None, slice(5, 100), "generated"][seed]
    prompts = prompts_of(seed, 20)
    prompts[7:9] = prompts[3:5]
    texts = texts_of(llm, prompts, params, plan)
    assert (texts[3] == texts[7]) == (not sampled)
    kept = fh.keep(NAMES, at=at)
    assert collect(llm, prompts, tmp_path, kept, plan=plan, sampling=params) == (20, 0)
    job: dict[str, Any] = {"changes": (change,), "kept_at": at}
    check(rows_in(tmp_path), model, prompts, texts, **job)
    before = files_in(tmp_path)
    if seed != 2:  # where some prompts may have no rows
        assert collect(llm, prompts, tmp_path, kept, plan=plan, sampling=params) == (0, 20)
        assert files_in(tmp_path) == before

    # The control: a worker that takes texts for one token shorter, or for other ones.
    of_client = harvest.Harvest.end_text
    wrong = rng.choice(
        [
            lambda it: it._replace(ids=it.ids[1:], tokens=it.tokens - 1),
            lambda it: it._replace(ids=[each + 1 for each in it.ids]),
        ]
    )
    monkeypatch.setattr(harvest.Harvest, "end_text", lambda it, end: of_client(it, wrong(end)))
    other = tmp_path.with_name(f"{tmp_path.name}-control")
    if seed != 1:  # whose texts of one token have no rows
        collect(llm, prompts, other, kept, plan=plan, sampling=params)
        with pytest.raises((AssertionError, KeyError)):
            check(rows_in(other), model, prompts, texts, **job)


@pytest.mark.parametrize("drafts", [False, True], ids=["", "with drafts"])
def test_a_step_after_the_end_of_a_text_may_fail(models: Any, tmp_path: Path, drafts: bool) -> None:
    """An engine that schedules ahead runs the row of the last token for nothing."""
    folder, model = models["llama"]
    options = {"speculative_config": speculative_config("draft_model", folder)} if drafts else {}
    prompts, rng = prompts_of(3, 12), random.Random(3)  # noqa: S311 (tests)
    with scheduling_ahead():
        llm = start(folder, **options)
    try:
        whole = texts_of(llm, prompts, sampling(None, 20, ignore_eos=True))
        ends = sorted({text[rng.randrange(3, 18)] for text in whole})
        plan = fh.Plan()
        if drafts:  # which have no value of the token before yet
            gate = fh.gate("late", "model.layers.3", fh.Norm(), lag=1, over="token")
            plan = fh.Plan(gate, fh.on("model.layers.1", fh.Zero(), when=fh.above("late", 1e9)))
        else:
            for end in ends:
                word = fh.Cosine(model.model.embed_tokens.weight[end])
                gate = fh.gate(f"{end}", "model.embed_tokens", word, at="generated", over="token")
                spoil = fh.on("model.layers.1", fh.Scale(3e38), when=fh.above(f"{end}", 0.99))
                plan += fh.Plan(gate, spoil)
        params = sampling(None, 20, ignore_eos=True, stop_token_ids=ends)
        texts = texts_of(llm, prompts, params, plan)
        assert all(text[-1] in ends for text in texts)
        assert collect(llm, prompts, tmp_path, plan=plan, sampling=params) == (12, 0)
    finally:
        stop(llm)
    check(rows_in(tmp_path), model, prompts, texts)


def test_resumes_texts_of_the_same_parameters(llm: Any, models: Any, tmp_path: Path) -> None:
    prompts = prompts_of(9, 16)
    params = sampling(None, 12, stop_token_ids=[3, 4, 5])
    texts = texts_of(llm, prompts, params)
    assert collect(llm, prompts[:9], tmp_path, sampling=params) == (9, 0)
    before = files_in(tmp_path)
    error = fh.errors.ResumeError
    changes: list[dict[str, Any]] = [
        {"stop_token_ids": [3]},
        {"max_tokens": 13},
        {"logit_bias": {5: 1.0}},
        {"temperature": 1.0, "seed": 1},
    ]
    for change in changes:
        options = {"stop_token_ids": [3, 4, 5], **change}
        other = sampling(None, options.pop("max_tokens", 12), **options)
        with pytest.raises(error, match="option 'sampling'"):
            collect(llm, prompts, tmp_path, sampling=other)
    with pytest.raises(error, match="option 'sampling'"):
        collect(llm, prompts, tmp_path)
    assert files_in(tmp_path) == before
    assert collect(llm, prompts, tmp_path, sampling=params) == (7, 9)
    check(rows_in(tmp_path), models["llama"][1], prompts, texts)


def test_refuses_sampling(llm: Any, tmp_path: Path) -> None:
    error, type_error = fh.errors.HookError, fh.errors.HookTypeError
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"temperature": 0}, type_error, "sampling must be a SamplingParams or None, got dict"),
        (sampling(temperature=0.5), error, "sampling has seed=None: texts without a seed cannot"),
        (sampling(temperature=1.0, n=2, seed=3), error, "n=2: pass a prompt several times"),
        (sampling(logprobs=0), error, "logprobs=0: collect stores none"),
        (sampling(prompt_logprobs=1), error, "prompt_logprobs=1: collect stores none"),
        (sampling(fh.Plan()), error, "extra_args=.*: pass the plan as plan="),
        (sampling(None, 10**6), ValueError, "capture_bytes"),
    ]
    for given, kind, message in wrong:
        with pytest.raises(kind, match=message):
            collect(llm, [[5, 6]], tmp_path, sampling=given)
    with pytest.raises(error, match="sampling= only works with an engine"):
        collect(torch.nn.Linear(1, 1), [torch.ones(1, 1)], tmp_path, "", sampling=sampling())


def test_sampling_with_drafts_is_refused(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.llm_engine.vllm_config, "speculative_config", object())
    with pytest.raises(fh.errors.HookError, match=r"temperature=.*: drawn texts cannot"):
        collect(llm, [[5, 6]], tmp_path, sampling=sampling(temperature=1.0, seed=3))
