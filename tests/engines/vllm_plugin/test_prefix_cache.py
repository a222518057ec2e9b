"""vLLM in this process: requests share their prompts' blocks up to what their plans change."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import transformers

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from ferrohook.engines.vllm import prefix_cache
from support import serving
from support.engines import Change, Job
from support.prefix_jobs import BLOCK, border_jobs, first_changed
from support.serving import wrong_answers
from support.vllm_engine import (
    EOS,
    VOCABULARY,
    WIDTH,
    Answer,
    sampling,
    scheduling_ahead,
    serve,
    start,
    state,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEW = 12
PROMPT = [*range(10, 10 + 3 * BLOCK + 4)]
VECTOR = torch.linspace(-2, 2, WIDTH)


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


def asked(llm: Any, plan: fh.Plan | None, prompt: list[int] = PROMPT) -> tuple[Any, Answer]:
    """Serves one request; returns vLLM's output, and the answer."""
    params = sampling(plan, NEW)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    captures = plan is not None and any("keep" in str(it.content()[0]) for it in plan.entries)
    acts = vllm.activations(llm, output).acts if captures else {}
    return output, Answer([*output.outputs[0].token_ids], acts)


def cached(llm: Any, job: Job, model: Any) -> int:
    """Returns how many tokens of a request were read from the cache; its answer must be right."""
    output, answer = asked(llm, job.plan, job.prompt)
    job.check(model, answer, NEW)
    return int(output.num_cached_tokens)


def steered(at: Any, layer: int = 1, scale: float = 1.0) -> Job:
    return Job(PROMPT, (Change(layer, fh.Add(VECTOR, scale=scale), at),))


def test_requests_share_the_blocks_before_what_their_plans_change(models: Any, llm: Any) -> None:
    model = models["llama"][1]
    expected: list[tuple[Any, int]] = [
        ("generated", 3 * BLOCK),
        ("last_prompt", 3 * BLOCK),
        (slice(-4, None), 3 * BLOCK),
        (-5, 2 * BLOCK),
        (slice(BLOCK, None), BLOCK),
        (BLOCK - 1, 0),
        (None, 0),
    ]
    for at, shared in expected:
        llm.reset_prefix_cache()
        assert cached(llm, Job(PROMPT), model) == 0
        assert cached(llm, steered(at), model) == shared, at
        assert cached(llm, steered(at, scale=2.0), model) == shared, at
        assert cached(llm, steered(at), model) == 3 * BLOCK, at
        assert cached(llm, Job(PROMPT), model) == 3 * BLOCK, at
        # A plain request reads what a plan left as it was, no matter who came first.
        llm.reset_prefix_cache()
        assert cached(llm, steered(at), model) == 0
        assert cached(llm, Job(PROMPT), model) == shared, at


def test_changes_after_the_last_attention_share_all_blocks(models: Any, llm: Any) -> None:
    model = models["llama"][1]
    llm.reset_prefix_cache()
    assert cached(llm, steered(None, layer=3), model) == 0
    assert cached(llm, Job(PROMPT), model) == 3 * BLOCK
    assert cached(llm, steered(None, layer=3, scale=2.0), model) == 3 * BLOCK
    assert cached(llm, steered(None, layer=2), model) == 0


def test_captures_read_the_cache_up_to_their_first_position(models: Any, llm: Any) -> None:
    model = models["llama"][1]
    llm.reset_prefix_cache()
    cached(llm, Job(PROMPT), model)
    for at, read in (
        (None, 0),
        (slice(BLOCK, None), BLOCK),
        (2 * BLOCK + 1, 2 * BLOCK),
        (-1, 3 * BLOCK),
        ("generated", 3 * BLOCK),
    ):
        job = Job(PROMPT, (), ("model.layers.2",), kept_at=at)
        assert cached(llm, job, model) == read, at
        both = Job(PROMPT, steered("generated").changes, ("model.layers.2",), kept_at=at)
        assert cached(llm, both, model) == read, at


