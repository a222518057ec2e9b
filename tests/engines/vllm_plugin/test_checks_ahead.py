"""vLLM scheduling ahead: the outcome of a step's check reaches the host after later steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import torch

import ferrohook as fh
from ferrohook.engines import finite
from ferrohook.engines.finite import WatchedRows
from ferrohook.engines.vllm import worker
from ferrohook.engines.worker import EngineWorker
from support.vllm_engine import VOCABULARY, WIDTH, sampling, scheduling_ahead, start, stop

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBER = 96
FEW = 24
"""Blocks, of which the requests are preempted."""
HARMLESS = fh.Plan(fh.on("model.layers.0", fh.Add(torch.zeros(WIDTH)), at="generated"))


def spoiling(position: int) -> fh.Plan:
    """A plan that makes the rows from a position on NaN or infinite."""
    spoils = fh.on("model.layers.1", fh.Scale(1e38), at=slice(position, None))
    return fh.Plan(*HARMLESS.entries, spoils)


def requests(seed: int) -> list[tuple[list[int], int, fh.Plan | None, bool]]:
    """Prompts, their numbers of new tokens, plans, and whether these fail."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(64)]
    made: list[tuple[list[int], int, fh.Plan | None, bool]] = []
    for number in range(NUMBER):
        own = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(3, 60))]
        prompt, new = [*(shared if number % 2 else []), *own], rng.randrange(2, 14)
        plan, fails = rng.choice([None, HARMLESS]), False
        if number % 4 == 0:
            # The row of the last token runs in a step of which the engine learns too late.
            position = len(prompt) + rng.randrange(new)
            plan, fails = spoiling(position), position < len(prompt) + new - 1
        made.append((prompt, new, plan, fails))
    return made


def texts(llm: Any, seed: int, *, has_plans: bool = True) -> list[Any]:
    """Serves requests, which come over several steps."""
    engine, rng = llm.llm_engine, random.Random(seed)  # noqa: S311 (tests)
    engine.reset_prefix_cache()
    waiting = [*enumerate(requests(seed))]
    finished: dict[int, Any] = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.randrange(12)):
            if waiting:
                number, (prompt, new, plan, _) = waiting.pop(0)
                params = sampling(plan if has_plans else None, new, ignore_eos=True)
                engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        finished |= {int(each.request_id): each for each in engine.step() if each.finished}
    return [finished[number].outputs[0] for number in range(NUMBER)]


@pytest.fixture(scope="module", params=[None, FEW])
def engine(models: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    with scheduling_ahead():
        llm = start(models["llama"][0], num_gpu_blocks_override=request.param)
    yield llm
    stop(llm)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has outcomes reach the host late, as those of a GPU; lists how many a step did not know."""
    rng, found = random.Random(0), []  # noqa: S311 (tests)
    release = EngineWorker.release

    def releasing(self: Any, owners: Any) -> None:
        found.append(len(self._checks))
        release(self, owners)

    for each in (finite, worker):
        monkeypatch.setattr(each, "is_read_at_once", lambda _tensor: False)
    monkeypatch.setattr(WatchedRows, "arrived", property(lambda _self: rng.random() < 0.3))
    monkeypatch.setattr(EngineWorker, "release", releasing)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_only_the_requests_whose_plans_fail_fail(
    engine: Any, unknown: list[int], seed: int
) -> None:
    plain = texts(engine, seed, has_plans=False)
    served, later = texts(engine, seed), texts(engine, seed, has_plans=False)

    fails = [fails for *_, fails in requests(seed)]
    assert [text.finish_reason == "error" for text in served] == fails
    for number, text in enumerate(served):
        if fails[number]:
            assert "made its rows NaN, infinite" in text.stop_reason
            assert plain[number].token_ids[: len(text.token_ids)] == text.token_ids
        else:
            assert text.token_ids == plain[number].token_ids
    assert [it.token_ids for it in later] == [it.token_ids for it in plain]
    assert sum(unknown) > 20
    assert (
        not engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.ferrohook._checks
    )
