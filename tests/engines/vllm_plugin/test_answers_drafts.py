"""vLLM in this process: several answers to a prompt, the first of which runs again without drafts.

The others have its rows of the prompt.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from ferrohook.engines.vllm.worker import RunnerWorker
from support.engines import Job
from support.speculation import DraftCount, save_repeating_model, speculative_config
from support.vllm_engine import EOS, WIDTH, Answer, sampling, scheduling_ahead, start, stop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrohook.engines.requests import EngineRequest

KEPT = ("model.layers.2", "model.layers.3")


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """An engine whose drafts run ahead and whose prompts run in chunks, and its model."""
    folder = tmp_path_factory.mktemp("repeating")
    model = save_repeating_model(folder)
    with scheduling_ahead():
        config = speculative_config("draft_model", folder)
        llm = start(folder, speculative_config=config, max_num_batched_tokens=64)
    yield llm, model
    stop(llm)


_runs = itertools.count()


def answered(llm: Any, job: Job, plan: fh.Plan, ends: list[int]) -> list[tuple[str, Answer]]:
    """Asks for three answers; returns how each ended, its text and its captures.

    Captures are read as soon as an answer ends, while the others run.
    """
    engine = llm.llm_engine
    options = {"n": 3, "temperature": 0.8, "allowed_token_ids": [*range(2, 12)]}
    params = sampling(plan, 24, stop_token_ids=ends, **options)
    engine.add_request(str(next(_runs)), {"prompt_token_ids": job.prompt}, params)
    found: dict[int, tuple[str, Answer]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for text in output.outputs:
                if text.finish_reason and text.index not in found:
                    failed = text.finish_reason == "error"
                    acts = {} if failed else dict(vllm.activations(llm, output, text.index).acts)
                    found[text.index] = text.finish_reason, Answer([*text.token_ids], acts)
    return [*found.values()]


@pytest.mark.parametrize("fails", [False, True], ids=["in drafts", "in texts too"])
def test_answers_keep_the_rows_of_a_prompt_that_runs_again(
    drafting: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    llm, model = drafting
    rng = random.Random(1)  # noqa: S311 (tests)
    count = DraftCount(llm, monkeypatch)
    shared = []
    retire = RunnerWorker.retire

    def retiring(self: RunnerWorker, request_id: str) -> EngineRequest | None:
        request = retire(self, request_id)
        if request is not None and request.parent is not None and request.tokens:
            shared.append(request.start)
        return request

    monkeypatch.setattr(RunnerWorker, "retire", retiring)
    vector = torch.linspace(-2, 2, WIDTH)
    # As drafts have no value of the token before yet, they fail; it changes nothing.
    late = fh.gate("late", "model.layers.3", fh.Norm(), at="generated", lag=1, over="token")
    lagging = fh.Plan(late, fh.on("model.layers.1", fh.Ablate(vector), when=fh.above("late", 1e9)))
    reasons = []
    for number in range(40):
        length = rng.randrange(66, 120)
        prompt = [2 + (number * 7 + it * (1 + number % 3)) % 9 for it in range(length)]
        job = Job(prompt, (), KEPT)
        plan = fh.Plan(*(fh.keep(each) for each in KEPT)) + lagging
        if fails:
            word = model.model.embed_tokens.weight[2 + rng.randrange(9)]
            gate = fh.gate("word", "model.embed_tokens", fh.Cosine(word), at="generated")
            spoil = fh.on("model.layers.0", fh.Scale(3e38), when=fh.above("word", 0.99))
            plan += fh.Plan(gate, spoil)
        ends = [2 + number % 9, 2 + (number * 5 + 3) % 9]
        for reason, answer in answered(llm, job, plan, ends):
            reasons.append(reason)
            if reason != "error":
                job.check_acts(model, answer)
    assert len(reasons) == 40 * 3
    assert ("error" in reasons) == fails
    assert count.preempted > 40
    assert sum(map(bool, shared)) > 10