def test_gates_read_rows_and_change_none_before_they_have_values(llm: Any) -> None:
    llm.reset_prefix_cache()
    asked(llm, None)

    def plan(scale: float, at: Any = None, over: Any = "prompt") -> fh.Plan:
        gate = fh.gate("g", "model.layers.1", fh.Dot(VECTOR), at=at, over=over)
        add = fh.Add(VECTOR, scale=scale)
        return fh.Plan(gate, fh.on("model.layers.2", add, when=fh.above("g", -1e9)))

    output, gated = asked(llm, plan(1.0))
    assert output.num_cached_tokens == 0
    assert asked(llm, None)[0].num_cached_tokens == 3 * BLOCK
    late, _ = asked(llm, plan(1.0, at=slice(2 * BLOCK, None)))
    assert late.num_cached_tokens == 2 * BLOCK
    _, again = asked(llm, plan(1.0))
    assert again.generated_tokens == gated.generated_tokens


def test_a_second_turn_reads_the_first_ones_blocks(models: Any, llm: Any) -> None:
    """Both turns have one plan; one that counts from the prompt's end changes other positions."""
    model = models["llama"][1]
    for at, shared in ((slice(BLOCK, None), 3 * BLOCK), ("generated", 3 * BLOCK)):
        llm.reset_prefix_cache()
        _, first = asked(llm, steered(at).plan)
        prompt = [*PROMPT, *first.generated_tokens[:-1]]
        job = Job(prompt, steered(at).changes)
        assert cached(llm, job, model) == shared


def test_clients_with_salts_share_nothing_with_others(models: Any, llm: Any) -> None:
    llm.reset_prefix_cache()
    found = []
    for salt in ("one", "other", "one", None):
        prompt = {"prompt_token_ids": PROMPT, **({"cache_salt": salt} if salt else {})}
        params = sampling(steered("generated").plan, NEW)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        steered("generated").check(
            models["llama"][1], Answer([*output.outputs[0].token_ids], {}), NEW
        )
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 3 * BLOCK, 0]


