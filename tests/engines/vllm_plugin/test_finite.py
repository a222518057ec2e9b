"""vLLM in this process: plans that make rows NaN or infinite reach no other request."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

from support.engine_scenes import HOSTILE
from support.vllm_engine import VOCABULARY, sampling, start, start_compiled, stop

if TYPE_CHECKING:
    from collections.abc import Iterator

    import ferrohook as fh

NUMBER = 72
BAD = range(0, NUMBER, 9)
FEW = 24
"""Blocks, of which the requests are preempted."""
ON_V2 = FEW, "scale"


def prompts() -> list[list[int]]:
    """Prompts of which half begin alike; some are longer than a step."""
    rng = random.Random(0)  # noqa: S311 (tests)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(64)]
    return [
        [*(shared if number % 2 else []), *(rng.randrange(3, VOCABULARY) for _ in range(length))]
        for number, length in enumerate(rng.randrange(3, 60) for _ in range(NUMBER))
    ]


def texts(llm: Any, hostile: fh.Plan | None) -> dict[int, Any]:
    """Serves all prompts at once."""
    engine = llm.llm_engine
    engine.reset_prefix_cache()
    for number, prompt in enumerate(prompts()):
        plan = hostile if number in BAD else None
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling(plan, 12))
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {int(each.request_id): each for each in engine.step() if each.finished}
    return {number: output.outputs[0] for number, output in finished.items()}


@pytest.fixture(scope="module")
def engine(models: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    llm = start(models["llama"][0], num_gpu_blocks_override=request.param)
    yield llm
    stop(llm)


@pytest.fixture(scope="module")
def plain(engine: Any) -> dict[int, list[int]]:
    return {number: [*text.token_ids] for number, text in texts(engine, None).items()}


def check_neighbours(engine: Any, plain: dict[int, list[int]], plan: fh.Plan) -> None:
    """Checks requests of the same batches, and later ones that get the blocks."""
    hostile, later = texts(engine, plan), texts(engine, None)

    failed = {number for number, text in hostile.items() if text.finish_reason == "error"}
    assert failed == set(BAD)
    for number in BAD:
        assert "made its rows NaN, infinite" in hostile[number].stop_reason
    others = plain.keys() - failed
    assert [it for it in others if [*hostile[it].token_ids] != plain[it]] == []
    assert [it for it in plain if [*later[it].token_ids] != plain[it]] == []


@pytest.mark.parametrize(
    ("engine", "hook"),
    [
        pytest.param(blocks, hook, marks=pytest.mark.v2 if (blocks, hook) == ON_V2 else ())
        for blocks in (None, FEW)
        for hook in HOSTILE
    ],
    indirect=["engine"],
)
def test_neighbours_are_not_reached(engine: Any, plain: dict[int, list[int]], hook: str) -> None:
    check_neighbours(engine, plain, HOSTILE[hook])


def test_nor_are_those_in_a_compiled_engine(models: Any) -> None:
    config = {"ferrohook": {"sites": "model.layers.*"}}
    engine = start_compiled(models["llama"][0], additional_config=config)
    try:
        plain = {number: [*text.token_ids] for number, text in texts(engine, None).items()}
        check_neighbours(engine, plain, HOSTILE["add"])
    finally:
        stop(engine)
