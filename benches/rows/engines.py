"""Engines that batch continuously: plans of the requests, beside the engine without them."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
from benches.harness import Group, Row, Sampler, expect, one_thread, timed

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYERS, WIDTH = 8, 256
PROMPT, TEXT = 16, 32
IDLE, STEERED, CAPTURED = "attached, no plans", "all steered in all layers", "all layers captured"


def small_llama() -> Any:
    """A random Llama of 8 layers and width 256."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (slow to import)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)


def manager_of(model: Any, requests: int) -> Any:
    """An engine with room for all requests."""
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415

    return model.init_continuous_batching(
        GenerationConfig(max_new_tokens=TEXT, do_sample=False, eos_token_id=-1),
        ContinuousBatchingConfig(
            page_size=16,
            num_blocks=8 * requests,
            max_batch_tokens=16 * requests,
            allow_block_sharing=False,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
        ),
    )


def served(manager: Any, prompts: list[list[int]], add: Any, plans: Sequence[Any]) -> list[Any]:
    """Serves requests, the engine's loop in this thread: its CPU time is the sample's."""
    status = manager.background_thread_status
    status.clear()
    names = [add(prompt, plan=plan) for prompt, plan in zip(prompts, plans, strict=True)]
    status.request_stop(status.FLUSH_AND_STOP, 0)  # once all are served
    loop = manager._run_generation_loop
    # From transformers 5.24 on it takes whether to run in inference mode.
    loop(*(False for _ in inspect.signature(loop).parameters))
    queue = manager.output_router.output_queue
    outputs = {output.request_id: output for output in (queue.get_nowait() for _ in names)}
    return [outputs[name] for name in names]


def side(manager: Any, prompts: list[list[int]], add: Any, plans: Sequence[Any]) -> Sampler:
    """Samples the CPU time of a token."""

    def loop(count: int) -> None:
        with one_thread():
            for _ in range(count):
                served(manager, prompts, add, plans)

    return timed(loop, per=len(prompts) * TEXT, nanoseconds=1e3)


def transformers_requests(number: int) -> dict[str, Sampler]:
    """Requests that arrive at once."""
    from ferrohook.engines.transformers import attach  # noqa: PLC0415

    model = small_llama()
    prompts = torch.randint(1000, (number, PROMPT)).tolist()
    # A model each: plans that are prepared for it are hooks of its modules.
    plain, idle, ours = (manager_of(each, number) for each in (small_llama(), small_llama(), model))
    add_idle, add = attach(idle).add_request, attach(ours).add_request

    def add_plain(prompt: list[int], *, plan: None) -> Any:  # noqa: ARG001 (as `add` has it)
        return plain.add_request(prompt)

    none = [None] * number
    names = [f"model.layers.{layer}" for layer in range(LAYERS)]
    vectors = torch.randn(number, LAYERS, WIDTH) / 10
    steered = [
        fh.Plan(*(fh.on(name, fh.Add(v)) for name, v in zip(names, vectors[each], strict=True)))
        for each in range(number)
    ]
    kept = [fh.Plan(fh.keep(names)).prepare(model)] * number
    expected = served(plain, prompts, add_plain, none)
    for manager, adder, plans in ((idle, add_idle, none), (ours, add, kept)):
        outputs = served(manager, prompts, adder, plans)
        same = all(
            a.generated_tokens == b.generated_tokens for a, b in zip(expected, outputs, strict=True)
        )
        expect(same, "the texts of the engine without plans")
    rows = PROMPT + TEXT - 1
    for output in outputs:
        expect(len(output.acts) == LAYERS, "all layers captured")
        expect(output.acts[names[0]].numel() == rows * WIDTH, "each position captured")
    for each, output in enumerate(served(ours, prompts, add, steered)):
        expect(
            text_alone(model, prompts[each], steered[each]) == output.generated_tokens,
            "the text that a request steered alone has",
        )
    prepared = [plan.prepare(model) for plan in steered]
    title = f"{number} requests"
    return {
        f"{title}, the engine alone": side(plain, prompts, add_plain, none),
        f"{title}, {IDLE}": side(idle, prompts, add_idle, none),
        f"{title}, {STEERED}": side(ours, prompts, add, prepared),
        f"{title}, {CAPTURED}": side(ours, prompts, add, kept),
    }


def text_alone(model: Any, prompt: list[int], plan: fh.Plan) -> list[int]:
    """Returns a greedy text, the whole sequence anew for each token."""
    tokens = list(prompt)
    with torch.no_grad(), plan.prepare(model) as prepared:
        for _ in range(TEXT):
            with prepared.open():
                logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def group(number: int, steered_bar: float) -> Group:
    """The rows of so many requests."""
    title = f"{number} requests"
    alone = f"{title}, the engine alone"
    return Group(
        name=f"transformers' continuous batching: {title}",
        setup=partial(transformers_requests, number),
        unit="us a token",
        repeats=11,
        needs="transformers",
        rows=[
            Row(name=f"{title}, {IDLE}", over=alone, bar=1.02),
            Row(name=f"{title}, {STEERED}", over=alone, bar=steered_bar),
            Row(name=f"{title}, {CAPTURED}", over=alone, bar=1.05),
        ],
    )


GROUPS = [group(16, 1.06), group(64, 1.04)]
