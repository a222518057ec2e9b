"""Plans that make rows NaN or infinite fail only their own requests."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
)

import ferrohook as fh
from ferrohook.engines import transformers
from ferrohook.errors import HookError
from support import amounts
from support.engines import EOS, SIZES, WIDTH, batching, greedy

NUMBER = 40
HOSTILE = range(0, NUMBER, 10)
NEW = 6

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    # Its layers overwrite their input: a step cannot be run twice.
    "sliding": MistralConfig(**SIZES, sliding_window=8),
    # LayerNorm makes NaN of large numbers, RMSNorm zero.
    "gpt2": GPT2Config(
        vocab_size=64,
        n_positions=256,
        n_embd=WIDTH,
        n_layer=3,
        n_head=2,
        bos_token_id=1,
        eos_token_id=EOS,
    ),
}


def nan(_module: object, _args: object, output: Any) -> Any:
    """A hook in Python."""
    if isinstance(output, tuple):
        return (output[0] * torch.nan, *output[1:])
    return output * torch.nan


def layer(model: Any, number: int) -> str:
    return (
        f"transformer.h.{number}" if "gpt2" in model.config.model_type else f"model.layers.{number}"
    )


def keys(model: Any, number: int) -> str:
    part = "attn.c_attn" if "gpt2" in model.config.model_type else "self_attn.k_proj"
    return f"{layer(model, number)}.{part}"


HOOKS: dict[str, Any] = {
    "scale": lambda model: fh.on(layer(model, 0), fh.Scale(1e38)),
    "add": lambda model: fh.on(layer(model, 1), fh.Add(torch.full((WIDTH,), 3e38))),
    "twice": lambda model: fh.on(layer(model, 0), fh.Add(torch.full((WIDTH,), 60_000.0), scale=4)),
    "python": lambda model: fh.on(layer(model, 0), nan),
    "keys": lambda model: fh.on(keys(model, 1), nan),
    "large keys": lambda model: fh.on(keys(model, 1), fh.Scale(3e37)),
    "logits": lambda model: fh.on("lm_head", nan),
    "generated": lambda model: fh.on(layer(model, 0), fh.Scale(1e38), at="generated"),
}


def prompts() -> list[list[int]]:
    rng = random.Random(0)  # noqa: S311 (tests)
    return [[rng.randrange(3, 60) for _ in range(rng.randrange(3, 20))] for _ in range(NUMBER)]


DTYPES = ("float32", "bfloat16", "float16")


@functools.cache
def made(config: str, dtype: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[config]).to(getattr(torch, dtype))
    return model.eval().requires_grad_(requires_grad=False)


@functools.cache
def alone(model: Any, **settings: int) -> dict[int, list[int]]:
    """Texts without plans, of the prompts where a rounding decides no token.

    The last bits depend on the size of a batch.
    """
    outputs = model.generate_batch(
        prompts(),
        generation_config=greedy(NEW),
        continuous_batching_config=batching(**settings),
    )
    found = {}
    for number, output in enumerate(outputs.values()):
        prompt, text = output.prompt_ids, output.generated_tokens
        logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].float()
        first, second = logits.topk(2).values.unbind(-1)
        if (first - second).min() > 2 * torch.finfo(model.dtype).eps * logits.abs().max():
            found[number] = text
    assert len(found) > NUMBER / 4
    return found


SETTINGS: dict[str, dict[str, int]] = {
    "roomy": {},
    "preempted": {"max_batch_tokens": 9, "num_blocks": 12},
}
CASES = list(itertools.product(CONFIGS, HOOKS, SETTINGS, DTYPES))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draws one room and dtype for each model and hook, and all of them with `--whole`."""
    if "case" in metafunc.fixturenames:
        cases = (
            CASES
            if amounts.everything
            else [CASES[6 * each + each % 6] for each in range(len(CASES) // 6)]
        )
        metafunc.parametrize("case", cases, ids=map("-".join, cases))


def test_neighbours_are_not_reached(case: tuple[str, str, str, str]) -> None:
    config, hook, room, dtype = case
    model, settings = made(config, dtype), SETTINGS[room]
    hostile, seen = fh.Plan(HOOKS[hook](model)), fh.Plan(fh.keep(layer(model, 2)))
    plans = [hostile if each in HOSTILE else (seen, None)[each % 2] for each in range(NUMBER)]
    outputs = transformers.generate_batch(
        model,
        prompts(),
        plans,
        generation_config=greedy(NEW),
        continuous_batching_config=batching(**settings),
    )

    expected = alone(model, **settings)
    wrong = 0
    for number, output in enumerate(outputs.values()):
        if number in HOSTILE:
            assert output.hook_error is not None or output.generated_tokens
            continue
        assert output.hook_error is None
        wrong += output.generated_tokens != expected.get(number, output.generated_tokens)
        assert all(bool(each.isfinite().all()) for each in output.acts.values())
    assert wrong == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_finite_keys_in_float16_are_hidden_too(sign: int) -> None:
    """Their scores are above a mask of the lowest number in float16."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).half().eval()
    model.requires_grad_(requires_grad=False)
    for each in model.model.layers:
        each.self_attn.q_proj.weight.mul_(20)
    attention = "model.layers.1.self_attn"
    width = model.get_submodule(f"{attention}.k_proj").out_features
    hostile = fh.Plan(
        fh.on(f"{attention}.k_proj", fh.Replace(torch.full((width,), sign * 60_000.0))),
        fh.on(f"{attention}.v_proj", fh.Replace(torch.full((width,), 50.0))),
    )
    outputs = transformers.generate_batch(
        model,
        prompts(),
        [hostile if each in HOSTILE else None for each in range(NUMBER)],
        generation_config=greedy(NEW),
        continuous_batching_config=batching(),
    )
    expected = alone(model)
    texts = [output.generated_tokens for output in outputs.values()]
    assert [number for number in expected if number not in HOSTILE] == [
        number for number in expected if number not in HOSTILE and texts[number] == expected[number]
    ]


def test_eager_attention_in_float16_is_refused() -> None:
    config = copy.deepcopy(CONFIGS["llama"])  # transformers notes the implementation there
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").half()
    with pytest.raises(HookError, match=r"float16 with eager attention is not supported .*sdpa"):
        transformers.generate_batch(model, [[3, 4]], [None], continuous_batching_config=batching())


def test_drawing_and_later_requests_go_on() -> None:
    """NaN among probabilities would end the engine; keys and values stay after a request."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    config = batching(num_blocks=12)
    settings = greedy(NEW)
    settings.do_sample, settings.top_k = True, 1
    expected = alone(model, num_blocks=12)
    with (
        torch.no_grad(),
        model.continuous_batching_context_manager(
            settings, continuous_batching_config=config
        ) as manager,
        transformers.attach(manager) as attached,
    ):
        for _ in range(3):
            for entry in (each(model) for each in HOOKS.values()):
                name = attached.add_request(prompts()[0], plan=fh.Plan(entry))
                assert attached.get_result(name, timeout=30).is_finished()
            for number in range(1, 6):
                name = attached.add_request(prompts()[number])
                text = attached.get_result(name, timeout=30).generated_tokens
                assert text == expected.get(number, text)


@pytest.mark.parametrize(
    "hook",
    [fh.Scale(float("inf")), fh.Add(torch.full((WIDTH,), torch.nan))],
)
def test_numbers_of_a_plan_are_finite(hook: fh.Intervention) -> None:
    """A bound that is left out is none of them."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    with pytest.raises(HookError, match=r"entry 1 of the plan .* its hook contains NaN"):
        transformers.generate_batch(
            model,
            [[3, 4]],
            [
                fh.Plan(
                    fh.on("model.layers.0", fh.Clamp(torch.ones(WIDTH), high=1.0)),
                    fh.on("model.layers.0", hook),
                )
            ],
            generation_config=greedy(NEW),
            continuous_batching_config=batching(),
        )
