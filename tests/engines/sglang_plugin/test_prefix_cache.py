"""SGLang: requests share their prompts' keys and values up to what their plans change."""

from __future__ import annotations

import importlib
import json
import random
from array import array
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

import ferrohook as fh
import support.engines
from ferrohook.engines.sglang import prefix_cache
from ferrohook.engines.sglang.prefix_cache import NumberedPlan, PlanNumbers
from support.engine_scenes import NEW, PROMPT, VECTOR
from support.engines import Change, Job
from support.prefix_jobs import border_jobs
from support.scripts import result_of
from support.serving import EOS, LAYERS, VOCABULARY, wrong_answers
from support.sglang_engine import answer_of, request, serve
from support.sglang_prefixes import SYSTEM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.sglang_engine import Local

LAST = len(PROMPT) - 1
"""Tokens of the prompt that may be cached: the last one always runs."""


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture
def empty(local: Local) -> Local:
    """The scheduler of this process, without cached tokens."""
    local.scheduler.flush_cache()
    return local


def cached(local: Local, job: Job, model: Any, **extra: Any) -> int:
    """Returns how many tokens of a request were read from the cache; its answer must be right."""
    found = local.run([[request("one", job.prompt, job.plan, NEW, **extra)]])["one"]
    job.check(model, answer_of(found, job), NEW)
    return int(found["cached"])


def steered(at: Any, layer: int = 1, scale: float = 1.0) -> Job:
    return Job(PROMPT, (Change(layer, fh.Add(VECTOR, scale=scale), at),))


@pytest.mark.parametrize(
    ("at", "shared"),
    [
        ("generated", LAST),
        ("last_prompt", LAST),
        (slice(-4, None), LAST - 3),
        (-5, LAST - 4),
        (slice(33, 70), 33),
        (1, 1),
        (0, 0),
        ("prompt", 0),
        (None, 0),
    ],
)
def test_requests_share_the_tokens_before_what_their_plans_change(
    llama: Any, empty: Local, at: Any, shared: int
) -> None:
    _, model = llama
    assert cached(empty, Job(PROMPT), model) == 0
    assert cached(empty, steered(at), model) == shared
    assert cached(empty, steered(at, scale=2.0), model) == shared
    assert cached(empty, steered(at), model) == LAST
    assert cached(empty, Job(PROMPT), model) == LAST
    # A plain request reads what a plan left as it was, no matter who came first.
    empty.scheduler.flush_cache()
    assert cached(empty, steered(at), model) == 0
    assert cached(empty, Job(PROMPT), model) == shared


def test_changes_after_the_last_attention_share_all_tokens(llama: Any, empty: Local) -> None:
    _, model = llama
    assert cached(empty, steered(None, layer=LAYERS - 1), model) == 0
    assert cached(empty, Job(PROMPT), model) == LAST
    assert cached(empty, steered(None, layer=LAYERS - 1, scale=2.0), model) == LAST
    assert cached(empty, steered(None, layer=LAYERS - 2), model) == 0


def test_captures_read_the_cache_up_to_their_first_position(llama: Any, empty: Local) -> None:
    _, model = llama
    cached(empty, Job(PROMPT), model)
    for at, read in ((None, 0), (slice(32, None), 32), (65, 65), (-1, LAST), ("generated", LAST)):
        job = Job(PROMPT, (), ("model.layers.2",), kept_at=at)
        assert cached(empty, job, model) == read, at
        both = Job(PROMPT, steered("generated").changes, ("model.layers.2",), kept_at=at)
        assert cached(empty, both, model) == read, at


def test_gates_read_rows_and_change_none_before_they_have_values(empty: Local) -> None:
    def plan(at: Any = None) -> fh.Plan:
        gate = fh.gate("g", "model.layers.1", fh.Dot(VECTOR), at=at, over="prompt")
        add = fh.on("model.layers.2", fh.Add(VECTOR), when=fh.above("g", -1e9))
        return fh.Plan(gate, add)

    def asked(own: fh.Plan | None) -> Any:
        return empty.run([[request("one", PROMPT, own, NEW)]])["one"]

    asked(None)
    gated = asked(plan())
    assert gated["cached"] == 0
    assert asked(None)["cached"] == LAST
    assert asked(plan(slice(64, None)))["cached"] == 64
    assert asked(plan())["tokens"] == gated["tokens"]


