"""Lives of requests with plans in transformers' continuous batching: failures, ends, streams."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import ferrohook as fh
from ferrohook.engines import transformers
from ferrohook.errors import CaptureBudgetError, HookError, HookTypeError, SelectionError
from support.engines import WIDTH, Change, Job, attached_to, batching, greedy, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrohook.engines.transformers import Attached

PROMPT = list(range(3, 30))
NEW = 8
WAIT = 60
LAYER = "model.layers.1"
STEERED = Job(PROMPT, (Change(1, fh.Add(torch.ones(WIDTH), scale=5.0), None),), (LAYER,))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny_llama()


def take(source: Any, number: int) -> dict[str, Any]:
    """The next outputs, by id."""
    outputs = [source.get_result(timeout=WAIT) for _ in range(number)]
    by_id = {output.request_id: output for output in outputs}
    assert len(by_id) == number
    return by_id


def failing(fails_at: Callable[[int], bool]) -> fh.Plan:
    """A plan whose hook raises at a chosen call."""
    calls = []

    def hook(_module: object, _args: object, _output: object) -> None:
        calls.append(None)
        if fails_at(len(calls)):
            msg = "on purpose"
            raise RuntimeError(msg)

    return fh.Plan(fh.on("model.layers.0", hook), fh.keep(LAYER))


@pytest.mark.parametrize("call", [1, 2, 4, 5])
def test_a_hook_that_raises_fails_its_request_alone(model: Any, call: int) -> None:
    with attached_to(model, NEW, max_batch_tokens=20) as attached:
        attached.add_request(PROMPT, "bad", plan=failing(lambda n: n == call), eos_token_id=-1)
        attached.add_request(PROMPT, "good", plan=STEERED.plan)
        attached.add_request(PROMPT, "plain")
        outputs = take(attached, 3)

    bad = outputs["bad"]
    assert bad.is_finished()
    assert bad.status.name == "FAILED"
    assert bad.error == "RuntimeError: on purpose"
    assert isinstance(bad.hook_error, RuntimeError)
    assert len(bad.generated_tokens) < NEW
    STEERED.check(model, outputs["good"], NEW)
    Job(PROMPT).check(model, outputs["plain"], NEW)


def test_what_failed_leaves_no_keys_and_values_to_others(model: Any) -> None:
    def fail_late(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] == 1:
            msg = "on purpose"
            raise RuntimeError(msg)
        return output + 5.0

    with attached_to(model, NEW, page_size=4) as attached:
        attached.add_request(PROMPT, "bad", plan=fh.Plan(fh.on("model.layers.0", fail_late)))
        assert attached.get_result(timeout=WAIT).hook_error is not None
        for _ in range(2):
            attached.add_request(PROMPT)
            Job(PROMPT).check(model, attached.get_result(timeout=WAIT), NEW)


def test_a_budget_fails_its_request(model: Any) -> None:
    with attached_to(model, NEW) as attached:
        plan = fh.Plan(fh.keep(LAYER, max_bytes=4 * WIDTH * 30))
        attached.add_request(PROMPT, plan=plan, eos_token_id=-1)
        output = attached.get_result(timeout=WAIT)
        attached.add_request(PROMPT)
        Job(PROMPT).check(model, attached.get_result(timeout=WAIT), NEW)

    assert isinstance(output.hook_error, CaptureBudgetError)
    assert output.status.name == "FAILED"
    assert output.acts[LAYER].shape == (30, WIDTH)


def test_a_module_whose_rows_are_not_found_fails_its_request(model: Any) -> None:
    # The model's own output has the logits of some rows.
    plan = fh.Plan(fh.on("", lambda _module, _args, output: None))
    with attached_to(model, NEW) as attached:
        attached.add_request(PROMPT, plan=plan)
        output = attached.get_result(timeout=WAIT)

    assert isinstance(output.hook_error, fh.errors.RowsError)


@pytest.mark.parametrize("entry", [fh.on("spare", fh.Scale(2.0)), fh.keep(["spare", LAYER])])
def test_a_module_that_never_runs_is_refused(entry: Any) -> None:
    model = tiny_llama()
    model.spare = nn.Linear(3, 3)
    with (
        attached_to(model, NEW) as attached,
        pytest.raises(HookError, match=r"entry 0 .* 'spare' does not run"),
    ):
        attached.add_request(PROMPT, plan=fh.Plan(entry))
    with pytest.raises(HookError, match="'spare' does not run"):
        transformers.generate_batch(
            model, [PROMPT], [fh.Plan(entry)], continuous_batching_config=batching()
        )


def test_forks_to_come_fail_with_their_parent(model: Any) -> None:
    outputs = transformers.generate_batch(
        model,
        [PROMPT, PROMPT],
        [failing(lambda n: n == 1), STEERED.plan],
        generation_config=greedy(NEW, forks=2),
        continuous_batching_config=batching(max_batch_tokens=8),
    )

    assert len(outputs) == 4
    for name in ("req_0", "req_0__child#0"):
        assert isinstance(outputs[name].hook_error, RuntimeError)
    for name in ("req_1", "req_1__child#0"):
        STEERED.check(model, outputs[name], NEW)


def test_a_plan_closed_while_it_runs_fails_its_request(model: Any) -> None:
    prepared = STEERED.plan.prepare(model)
    with attached_to(model, 200) as attached:
        attached.add_request(PROMPT, plan=prepared, streaming=True, eos_token_id=-1)
        attached.get_result(timeout=WAIT)
        prepared.close()
        last = [*attached.request_id_iter("req_0")][-1]

    assert "closed while it ran" in last.error
    assert isinstance(last.hook_error, HookError)


BAD = {
    "an unknown module": (fh.Plan(fh.on("model.layers.7", fh.Zero())), SelectionError, "layers.7"),
    "another width": (
        fh.Plan(fh.on("lm_head", fh.Add(torch.ones(3)))),
        HookTypeError,
        "width of 3",
    ),
    "a backward hook": (
        fh.Plan(fh.on(LAYER, lambda *_: None, phase="backward")),
        HookError,
        r"entry 0 .* not compute gradients",
    ),
    "gradients": (fh.Plan(fh.keep(LAYER, grads=True)), HookError, "not compute gradients"),
    "an early end": (
        fh.Plan(fh.keep(LAYER, stop=True)),
        HookError,
        "end the forward for other requests",
    ),
    "calls": (fh.Plan(fh.keep(LAYER, calls="all")), HookError, "joined by position"),
    "no plan": ("layers", HookTypeError, "plan must be a Plan or a Prepared, got str"),
    "another model's": (
        fh.Plan(fh.keep("0")).prepare(nn.Sequential(nn.Linear(2, 2))),
        HookError,
        "prepared for a different model",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_plan_is_the_callers_error(model: Any, case: str) -> None:
    plan, error, message = BAD[case]
    with attached_to(model, NEW) as attached:
        with pytest.raises(error, match=message):
            attached.add_request(PROMPT, plan=plan)
        with pytest.raises(error, match=message):
            attached.add_requests([PROMPT], plans=[plan])
        attached.add_request(PROMPT)
        Job(PROMPT).check(model, attached.get_result(timeout=WAIT), NEW)
    with pytest.raises(error, match=message):
        transformers.generate_batch(model, [PROMPT], [plan])


ATTENTION = "model.layers.1.self_attn"
MISFITS = {
    "a part that is not there": (fh.keep(ATTENTION, output_index=7), r"=7: .* at \[0\]"),
    "a part that is None": (fh.keep(ATTENTION, output_index=-1), r"tensors at \[0\]"),
    "a part of a tensor": (fh.keep(LAYER, output_index=0), "is one tensor: leave it out"),
    "an attribute of a tensor": (fh.keep(LAYER, output_index="shape"), "is one tensor"),
    "a key that is not there": (fh.keep("model", output_index="x"), "'last_hidden_state'"),
    "a part without tensors": (fh.keep("model", output_index="past_key_values"), "tensors at"),
    "the sum of no pair": (fh.keep(ATTENTION, output_index="sum"), "tensors at"),
    "no row per token": (fh.keep(""), r"no tensor with a row per token: 3 tokens give"),
    "an index out of range": (fh.keep(LAYER, slice=(..., WIDTH)), f"tokens, {WIDTH}.*out of"),
    "a list out of range": (fh.keep(LAYER, slice=(..., [0, -WIDTH - 1])), "does not fit"),
    "too many indices": (fh.keep(LAYER, slice=(..., 0, 0, 0, 0)), "too many indices"),
    "a mask of another width": (
        fh.keep(LAYER, slice=(..., torch.ones(5, dtype=torch.bool))),
        "does not fit",
    ),
    "one row": (fh.keep(LAYER, slice=(..., 0, slice(None))), "must keep all tokens"),
    "the first row": (fh.keep(LAYER, slice=(..., [0], slice(None))), "must keep all tokens"),
    "every other row": (
        fh.keep(LAYER, slice=(..., slice(None, None, 2), slice(None))),
        "must keep all tokens",
    ),
    "rows and columns": (fh.keep(LAYER, slice=(..., [0, 1], [2, 3])), "must keep all tokens"),
    "one of the positions": (
        fh.keep(LAYER, at="generated", slice=(..., 0, slice(None))),
        "must keep all tokens",
    ),
    "out of range in all parts": (
        fh.keep("model.rotary_emb", slice=(..., 99)),
        "output of 'model.rotary_emb'",
    ),
    "out of range at a point": (fh.keep("@z.1", slice=(..., 99)), "'@z.1'.*out of"),
    "another width": (fh.on(LAYER, fh.Add(torch.ones(3))), f"width of 3, but .* has {WIDTH}"),
    "another width of an input": (
        fh.on("model.layers.1.mlp.down_proj", fh.Add(torch.ones(WIDTH)), phase="forward_pre"),
        "the input of 'model.layers.1.mlp.down_proj'",
    ),
    "a row for each of some tokens": (
        fh.on(LAYER, fh.Add(torch.ones(len(PROMPT), WIDTH))),
        "for every number of tokens",
    ),
    "a gate of another width": (
        fh.gate("on", LAYER, fh.Dot(torch.ones(5))),
        f"gate 'on' does not fit the output of .*width 5, got {WIDTH}",
    ),
    "a gate on a token that is not there": (
        fh.gate("on", "lm_head", fh.TokenProbability([10_000])),
        "token id 10000 .* out of range",
    ),
    "too many dimensions": (fh.on(LAYER, fh.Add(torch.ones(1, 1, 1, WIDTH))), "does not fit"),
    "a change of a missing part": (
        fh.on(ATTENTION, fh.Zero(output_index=4)),
        r"tensors at \[0\]",
    ),
    "a change of None": (fh.on(ATTENTION, fh.Scale(2.0, output_index=1)), r"tensors at \[0\]"),
    "a change of a tuple": (fh.on(ATTENTION, fh.Scale(2.0)), r"choose one of \[0\]"),
    "a change of token ids": (
        fh.on("model.embed_tokens", fh.Scale(2.0), phase="forward_pre"),
        "floating-point",
    ),
    "a change of keywords": (
        fh.on(ATTENTION, fh.Scale(2.0), phase="forward_pre"),
        "no positional argument",
    ),
}


@pytest.fixture(scope="module")
def attached(model: Any) -> Iterator[Attached]:
    with attached_to(model, NEW) as shared:
        yield shared


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_the_model_is_refused_at_the_door(attached: Attached, case: str) -> None:
    entry, message = MISFITS[case]
    with pytest.raises((HookError, HookTypeError), match=f"entry 0 .*{message}"):
        attached.add_request(PROMPT, plan=fh.Plan(entry))
    assert not attached._worker.requests


@pytest.mark.parametrize("name", ["at", "dtype", "hooks", "keep", "output_index"])
def test_an_option_of_plans_that_is_passed_to_the_engine_is_refused(
    model: Any, attached: Attached, name: str
) -> None:
    for call in (
        functools.partial(transformers.generate_batch, model, [PROMPT], plan=None),
        functools.partial(transformers.generate_batch, model, [PROMPT], **{name: 1}),
        functools.partial(attached.add_request, PROMPT, **{name: 1}),
        functools.partial(attached.add_requests, [PROMPT], **{name: 1}),
    ):
        with pytest.raises(HookTypeError, match="= and may ignore it"):
            call()
    assert not attached._worker.requests


@pytest.mark.parametrize(
    ("entry", "shape"),
    [
        (fh.keep("model", output_index="last_hidden_state"), (WIDTH,)),
        (fh.keep("model", output_index=0), (WIDTH,)),
        (fh.keep(LAYER, slice=(..., WIDTH - 1)), ()),
        (fh.keep(LAYER, slice=(..., [0, -WIDTH])), (2,)),
        (fh.keep(LAYER, slice=(..., None)), (WIDTH, 1)),
        (fh.keep(LAYER, at=slice(0, None), slice=(slice(None), 3)), ()),
        (fh.keep(ATTENTION, inputs=True, output_index="hidden_states", copy="clone"), (WIDTH,)),
    ],
    ids=repr,
)
def test_what_fits_is_kept_by_position(attached: Attached, entry: Any, shape: Any) -> None:
    attached.add_request(PROMPT, plan=fh.Plan(entry))
    output = attached.get_result(timeout=WAIT)

    (kept,) = output.acts.values()
    assert kept.shape == (len(PROMPT) + len(output.generated_tokens) - 1, *shape)


@pytest.mark.parametrize("vector", [torch.ones(1, WIDTH), torch.ones(1, 1, 1), torch.tensor(2.0)])
def test_vectors_that_broadcast_fit(attached: Attached, model: Any, vector: torch.Tensor) -> None:
    attached.add_request(PROMPT, plan=fh.Plan(fh.on(LAYER, fh.Add(vector, 5.0))))
    output = attached.get_result(timeout=WAIT)

    whole = vector.expand(1, 1, WIDTH).flatten()
    Job(PROMPT, (Change(1, fh.Add(whole, 5.0), None),)).check(model, output, NEW)


def test_each_input_has_a_plan_or_none(model: Any) -> None:
    with pytest.raises(ValueError, match="got 1 for 2"):
        transformers.generate_batch(model, [PROMPT, PROMPT], [None])


def test_an_id_is_of_one_request_with_a_plan_at_a_time(model: Any) -> None:
    with attached_to(model, 50) as attached:
        attached.add_request(PROMPT, "mine", plan=STEERED.plan, eos_token_id=-1)
        with pytest.raises(HookError, match="already has the id 'mine'"):
            attached.add_request(PROMPT, "mine", plan=STEERED.plan)
        first = attached.get_result(timeout=WAIT)
        attached.add_request(PROMPT, "mine", max_new_tokens=NEW)
        second = attached.get_result(timeout=WAIT)

    assert len(first.generated_tokens) == 50
    assert len(first.acts[LAYER].reshape(-1, WIDTH)) == len(PROMPT) + 49
    Job(PROMPT).check(model, second, NEW)


@pytest.fixture
def waiting(model: Any) -> Iterator[Attached]:
    """An engine whose loop does not run."""
    manager = model.init_continuous_batching(greedy(NEW), batching())
    with transformers.attach(manager) as attached:
        yield attached


@pytest.mark.parametrize("plan", [None, STEERED.plan], ids=["plain", "planned"])
def test_the_id_of_a_request_with_a_plan_is_no_other_requests(waiting: Attached, plan: Any) -> None:
    waiting.add_request(PROMPT, "mine", plan=STEERED.plan)
    with pytest.raises(HookError, match="already has the id 'mine'"):
        waiting.add_request(PROMPT, "mine", plan=plan)
    assert [*waiting._worker.requests] == ["mine"]
    assert waiting.input_queue.qsize() == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_that_is_being_submitted_stays(waiting: Attached, when: str) -> None:
    """The loop looks for forgotten requests before the engine has a new one, and after."""
    worker, put = waiting._worker, waiting.input_queue.put

    def putting(*args: Any, **options: Any) -> None:
        if when == "before":
            worker._forget_gone()
        put(*args, **options)
        worker._forget_gone()

    waiting.input_queue.put = putting
    waiting.add_request(PROMPT, "mine", plan=STEERED.plan)
    worker._forget_gone()
    assert [*worker.requests] == ["mine"]


def test_a_request_submitted_while_the_engine_is_asked_stays(
    waiting: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = waiting._worker
    states = worker._states()
    monkeypatch.setattr(
        worker, "_states", lambda: waiting.add_request(PROMPT, "mine", plan=STEERED.plan) and states
    )
    worker._forget_gone()
    assert [*worker.requests] == ["mine"]


def test_a_request_that_the_engine_refuses_is_forgotten(waiting: Attached) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        msg = "full"
        raise OSError(msg)

    waiting.input_queue.put = full
    with pytest.raises(OSError, match="full"):
        waiting.add_request(PROMPT, "mine", plan=STEERED.plan)
    assert not waiting._worker.requests


def test_ids_that_are_prefixes_of_each_other_are_others(model: Any) -> None:
    with attached_to(model, NEW) as attached:
        for name, plan in (("user", STEERED.plan), ("user-chat", None), ("use", None)):
            attached.add_request(PROMPT, name, plan=plan)
        outputs = take(attached, 3)
    for name, output in outputs.items():
        (STEERED if name == "user" else Job(PROMPT)).check(model, output, NEW)


def test_a_cancelled_request_is_forgotten(model: Any) -> None:
    with attached_to(model, 200) as attached:
        name = attached.add_request(PROMPT, plan=STEERED.plan, streaming=True, eos_token_id=-1)
        attached.get_result(timeout=WAIT)
        attached.cancel_request(name)
        attached.add_request(PROMPT, "next", plan=STEERED.plan, max_new_tokens=NEW)
        output = attached.get_result(timeout=WAIT)
        while output.request_id != "next":
            output = attached.get_result(timeout=WAIT)
        STEERED.check(model, output, NEW)
        assert "0 requests with plans" in repr(attached)
        attached.add_request(PROMPT, name, max_new_tokens=NEW)
        Job(PROMPT).check(model, attached.get_result(timeout=WAIT), NEW)


def test_streamed_outputs_end_with_the_captures(model: Any) -> None:
    with attached_to(model, NEW) as attached:
        name = attached.add_request(PROMPT, plan=STEERED.plan, streaming=True)
        outputs = [*attached.request_id_iter(name)]

    assert [len(output.generated_tokens) for output in outputs] == [*range(1, len(outputs) + 1)]
    assert all(output.hook_error is None for output in outputs)
    STEERED.check(model, outputs[-1], NEW)


def test_iterating_gives_the_managers_outputs(model: Any) -> None:
    jobs = [STEERED, Job(PROMPT), STEERED]
    with attached_to(model, NEW) as attached:
        names = attached.add_requests([job.prompt for job in jobs], plans=[j.plan for j in jobs])
        results = iter(attached)
        outputs = {each.request_id: each for each in (next(results) for _ in jobs)}
    for name, job in zip(names, jobs, strict=True):
        job.check(model, outputs[name], NEW)


def test_a_handler_gets_the_captures(model: Any) -> None:
    async def ask(attached: Attached) -> Any:
        done = asyncio.get_running_loop().create_future()
        attached.register_result_handler("mine", done.set_result)
        attached.add_request(PROMPT, "mine", plan=STEERED.plan)
        return await asyncio.wait_for(done, WAIT)

    with attached_to(model, NEW) as attached:
        STEERED.check(model, asyncio.run(ask(attached)), NEW)


def test_many_threads_add_requests(model: Any) -> None:
    jobs = [STEERED, Job(PROMPT)] * 8
    names: dict[str, Job] = {}
    with attached_to(model, NEW) as attached:
        start = threading.Barrier(4)

        def add(mine: list[Job]) -> None:
            start.wait(WAIT)
            for job in mine:
                names[attached.add_request(job.prompt, plan=job.plan)] = job

        threads = [threading.Thread(target=add, args=(jobs[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        outputs = [attached.get_result(timeout=WAIT) for _ in jobs]
        for thread in threads:
            thread.join(WAIT)
    assert len(names) == len(jobs)
    for output in outputs:
        names[output.request_id].check(model, output, NEW)


def test_detaching_fails_what_still_runs_with_a_plan(model: Any) -> None:
    with model.continuous_batching_context_manager(
        greedy(100), continuous_batching_config=batching()
    ) as manager:
        attached = transformers.attach(manager)
        attached.add_request(PROMPT, "steered", plan=STEERED.plan, eos_token_id=-1)
        attached.add_request(PROMPT, "plain", eos_token_id=-1)
        attached.close()
        attached.close()
        processor = manager.batch_processor
        parts = (processor.cache, processor.model_runner, processor.inputs_and_outputs)
        for owner in (manager, manager.output_router, *parts):
            methods = {name for name in dir(type(owner)) if callable(getattr(type(owner), name))}
            assert not methods & vars(owner).keys()
        outputs = take(manager, 2)
        with pytest.raises(HookError, match="was detached"):
            attached.add_request(PROMPT, plan=STEERED.plan)

    assert "was detached" in outputs["steered"].error
    assert len(outputs["plain"].generated_tokens) == 100


def test_requests_after_the_detachment_may_have_the_ids_of_failed_ones(model: Any) -> None:
    with model.continuous_batching_context_manager(
        greedy(100), continuous_batching_config=batching()
    ) as manager:
        attached = transformers.attach(manager)
        attached.add_request(PROMPT, "other", eos_token_id=-1)
        for number in range(4):
            attached.add_request([*PROMPT, number], str(number), plan=STEERED.plan, eos_token_id=-1)
        scheduler = manager.batch_processor.scheduler
        while len(scheduler.active_requests) + len(scheduler.waiting_requests) < 5:
            time.sleep(0.001)
        attached.close()
        for number in range(4):
            manager.add_request([*PROMPT, number], str(number), max_new_tokens=3)
        failed = take(manager, 4)
        answered = take(manager, 5)

    assert all("was detached" in it.error for it in failed.values())
    assert sorted(answered) == ["0", "1", "2", "3", "other"]
    assert not any(it.error for it in answered.values())


def test_an_engine_that_dies_fails_its_requests(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached_to(model, NEW) as attached:
        processor = attached.batch_processor

        def die() -> None:
            msg = "out of memory"
            raise MemoryError(msg)

        monkeypatch.setattr(processor, "update_batch", die)
        attached.add_request(PROMPT, plan=STEERED.plan)
        output = attached.get_result(timeout=WAIT)
        assert attached.get_result(timeout=0.1) is None
        assert attached.add_request(PROMPT, plan=STEERED.plan) is None
        assert "0 requests with plans" in repr(attached)

    assert output.status.name == "FAILED"
    assert "out of memory" in output.error


def test_a_manager_started_again_serves_plans(model: Any) -> None:
    manager = model.init_continuous_batching(greedy(NEW), batching())
    with transformers.attach(manager) as attached:
        for _ in range(2):
            attached.start()
            attached.add_request(PROMPT, plan=STEERED.plan)
            STEERED.check(model, attached.get_result(timeout=WAIT), NEW)
            attached.stop()


def test_the_cache_is_freed_with_the_manager(model: Any) -> None:
    with attached_to(model, NEW) as attached:
        attached.add_request(PROMPT, plan=STEERED.plan)
        output = attached.get_result(timeout=WAIT)
        cache = weakref.ref(attached.batch_processor.cache)
    del attached
    gc.collect()

    assert cache() is None
    STEERED.check(model, output, NEW)