@pytest.mark.parametrize("broken", ["keys_of", "readable", "shareable", "share", "evict"])
def test_a_fault_has_requests_share_less(
    models: Any, llm: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The fault makes no answer wrong and ends no engine."""
    llm.reset_prefix_cache()
    model = models["llama"][1]

    def failing(*_args: Any) -> None:
        msg = "out of luck"
        raise RuntimeError(msg)

    monkeypatch.setattr(prefix_cache, broken, failing)
    jobs = border_jobs(16, seed=2)
    assert wrong_answers(model, jobs, serve(llm, jobs, seed=2), NEW) == []
    fails = fh.Plan(fh.on("model.layers.1", fh.Scale(3e38), at=BLOCK))
    assert asked(llm, fails)[0].outputs[0].finish_reason == "error"
    assert cached(llm, Job(PROMPT), model) >= 0
    assert cached(llm, steered(BLOCK), model) >= 0


def test_a_system_prompt_is_cached_for_requests_with_different_vectors(tmp_path: Path) -> None:
    model = serving.save_model("llama", tmp_path, max_position_embeddings=4096)
    rng = random.Random(0)  # noqa: S311 (tests)
    system = [rng.randrange(3, VOCABULARY) for _ in range(2000)]
    generator = torch.Generator().manual_seed(0)
    jobs = [
        Job(
            [*system, *(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 30)))],
            (Change(1, fh.Add(torch.randn(WIDTH, generator=generator)), "generated"),),
        )
        for _ in range(64)
    ]
    llm = start(tmp_path, max_model_len=2100, max_num_batched_tokens=512)
    try:
        engine = llm.llm_engine
        llm.generate({"prompt_token_ids": system}, sampling(None, 1), use_tqdm=False)
        for number, job in enumerate(jobs):
            prompt = {"prompt_token_ids": job.prompt}
            engine.add_request(str(number), prompt, sampling(job.plan, 4))
        outputs: dict[int, Any] = {}
        while engine.has_unfinished_requests():
            outputs |= {int(it.request_id): it for it in engine.step() if it.finished}
    finally:
        stop(llm)
    read = sum(each.num_cached_tokens // BLOCK for each in outputs.values())
    assert read >= 0.95 * len(jobs) * (len(system) // BLOCK)
    for number, job in enumerate(jobs):
        job.check(model, Answer([*outputs[number].outputs[0].token_ids], {}), 4)


class Watch:
    """Checks that requests read only unchanged blocks, or blocks of their own plan.

    Args:
        llm: an engine of this process.
        jobs: its requests, by the numbers at the ends of their ids.
        patch: undoes the looks.
    """

    def __init__(self, llm: Any, jobs: list[Job], patch: pytest.MonkeyPatch) -> None:
        self._jobs = jobs
        self._changed: dict[int, Job] = {}
        """Job that changed a block, by the block's id."""
        self.wrong: list[tuple[Job, Job]] = []
        self.preempted = 0
        self.read: dict[str, int] = {"plain": 0, "planned": 0}
        """Blocks that requests without and with a plan read."""
        self.own = 0
        """Blocks among them that the plan had changed."""
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        manager = scheduler.kv_cache_manager
        for owner, name in (
            (manager.block_pool, "cache_full_blocks"),
            (manager, "get_computed_blocks"),
            (scheduler, "_preempt_request"),
        ):
            around = getattr(self, f"_{name.strip('_')}")
            original = getattr(owner, name)
            patch.setattr(
                owner, name, lambda *args, _it=(around, original), **kw: _it[0](_it[1], *args, **kw)
            )

    def _job(self, request: Any) -> Job:
        return self._jobs[int(request.request_id.split("-")[-2])]

    def _cache_full_blocks(self, original: Any, **call: Any) -> None:
        job = self._job(call["request"])
        for number in range(call["num_cached_blocks"], call["num_full_blocks"]):
            block = call["blocks"][number].block_id
            self._changed.pop(block, None)
            if first_changed(job) < (number + 1) * call["block_size"]:
                self._changed[block] = job
        original(**call)

    def _get_computed_blocks(self, original: Any, request: Any, *limits: Any) -> Any:
        found = original(request, *limits)
        job = self._job(request)
        for block in (block for group in found[0].blocks for block in group):
            self.read["plain" if job.plan is None else "planned"] += 1
            if not block.is_null and (other := self._changed.get(block.block_id)) is not None:
                self.own += 1
                if other.plan != job.plan:
                    self.wrong.append((job, other))
        return found

    def _preempt_request(self, original: Any, *call: Any, **named: Any) -> Any:
        self.preempted += 1
        return original(*call, **named)


GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention"] * (serving.LAYERS // 2),
    "tie_word_embeddings": False,
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 48}),
    ("gemma3", {"num_gpu_blocks_override": 48, "max_num_batched_tokens": 75}),
    ("llama drafting ahead", {"num_gpu_blocks_override": 15, "max_num_batched_tokens": 48}),
]


