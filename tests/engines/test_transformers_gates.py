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
from support.engines import WIDTH, batching, greedy, tiny_llama

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
    settings = batching(num_blocks=24, max_batch_tokens=20)
    with (
        model.continuous_batching_context_manager(
            greedy(NEW), continuous_batching_config=settings
        ) as manager,
        engine.attach(manager) as attached,
    ):
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