def test_a_second_turn_reads_the_first_ones_tokens(llama: Any, empty: Local) -> None:
    """Both turns have one plan; one that counts from the prompt's end changes other positions."""
    _, model = llama
    for at, shared in ((slice(32, None), LAST + NEW), ("generated", LAST + 1)):
        empty.scheduler.flush_cache()
        first = empty.run([[request("one", PROMPT, steered(at).plan, NEW)]])["one"]
        job = Job([*PROMPT, *first["tokens"]], steered(at).changes)
        assert cached(empty, job, model) == shared


def test_keys_of_clients_divide_what_plans_share(llama: Any, empty: Local) -> None:
    own: list[dict[str, Any]] = [{}, {"cache_salt": "mine"}, {"extra_key": "mine"}]
    for expected in (0, LAST):
        for extra in own:
            assert cached(empty, steered("generated"), llama[1], **extra) == expected
    for extra in own:
        assert cached(empty, Job(PROMPT), llama[1], **extra) == LAST


def test_a_prompt_with_the_keys_of_a_plan_is_refused(
    empty: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a prompt would read what the plan changed."""
    keys: list[array[int]] = []
    found = prefix_cache.keys_of
    monkeypatch.setattr(
        prefix_cache, "keys_of", lambda plan, ids: keys.append(found(plan, ids)) or keys[-1]
    )
    empty.run([[request("one", PROMPT, steered(50).plan, NEW)]])
    forged = [*keys[-1][:90], 7]
    assert max(forged) >= 2**32
    for prompt in (forged, [-1, *PROMPT]):
        for plan in (None, steered(50).plan):
            finish = empty.run([[request("two", prompt, plan, NEW)]])["two"]["finish"]
            assert finish["status_code"] == 400
            assert "token ids must be at least 0 and below" in finish["message"]


def test_a_fault_has_requests_share_less(
    llama: Any, empty: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault makes no answer wrong and ends no engine."""

    def failing(*_args: Any) -> None:
        msg = "out of luck"
        raise RuntimeError(msg)

    monkeypatch.setattr(prefix_cache, "keys_of", failing)
    jobs = border_jobs(16, seed=2)
    assert wrong_answers(llama[1], jobs, serve(empty, jobs, seed=2), NEW) == []
    assert cached(empty, steered("generated"), llama[1]) == 0


def test_random_plans_at_any_position(
    llama: Any, empty: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are mixed with decoding. Without the moved ids, answers would be wrong."""
    _, model = llama
    jobs = border_jobs(48, seed=6)
    answers = serve(empty, jobs, seed=3)
    assert wrong_answers(model, jobs, answers, NEW) == []
    assert len(answers) == len(jobs)
    empty.scheduler.flush_cache()
    with monkeypatch.context() as patch:
        patch.setattr(prefix_cache, "keys_of", lambda _plan, ids: ids)
        answers = serve(empty, jobs, seed=3)
    empty.scheduler.flush_cache()
    assert wrong_answers(model, jobs, answers, NEW)


def run_script(options: dict[str, object], *arguments: str, **environment: str) -> dict[str, Any]:
    """Serves requests in another process; returns what came of them."""
    given = json.dumps(options)
    found = result_of("support.sglang_prefixes", *arguments, "--options", given, **environment)
    print(found)
    return found


SMALL: dict[str, object] = {"max_total_tokens": 720, "max_running_requests": 6}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
CONFIGURATIONS: list[tuple[dict[str, object], dict[str, str]]] = [
    ({"page_size": 16, "disable_overlap_schedule": True}, RETRACT),
    (
        {"enable_mixed_chunk": True, "chunked_prefill_size": 16},
        RETRACT | {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"},
    ),
]


@pytest.mark.parametrize(("options", "environment"), CONFIGURATIONS, ids=["pages", "python"])
def test_random_plans_at_the_borders_of_pages(
    options: dict[str, object], environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """Blocks are evicted: the prompts have many times the tokens of the cache."""
    number = request.config.getoption("requests") or 48
    found = run_script(SMALL | options, "--requests", str(number), **environment)
    assert found["wrong"] == found["wrong_reads"] == []
    assert found["answered"] == number
    assert found["prompts"] > 5 * 720
    assert min(found["retractions"], found["cached_changed"], found["cached_of_plans"]) > 0
    assert found["moves"]
    assert found["open"] == 0


def test_without_the_moved_ids_requests_read_what_others_changed() -> None:
    """Control: the test before finds such reads."""
    found = run_script(SMALL | {"page_size": 16}, "--requests", "48", "--unmoved")
    assert found["wrong"]
    assert found["wrong_reads"]


def test_where_others_see_the_keys_plans_have_salts() -> None:
    """The events of the cache tell tokens."""
    events = {"kv_events_config": '{"publisher": "zmq", "endpoint": "inproc://events"}'}
    found = run_script(events, "--requests", "64")
    assert found["wrong"] == found["wrong_reads"] == []
    assert found["cached_of_plans"] == 0 < found["cached_changed"]
    assert not found["moves"]


def test_a_system_prompt_is_cached_for_requests_with_different_vectors() -> None:
    options: dict[str, object] = {"max_total_tokens": 8192, "chunked_prefill_size": 512}
    found = run_script(options, "--requests", "64", "--system")
    assert found["wrong"] == []
    assert found["answered"] == 64
    assert sum(found["cached"]) >= 0.95 * 64 * SYSTEM


def test_the_self_test_finds_plans_that_share_what_they_change(
    empty: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = empty.worker.loaded_model().modules
    empty.worker._test_itself(modules)
    monkeypatch.setattr(prefix_cache, "keys_of", lambda _plan, ids: ids)
    with pytest.raises(fh.HookError, match="different plans shared keys and values"):
        empty.worker._test_itself(modules)


SPOILS = [
    fh.Plan(fh.on("model.layers.1", fh.Scale(3e38), at=slice(32, None))),
    fh.Plan(fh.on("model.layers.1", fh.Scale(3e38), at=slice(64, None))),
    fh.Plan(fh.on("model.layers.1.self_attn.qkv_proj", fh.Scale(3e38), at=slice(65, None))),
    fh.Plan(fh.on("model.layers.0", fh.Scale(3e38), at="last_prompt")),
    # No number is NaN in the hidden states.
    fh.Plan(
        fh.on("model.layers.1", fh.Scale(3e38), at=slice(64, None)),
        fh.on("model.norm", fh.Zero()),
    ),
]


def texts_beside(local: Local, plans: list[fh.Plan | None]) -> list[list[int]]:
    """Serves requests of one prefix that come with some of bad plans; returns their answers."""
    rng = random.Random(7)  # noqa: S311 (tests)
    found = []
    for plan in plans:
        local.scheduler.flush_cache()
        prefix = [rng.randrange(3, VOCABULARY) for _ in range(96)]
        ends = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 9))] for _ in "abcd"]
        # One that runs in front of the others, so that chunks begin anywhere.
        first = request("first", [rng.randrange(3, VOCABULARY) for _ in range(17)])
        sent = [
            request(name, [*prefix, *end], plan if name == "bad" else None, NEW)
            for name, end in zip(("bad", "1", "2", "3"), ends, strict=True)
        ]
        answers = local.run([[first, sent[0]], [], [], [], [], sent[1:]])
        assert (answers["bad"]["finish"]["type"] == "abort") == (plan is not None)
        found += [[*answers[name]["tokens"]] for name in ("1", "2", "3")]
    return found


@pytest.fixture
def whole(empty: Local, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    """The scheduler with chunks that have unchanged rows and changed ones of a prompt."""
    monkeypatch.setattr(empty.scheduler, "chunked_prefill_size", 60)
    yield empty
    empty.scheduler.flush_cache()


def test_a_step_with_nan_reaches_no_request_that_shares_the_tokens_before_it(
    whole: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention computes NaN for rows before the changed ones too, which all may read."""
    alone = texts_beside(whole, [None] * len(SPOILS))
    assert texts_beside(whole, [*SPOILS]) == alone
    req = importlib.import_module("sglang.srt.managers.schedule_batch").Req
    never = property(lambda _req: False, lambda _req, _value: None)
    with monkeypatch.context() as patch:
        patch.setattr(req, "skip_radix_cache_insert", never, raising=False)
        assert texts_beside(whole, [*SPOILS]) != alone


def test_numbers_are_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_MOST_SALTS", 3)
    numbers, other = PlanNumbers(), PlanNumbers()
    first = numbers.find("a")
    assert numbers.find("a") == first > 0
    used = [first, other.find("a"), *map(numbers.find, "bcd"), numbers.find("a")]
    assert len({*used}) == len(used)
    assert numbers.find("d") == used[4]  # the last ones are remembered


def test_keys_have_the_number_from_the_first_changed_position_on() -> None:
    ids = array("q", [5, 2**31, 7])
    for changed, moved in ((0, 3), (1, 2), (2, 1), (3, 0), (9, 0), (None, 0)):
        keys = prefix_cache.keys_of(NumberedPlan(4, changed, None), ids)
        added = [key - token for key, token in zip(keys, ids, strict=True)]
        assert added == [0] * (3 - moved) + [4 << 32] * moved
    assert prefix_cache.keys_of(NumberedPlan(4, 0, None), array("q")) == array("q")
    assert ids == array("q", [5, 2**31, 7])