def saved(kind: str, folder: Path) -> Any:
    if kind != "gemma3":
        return serving.save_model(kind, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(serving.CONFIGS, kind, transformers.Gemma3TextConfig)
        return serving.save_model(kind, folder, **GEMMA)


@pytest.fixture(scope="module", params=KINDS, ids=[kind for kind, _ in KINDS])
def small(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    """An engine with blocks for a few requests, and its model."""
    kind, options = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = saved(kind.partition(" ")[0], folder)
    if "ahead" in kind:
        # The model drafts for itself, without the plan.
        drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
        with scheduling_ahead():
            llm = start(folder, speculative_config=drafts, **options)
    else:
        llm = start(folder, **options)
    yield llm, model
    stop(llm)


def drawn(request: pytest.FixtureRequest, number: int) -> list[Job]:
    return border_jobs(request.config.getoption("requests") or number, seed=5)


@pytest.mark.v2
def test_random_plans_at_the_borders_of_blocks(
    small: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, model = small
    jobs = drawn(request, 200)
    llm.reset_prefix_cache()
    watch = Watch(llm, jobs, monkeypatch)
    answers = serve(llm, jobs, seed=3)
    assert wrong_answers(model, jobs, answers, NEW) == []
    assert len(answers) == len(jobs)
    assert watch.wrong == []
    assert watch.preempted
    assert watch.own
    assert min(watch.read.values()) > 10
    captures = sum(job.captures for job in jobs)
    print(f"{len(jobs)} texts, {captures} with captures, {watch.preempted} preemptions,")
    print(f"blocks read: {watch.read}, of which plans had changed {watch.own}")
    serve(llm, [Job([5, 6, 7])], seed=3)
    assert state(llm)["requests"] == 0


def test_without_the_key_answers_are_wrong(
    small: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the test before finds a key that is missing."""
    llm, model = small
    jobs = drawn(request, 200)
    llm.reset_prefix_cache()
    monkeypatch.setattr(prefix_cache, "keys_of", lambda *_args: [])
    watch = Watch(llm, jobs, monkeypatch)
    try:
        answers = serve(llm, jobs, seed=3)
    finally:
        llm.reset_prefix_cache()
    assert wrong_answers(model, jobs, answers, NEW)
    assert watch.wrong


HOSTILE = [
    fh.on("model.layers.1", fh.Scale(3e38), at=slice(BLOCK, None)),
    fh.on("model.layers.1", fh.Scale(3e38), at=slice(2 * BLOCK, None)),
    fh.on("model.layers.1.self_attn.qkv_proj", fh.Scale(3e38), at=slice(2 * BLOCK + 1, None)),
    fh.on("model.layers.0", fh.Scale(3e38), at="last_prompt"),
]


def texts_beside(llm: Any, hostile: bool) -> list[list[int]]:
    """Serves requests of one prefix that come with hostile ones; returns their answers."""
    engine = llm.llm_engine
    rng = random.Random(7)  # noqa: S311 (tests)
    found: dict[str, list[int]] = {}
    for turn in range(12):
        llm.reset_prefix_cache()
        # One that runs in front of the others, so that chunks begin anywhere.
        first = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 40))]
        prefix = [rng.randrange(3, VOCABULARY) for _ in range(3 * BLOCK)]
        ends = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 9))] for _ in "abcd"]
        plan = fh.Plan(rng.choice(HOSTILE))
        engine.add_request(f"{turn}-first", {"prompt_token_ids": first}, sampling(None, NEW))
        for number, end in enumerate(ends):
            bad = number == 0
            prompt = {"prompt_token_ids": [*prefix, *end]}
            name = f"{turn}-{'bad' if bad else number}"
            engine.add_request(name, prompt, sampling(plan if hostile and bad else None, NEW))
        while engine.has_unfinished_requests():
            for each in engine.step():
                if each.finished:
                    found[each.request_id] = [*each.outputs[0].token_ids]
                    is_bad = hostile and "bad" in each.request_id
                    assert (each.outputs[0].finish_reason == "error") == is_bad
    return [found[name] for name in sorted(found) if "bad" not in name]


def test_a_step_with_nan_reaches_no_request_that_shares_blocks_before_it(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention computes NaN for rows before the changed ones too, in blocks that all may read."""
    llm = start(models["llama"][0], max_num_batched_tokens=120)
    try:
        alone = texts_beside(llm, hostile=False)
        assert texts_beside(llm, hostile=True) == alone
        with monkeypatch.context() as patch:
            patch.setattr(prefix_cache, "shareable", lambda _coordinator, _request, tokens: tokens)
            assert texts_beside(llm, hostile=True) != alone
    finally:
        stop(llm)


def test_rows_that_a_plan_spoils_and_hides_are_its_own(models: Any) -> None:
    """The plan overwrites them after the last attention: no hidden state is NaN."""
    plan = fh.Plan(
        fh.on("model.layers.1", fh.Scale(3e38), at=slice(2 * BLOCK, None)),
        fh.on("model.norm", fh.Zero()),
    )
    # A chunk has rows before the changed ones in a tile with them.
    llm = start(models["llama"][0], max_num_batched_tokens=44, max_num_seqs=4)
    try:
        assert asked(llm, plan)[0].outputs[0].finish_reason == "error"
        assert cached(llm, Job(PROMPT), models["llama"][1]) == 0
    finally:
        stop(llm)


class Cache:
    """A cache, its scheduler and one request, of a plan that changes token 10 and all after it."""

    def __init__(self) -> None:
        self.plan = prefix_cache.CachedPlan("salt", 10, None)
        self.request = SimpleNamespace(
            request_id="a",
            num_tokens=100,
            num_computed_tokens=0,
            num_stale_output_tokens=0,
            num_output_placeholders=0,
            num_preemptions=0,
            ferrohook_plan=self.plan,
        )
        self.coordinator = SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=15)])
        self.shared = 0
        manager = SimpleNamespace(coordinator=self.coordinator, cache_blocks=self._cache)
        self.scheduler = SimpleNamespace(kv_cache_manager=manager, requests={"a": self.request})

    def _cache(self, _request: Any, tokens: int) -> None:
        self.shared = tokens

    def schedule(self, tokens: int) -> Any:
        """Schedules a step; returns vLLM's output of it."""
        start = self.request.num_computed_tokens
        self.shared = prefix_cache.shareable(self.coordinator, self.request, start + tokens)
        self.request.num_computed_tokens += tokens
        return SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["a"], num_computed_tokens=[start]),
            num_scheduled_tokens={"a": tokens},
        )

    def preempt(self, in_flight: int = 0) -> None:
        self.request.num_computed_tokens = self.shared = 0
        self.request.num_stale_output_tokens = in_flight
        self.request.num_preemptions += 1


