"""The self-test of an engine passes where rows, positions and salts are right, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
from ferrohook.engines.vllm import plugin, self_test, supported
from ferrohook.engines.vllm.requests import FrontEnd
from support.vllm_engine import sampling, state

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = {"prompt_token_ids": [*range(10, 50)]}
PLAN = fh.Plan(fh.keep("model.layers.1"))


def parts(llm: Any) -> tuple[Any, Any]:
    """The core of an engine, and its worker."""
    engine = llm.llm_engine
    return engine.engine_core.engine_core, engine.model_executor.driver_worker.ferrohook


def check(llm: Any) -> None:
    core, worker = parts(llm)
    self_test.check(core, json.loads(worker.describe()))


@pytest.mark.v2
def test_an_engine_that_is_right_passes(llm: Any) -> None:
    check(llm)
    numbers = state(llm)
    assert (numbers["requests"], numbers["results"]) == (0, 0)
    assert not llm.llm_engine.has_unfinished_requests()


def settling(change: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., None]:
    """Breaks a runner whose row map is another one."""

    def spoil(_core: Any, worker: Any, patch: pytest.MonkeyPatch) -> None:
        settle = worker.settle
        patch.setattr(worker, "settle", lambda *args: settle(*change(*map(list, args))))

    return spoil


def of_the_step_before() -> Callable[..., tuple[Any, Any, Any]]:
    former: list[tuple[Any, Any, Any]] = []

    def change(*step: Any) -> tuple[Any, Any, Any]:
        former.append(step)
        return former[-2] if len(former) > 1 else step

    return change


def nobody(_core: Any, worker: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "running", lambda _rows: contextlib.nullcontext())


def with_prefix(**changes: Any) -> Callable[..., None]:
    """Sends requests that tell other facts about what their plans change and read."""

    def spoil(_core: Any, _worker: Any, patch: pytest.MonkeyPatch) -> None:
        prepare = FrontEnd.prepare

        def preparing(self: Any, request: Any) -> None:
            prepare(self, request)
            request.sampling_params.extra_args["ferrohook"]["prefix"].update(changes)

        patch.setattr(FrontEnd, "prepare", preparing)

    return spoil


def salt_ignored(_core: Any, _worker: Any, patch: pytest.MonkeyPatch) -> None:
    """Has vLLM make the keys of a block elsewhere, without the salt."""
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

    name = "_gen_prompt_embeds_extra_hash_keys"
    patch.setattr(kv_cache_utils, name, getattr(kv_cache_utils, name).__wrapped__)


def failures_lost(_core: Any, worker: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "failures", dict)


def ends_lost(_core: Any, worker: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "reconcile", lambda _live: None)


BROKEN = {
    "reversed": (settling(lambda ids, *rest: (ids[::-1], *rest)), "rows|positions|failed"),
    "sorted": (
        settling(lambda ids, counts, first: (sorted(ids, reverse=True), counts, first)),
        "rows|positions|failed",
    ),
    "the step before": (settling(of_the_step_before()), "rows|positions|failed"),
    "counts": (
        settling(lambda ids, counts, first: (ids, counts[::-1], first)),
        "rows|positions|failed",
    ),
    "zeros": (settling(lambda ids, counts, first: (ids, counts, [0] * len(first))), "never ran"),
    "one late": (
        settling(lambda ids, counts, first: (ids, counts, [it + 1 for it in first])),
        "never ran for positions",
    ),
    "nobody": (nobody, "never ran"),
    "unsalted": (with_prefix(changed=None), "shared a prefix in the cache"),
    "late": (with_prefix(changed=600), "shared a prefix in the cache"),
    "salt ignored": (salt_ignored, "shared a prefix in the cache"),
    "cached positions": (with_prefix(read=None), "never ran for positions"),
    "failures": (failures_lost, "did not end with the right reason"),
    "ends": (ends_lost, "requests stayed open"),
}


ON_V2 = {"sorted", "zeros", "salt ignored"}


@pytest.mark.parametrize(
    "broken", [pytest.param(it, marks=pytest.mark.v2 if it in ON_V2 else ()) for it in BROKEN]
)
def test_a_broken_engine_fails(llm: Any, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    spoil, reason = BROKEN[broken]
    with monkeypatch.context() as patch:
        spoil(*parts(llm), patch)
        with pytest.raises(fh.HookError, match=reason):
            check(llm)
    assert not llm.llm_engine.has_unfinished_requests()
    check(llm)  # and leaves nothing behind


def fresh(llm: Any, patch: pytest.MonkeyPatch) -> Any:
    """Lets the self-test run again, until the end of a test."""
    core, worker = parts(llm)
    patch.delattr(core, self_test._MARK)
    patch.setattr(worker, "served", worker.served)
    patch.setattr(worker, "refusal", worker.refusal)
    patch.setattr(plugin, "_front_ends", weakref.WeakKeyDictionary())
    return core


def test_an_engine_that_fails_serves_no_plan_and_goes_on(
    llm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = fresh(llm, monkeypatch)
    with monkeypatch.context() as patch:
        BROKEN["zeros"][0](*parts(llm), patch)
        self_test.run(core)
        self_test.run(core)
    (said,) = [it for it in caplog.records if "plans are refused" in it.message]
    assert said.levelno == logging.ERROR
    (output,) = llm.generate(PROMPT, sampling(), use_tqdm=False)
    assert output.outputs[0].token_ids
    with pytest.raises(ValueError, match=r"the self-test of ferrohook in vLLM .* failed: .*never"):
        llm.generate(PROMPT, sampling(PLAN), use_tqdm=False)


def test_a_newer_release_warns_once_where_the_self_test_passes(
    llm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = fresh(llm, monkeypatch)
    newer = fh.engines.Capabilities("vllm", "9.9.1rc1", supported.CAPABILITIES.tried, (), {})
    for module in (plugin, self_test, supported):
        monkeypatch.setattr(module, "CAPABILITIES", newer)
    plugin.check_release()
    self_test.run(core)
    self_test.run(core)
    (said,) = [it for it in caplog.records if "9.9.1rc1" in it.message]
    assert said.levelno == logging.WARNING
    assert "newer than the tested releases" in said.message
    (output,) = llm.generate(PROMPT, sampling(PLAN), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_a_release_that_was_tried_says_nothing(
    llm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    self_test.run(fresh(llm, monkeypatch))
    assert [it for it in caplog.records if it.name.startswith("ferrohook")] == []
