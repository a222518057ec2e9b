"""transformers' continuous batching with plans, against each request alone, hooked by hand."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

transformers_package = pytest.importorskip("transformers")

import ferrohook as fh
from ferrohook.engines import transformers
from ferrohook.engines.transformers import steps as transformers_steps
from support.engines import (
    LAYERS,
    SIZES,
    WIDTH,
    Change,
    Job,
    attached_to,
    batching,
    greedy,
    random_jobs,
    tiny_llama,
)
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator


NUMBER = 40
"""Requests of each random run; the issue's 5,000 by hand."""
NEW = 8


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny_llama()


@pytest.fixture(autouse=True)
def _nothing_is_left(model: Any) -> Iterator[None]:
    plain = {name: type(module) for name, module in model.named_modules()}
    yield
    for name, module in model.named_modules():
        assert type(module) is plain[name], f"{name} is instrumented"
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def served(model: Any, jobs: list[Job], seed: int, **settings: Any) -> dict[str, Any]:
    """Runs jobs that come at random times; a seventh is cancelled at some time.

    Returns the outputs by id, which is the job's index.
    """
    rng = random.Random(seed)  # noqa: S311 (tests)
    config = batching(**settings)
    cancelled = {str(index) for index in range(len(jobs)) if rng.random() < 1 / 7}
    outputs: dict[str, Any] = {}

    def take() -> bool:
        output = attached.get_result(timeout=0.05)
        if output is not None:
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        return output is not None

    with (
        model.continuous_batching_context_manager(
            greedy(NEW), continuous_batching_config=config
        ) as manager,
        transformers.attach(manager) as attached,
    ):
        for index, job in enumerate(jobs):
            attached.add_request(job.prompt, str(index), plan=job.plan)
            if rng.random() < 1 / 3:
                take()
            for name in cancelled & {str(rng.randrange(index + 1)) for _ in range(3)}:
                attached.cancel_request(name)
        for name in cancelled:
            attached.cancel_request(name)
        while take() or outputs.keys() | cancelled < set(map(str, range(len(jobs)))):
            assert manager.is_running()
    return outputs


@pytest.mark.parametrize("sharing", [True, False], ids=["prefixes shared", "not shared"])
@pytest.mark.parametrize("blocks", [128, 12], ids=["roomy", "preempted"])
@pytest.mark.parametrize("tokens", [9, 64], ids=["chunked", "whole"])
def test_each_request_is_what_it_is_alone(
    model: Any, sharing: bool, blocks: int, tokens: int, request: pytest.FixtureRequest
) -> None:
    number = request.config.getoption("requests") or NUMBER
    jobs = random_jobs(number, seed=tokens + blocks)
    outputs = served(
        model,
        jobs,
        seed=tokens,
        num_blocks=blocks,
        max_batch_tokens=tokens,
        allow_block_sharing=sharing,
    )
    for name, output in outputs.items():
        jobs[int(name)].check(model, output, NEW)


def test_without_plans_texts_are_those_of_the_engine_without_us(model: Any) -> None:
    prompts = [job.prompt for job in random_jobs(20, seed=1)]

    options = {"generation_config": greedy(NEW), "continuous_batching_config": batching()}
    plain = model.generate_batch(prompts, **options)
    ours = transformers.generate_batch(model, prompts, **options)

    assert [*ours] == [*plain]
    for name, output in ours.items():
        assert output.generated_tokens == plain[name].generated_tokens
        assert output.acts == {}
        assert output.hook_error is None


def test_generate_batch_gives_each_prompt_its_plan(model: Any) -> None:
    jobs = random_jobs(24, seed=2)

    outputs = transformers.generate_batch(
        model,
        [job.prompt for job in jobs],
        [job.plan for job in jobs],
        generation_config=greedy(NEW),
        continuous_batching_config=batching(),
    )

    assert [*outputs] == [f"req_{index}" for index in range(len(jobs))]
    for job, output in zip(jobs, outputs.values(), strict=True):
        job.check(model, output, NEW)


STRONG = Change(1, fh.Add(torch.ones(WIDTH), scale=5.0), None)


@pytest.mark.parametrize("first", ["steered", "plain"])
def test_steered_keys_and_values_are_nobody_elses(model: Any, first: str) -> None:
    prompt = list(range(3, 43))  # five blocks
    steered, plain = Job(prompt, (STRONG,), ("model.layers.2",)), Job(prompt)
    order = [steered, plain, plain, steered]
    jobs = order if first == "steered" else order[::-1]

    with attached_to(model, NEW, allow_block_sharing=True) as attached:
        for job in jobs:  # one after the other: later ones find the blocks of those before
            attached.add_request(job.prompt, plan=job.plan)
            job.check(model, attached.get_result(timeout=60), NEW)


def test_a_capture_gets_positions_that_others_have_cached(model: Any) -> None:
    prompt = list(range(3, 43))
    watching = Job(prompt, (), ("model.layers.0",))
    with (
        model.continuous_batching_context_manager(
            greedy(NEW), continuous_batching_config=batching(allow_block_sharing=True)
        ) as manager,
        transformers.attach(manager) as attached,
    ):
        matched = []
        cache = manager.batch_processor.cache
        search = cache.search_prefix_match
        cache.search_prefix_match = lambda *args: matched.append(search(*args)) or matched[-1]
        for job in (Job(prompt), watching, Job(prompt)):
            attached.add_request(job.prompt, plan=job.plan)
            job.check(model, attached.get_result(timeout=60), NEW)
        cache.search_prefix_match = search
    # The last prompt finds the blocks of the first, or of the capture, which changed nothing.
    assert matched == [0, 0, 32]