def test_a_preempted_request_shares_no_step_before_it_has_been_checked_again() -> None:
    cache = Cache()
    prefix_cache.share(cache.scheduler, cache.schedule(60), ())
    assert cache.shared == 60
    cache.preempt()
    first = cache.schedule(30)
    assert cache.shared == 0
    second = cache.schedule(30)  # ahead of the first one's end
    assert cache.shared == 0
    prefix_cache.share(cache.scheduler, first, ())
    assert cache.shared == 30
    prefix_cache.share(cache.scheduler, second, ())
    assert cache.shared == 60


def test_a_step_from_before_a_preemption_shares_no_blocks_of_after_it() -> None:
    cache = Cache()
    before = cache.schedule(60)
    cache.preempt(in_flight=60)
    after = cache.schedule(60)  # in the same step as it was preempted, as a reset does
    prefix_cache.share(cache.scheduler, before, ())
    assert cache.shared == 0
    cache.request.num_stale_output_tokens = 0
    prefix_cache.share(cache.scheduler, after, ())
    assert cache.shared == 60


def test_a_whole_block_is_shared_with_the_step_that_fills_it() -> None:
    cache = Cache()
    for tokens, shared in ((14, 0), (1, 15), (1, 15), (14, 30), (31, 61)):
        prefix_cache.share(cache.scheduler, cache.schedule(tokens), ())
        assert cache.shared == shared


def test_a_block_waits_for_a_step_whose_drafts_a_plan_may_change() -> None:
    """An engine that schedules ahead knows neither these tokens nor how many will be accepted."""
    cache = Cache()
    cache.plan.changed = 103
    cache.request.spec_token_ids = []
    cache.request.num_computed_tokens = cache.request.num_output_placeholders = 5
    step = cache.schedule(95)
    assert cache.shared == 0
    prefix_cache.share(cache.scheduler, step, ())
    assert cache.shared == 100
