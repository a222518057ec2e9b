"""Requests with gates in transformers' continuous batching, among others without."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import ferrohook as fh
from ferrohook.engines import transformers as engine
from support.amounts import amount
from support.engines import EOS, WIDTH, attached_to, batching, greedy, tiny_llama

if TYPE_CHECKING:
    from torch import Tensor

NEW = 10
WAIT = 100
pytestmark = [
    pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # names of older versions
]


def plan_of(rng: random.Random) -> fh.Plan:
    """A plan whose steering follows a gate without a jump, as rows differ in rounding."""
    direction, vector = torch.randn(
        2, WIDTH, generator=torch.Generator().manual_seed(rng.randrange(10**6))
    )
    over = rng.choice(["token", "so_far", "prompt", fh.window(3), fh.ema(0.7)])
    by: Any = rng.choice(["max", "mean", "min", "last"])
    lag = 0 if over == "prompt" else rng.choice([0, 0, 1])
    read, changed = rng.choice([(0, 1), (1, 1), (0, 2)])
    return fh.Plan(
        fh.gate("g", f"model.layers.{read}", fh.Dot(direction), over=over, by=by, lag=lag),
        fh.on(f"model.layers.{changed}", fh.Add(vector), strength=fh.ramp("g", -4.0, 4.0)),
        fh.keep("@gate.g"),
    )


@torch.no_grad()
def alone(model: Any, plan: fh.Plan, prompt: list[int], text: list[int]) -> tuple[Tensor, Any]:
    """Logits from the prompt's last token on, and captures, of a request by itself."""
    cache = transformers.DynamicCache()
    with plan.prepare(model).open(prompt=len(prompt)) as request:
        ids = [prompt, *([token] for token in text[:-1])]
        outputs = [model(torch.tensor([each]), past_key_values=cache) for each in ids]
    return torch.cat([each.logits[0, -1:] for each in outputs]), request.acts


def test_requests_with_gates_answer_as_they_do_alone() -> None:
    rng = random.Random(0)  # noqa: S311 (a test)
    torch.manual_seed(0)
    model = tiny_llama()
    prefix = [rng.randrange(3, 64) for _ in range(16)]
    jobs = [
        (
            (prefix if number % 3 == 0 else [])
            + [rng.randrange(3, 64) for _ in range(rng.randint(1, 30))],
            None if number % 4 == 3 else plan_of(rng),
        )
        for number in range(amount(24, whole=400))
    ]
    # So few blocks that requests are preempted: their tokens run again.
    with attached_to(model, NEW, num_blocks=24, max_batch_tokens=20) as attached:
        for number, (prompt, plan) in enumerate(jobs):
            attached.add_request(prompt, str(number), plan=plan)
        outputs = [attached.get_result(timeout=WAIT) for _ in jobs]
    for output in outputs:
        prompt, plan = jobs[int(output.request_id)]
        assert output.error is None
        text = output.generated_tokens
        logits, acts = alone(model, plan or fh.Plan(), prompt, text)
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= 1e-3
        if plan is not None:
            torch.testing.assert_close(
                output.acts["@gate.g"], acts["@gate.g"], rtol=1e-3, atol=1e-3, equal_nan=True
            )


def test_plans_end_their_requests() -> None:
    """The text ends with the end-of-sequence token; other requests go on."""
    rng = random.Random(1)  # noqa: S311 (a test)
    torch.manual_seed(0)
    model = tiny_llama()
    jobs = []
    while len(jobs) < 12:
        prompt = [rng.randrange(3, 64) for _ in range(rng.randint(1, 20))]
        direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(len(jobs)))
        gate = fh.gate("g", "model.layers.1", fh.Dot(direction))
        with torch.no_grad(), fh.Plan(gate, fh.keep("@gate.g")).open(model) as request:
            ids = model.generate(torch.tensor([prompt]), generation_config=greedy(NEW))
        text, values = ids[0, len(prompt) :].tolist(), request.acts["@gate.g"].tolist()
        last = rng.randint(len(prompt) - 1, len(values) - 1)
        seen = {at: values[at] for at in range(len(prompt) - 1, last + 1)}
        end = max(seen, key=seen.__getitem__)
        others = [it for at, it in seen.items() if at < end]
        if others and seen[end] - max(others) < 0.01:
            continue  # rows differ in rounding
        plan = fh.Plan(gate, fh.stop(when=fh.above("g", seen[end] - 0.005)), fh.keep("@gate.g"))
        jobs.append((prompt, plan, text, end + 1 - len(prompt)))
    with attached_to(model, NEW, num_blocks=64, max_batch_tokens=32) as attached:
        for number, (prompt, plan, _, _) in enumerate(jobs):
            attached.add_request(prompt, f"stops-{number}", plan=plan)
            attached.add_request(prompt, f"goes-on-{number}")
        outputs = [attached.get_result(timeout=WAIT) for _ in range(2 * len(jobs))]
    for output in outputs:
        kind, _, number = output.request_id.rpartition("-")
        _, _, text, tokens = jobs[int(number)]
        assert output.error is None
        if kind == "goes-on":
            assert output.generated_tokens == text
            continue
        assert output.generated_tokens == [*text[:tokens], EOS]
        assert len(output.acts["@gate.g"]) == len(output.prompt_ids) + tokens


def test_a_stop_needs_a_token_for_the_end() -> None:
    torch.manual_seed(0)
    model = tiny_llama()
    plan = fh.Plan(fh.gate("g", "model.layers.0", fh.Norm()), fh.stop(when=fh.above("g", -1.0)))
    endless = greedy(NEW)
    endless.eos_token_id = None
    with (
        model.continuous_batching_context_manager(
            endless, continuous_batching_config=batching(num_blocks=24)
        ) as manager,
        engine.attach(manager) as attached,
    ):
        attached.add_request([3, 4, 5], "one", plan=plan)
        output = attached.get_result(timeout=WAIT)
    assert "no end-of-sequence token" in output.error


@pytest.mark.parametrize("over", ["token", "prompt", "so_far", fh.window(3), fh.ema(0.7)], ids=str)
def test_forks_have_the_readings_of_their_prompt(over: Any) -> None:
    """Their prompt runs for the first of them only."""
    plan = fh.Plan(
        fh.gate("g", "model.layers.0", fh.Dot(torch.ones(WIDTH)), over=over),
        fh.on("model.layers.1", fh.Scale(0.9), strength=fh.ramp("g", -1.0, 1.0)),
        fh.keep("@gate.g"),
    )
    found = engine.generate_batch(
        tiny_llama(),
        [[5, 6, 7, 8, 9]],
        plans=[plan],
        generation_config=greedy(4, forks=3),
        continuous_batching_config=batching(),
    )
    first, *forks = (found[name] for name in sorted(found))
    assert len(forks) == 2
    for fork in forks:
        assert fork.error is None
        assert fork.generated_tokens == first.generated_tokens
        torch.testing.assert_close(fork.acts["@gate.g"], first.acts["@gate.g"], equal_nan=True)