@pytest.mark.parametrize("blocks", [64, 9], ids=["forked", "some prefilled anew"])
def test_forks_have_the_plan_and_the_prompt_of_their_parent(model: Any, blocks: int) -> None:
    # Prompts of one token are forked before they have run. Beside others: a step of no token at all
    # ends the engine, with plans and without.
    jobs = [Job([5, 6, 7]), *random_jobs(12, seed=5), Job([8], kept=("model.layers.1",)), Job([9])]
    assert sum(len(job.prompt) == 1 for job in jobs) > 1
    config = batching(num_blocks=blocks, max_batch_tokens=16)

    outputs = transformers.generate_batch(
        model,
        [job.prompt for job in jobs],
        [job.plan for job in jobs],
        generation_config=greedy(NEW, forks=3),
        continuous_batching_config=config,
    )

    assert len(outputs) == 3 * len(jobs)
    for name, output in outputs.items():
        job = jobs[int(name.partition("__")[0].removeprefix("req_"))]
        job.check(model, output, NEW)


EXPERTS = transformers_package.MixtralConfig(num_local_experts=4, **SIZES)
HEADS_FIRST = transformers_package.Gemma3TextConfig(head_dim=16, sliding_window=8, **SIZES)


@pytest.mark.parametrize(
    ("config", "module", "dim"),
    [
        (EXPERTS, "model.layers.0.mlp.experts", 0),
        (EXPERTS, "model.layers.0.mlp", None),
        (HEADS_FIRST, "model.layers.0.self_attn.q_norm", 2),
    ],
    ids=["experts", "a mixture of experts", "normalised heads"],
)
def test_rows_are_found_in_other_dimensions(config: Any, module: str, dim: int | None) -> None:
    model = transformers_package.AutoModelForCausalLM.from_config(config)
    model.eval().requires_grad_(False)
    hooked = [Job(prompt, python=module) for prompt in ([3, 4, 5], [6, 7], list(range(8, 30)))]
    jobs = [job for each in hooked for job in (each, Job(each.prompt))]
    options = {
        "generation_config": greedy(NEW),
        "continuous_batching_config": batching(max_batch_tokens=8),
    }

    outputs = transformers.generate_batch(
        model, [job.prompt for job in jobs], [job.plan for job in jobs], **options
    )

    for job, output in zip(jobs, outputs.values(), strict=True):
        job.check(model, output, NEW)
    manager = model.init_continuous_batching(**options)
    manager.warmup()
    found = transformers_steps.check_row_map(manager)[0]
    assert found.other_dims.get(model.get_submodule(module)) == dim


@pytest.mark.parametrize("kept", ["model", "model.layers.1.self_attn", "model.layers.1.mlp"])
def test_a_capture_of_any_module_is_by_position(model: Any, kept: str) -> None:
    job = Job(list(range(3, 30)), (), (kept,))
    options = {"generation_config": greedy(NEW), "continuous_batching_config": batching()}
    plan = fh.Plan(fh.keep(kept, output_index=None if kept.endswith("mlp") else 0))

    (output,) = transformers.generate_batch(model, [job.prompt], [plan], **options).values()

    positions = len(job.prompt) + len(output.generated_tokens) - 1
    assert output.acts[kept].reshape(-1, WIDTH).shape == (positions, WIDTH)


def test_layers_are_hooked_by_glob(model: Any) -> None:
    vectors = torch.randn(LAYERS, WIDTH)
    job = Job(
        list(range(3, 30)),
        tuple(Change(layer, fh.Add(vectors[layer]), "generated") for layer in range(LAYERS)),
        tuple(f"model.layers.{layer}" for layer in range(LAYERS)),
    )
    entries = [
        fh.on(f"model.layers.{n}", fh.Add(vectors[n]), at="generated") for n in range(LAYERS)
    ]
    plan = fh.Plan(*entries, fh.keep("model.layers.*"))

    options = {"generation_config": greedy(NEW), "continuous_batching_config": batching()}
    (output,) = transformers.generate_batch(model, [job.prompt], [plan], **options).values()

    job.check(model, output, NEW)


def test_attaching_waits_for_an_engine_that_starts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread makes its processor, which would be another one."""
    plan, settings = fh.Plan(fh.keep("model.layers.0")), {"generation_config": greedy(NEW)}

    def manager() -> Any:
        return model.init_continuous_batching(continuous_batching_config=batching(), **settings)

    def ran(attached: Any, **options: Any) -> Any:
        attached.add_request([5, 9, 11, 20], "a", **options)
        output = attached.get_result(timeout=LIMIT)
        assert output is not None
        return output

    plain = manager()
    plain.start()
    expected = ran(plain).generated_tokens
    plain.stop(block=True)
    made = manager()
    create, began = type(made)._create_batch_processor, threading.Event()

    def slowly(self: Any) -> Any:
        began.set()
        time.sleep(0.5)
        return create(self)

    monkeypatch.setattr(type(made), "_create_batch_processor", slowly)
    made.start()
    assert began.wait(LIMIT)
    with transformers.attach(made) as attached:
        output = ran(attached, plan=plan)
    made.stop(block=True)
    assert output.generated_tokens == expected
    assert len(output.acts["model.layers.0"]) == 4 + NEW - 1
