"""Plans of quantities in transformers' continuous batching: as each request gives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import ferrohook as fh
from ferrohook.engines import capabilities
from ferrohook.engines.planned import EnginePlans
from ferrohook.engines.transformers import attach, generate_batch
from ferrohook.engines.transformers.steps import ROWS
from support import smollm2
from support.engines import batching
from support.quantity_plans import NEW, PROMPTS, WIDTH, alone, read_plan, texts, wrong_plans
from support.routes import check_routes

SIZES = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    # transformers' functions for pages have no softcap.
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 4, "attn_logit_softcapping": None}),
    "moe": (
        "Qwen2Moe",
        {
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    name, more = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    cls = getattr(transformers, f"{name}ForCausalLM")
    return cls(config).eval().requires_grad_(requires_grad=False)


def generate(model: Any, asked: list[tuple[list[int], str]]) -> list[tuple[list[int], Any]]:
    prompts = [prompt for prompt, _ in asked]
    plans = [read_plan(text) for _, text in asked]
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = generate_batch(
        model,
        prompts,
        plans=plans,
        generation_config=settings,
        continuous_batching_config=batching(num_blocks=96),
        progress_bar=False,
    )
    found = [outputs[f"req_{number}"] for number in range(len(plans))]
    for each in found:
        if each.hook_error is not None:
            raise each.hook_error
    return [([*each.generated_tokens], dict(each.acts)) for each in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_was_trained(dtype: str) -> None:
    """Its stream has massive activations, which random ones lack."""
    model = smollm2.loaded(dtype)
    assert smollm2.wrong_plans(model, lambda asked: generate(model, asked)) == {}


def test_twelve_plans_at_once_give_what_each_gives_alone(model: Any) -> None:
    assert wrong_plans(model, lambda asked: generate(model, asked)) == {}


def test_the_plans_do_something(model: Any) -> None:
    plain = alone(model, fh.Plan(fh.keep("@final_norm")), PROMPTS[0], NEW)[1]
    for name, text in texts().items():
        changes = read_plan(text) + fh.Plan(fh.keep("@final_norm", label="end"))
        if name.startswith("read"):
            continue
        acts = alone(model, changes, PROMPTS[0], NEW)[1]
        assert not torch.allclose(acts["end:@final_norm"], plain["@final_norm"]), name


@pytest.mark.parametrize("at", [None, 0])
def test_the_pattern_is_refused_at_the_door_with_what_to_do(model: Any, at: Any) -> None:
    plan = fh.Plan(fh.keep("@pattern.1", at=at))
    refused = r"entry 0 .* @pattern.1: the keys of all requests share pages.*call of the model"
    with pytest.raises(fh.HookError, match=refused):
        generate_batch(model, [PROMPTS[0]], plans=[plan])
    manager = model.init_continuous_batching(continuous_batching_config=batching(num_blocks=96))
    with attach(manager) as attached:
        with pytest.raises(fh.HookError, match=refused):
            attached.add_request(PROMPTS[0], plan=plan)
        assert not attached._worker._states()


def test_capabilities_list_the_quantities_of_a_model_with_their_proofs(model: Any) -> None:
    found = capabilities("transformers", model)
    plain = capabilities("transformers")
    assert (found.served, found.refused) == (plain.served, plain.refused)
    assert not plain.quantities
    table = fh.quantities(model)
    assert found.quantities["@attn_out.1"] == {
        "place": table["@attn_out.1"].place,
        "equation": table["@attn_out.1"].equation,
        "residual": table["@attn_out.1"].residual,
        "writable": True,
    }
    assert {*found.quantities} == {*table} | {f"@{name}" for name in table.missing}
    # A plan with a refused name is refused for the same reason; listed ones a plan may keep.
    for name, each in found.quantities.items():
        plan = fh.Plan(fh.keep(name))
        if "refused" not in each:
            EnginePlans(model, dim=ROWS).serve(plan)
            continue
        with pytest.raises(fh.HookError) as error:
            EnginePlans(model, dim=ROWS).serve(plan)
        assert each["refused"] in str(error.value)


def test_requests_take_their_own_experts(model: Any) -> None:
    if model.config.model_type != "qwen2_moe":
        pytest.skip("without a mixture of experts")
    check_routes(model, lambda asked: generate(model, asked))


def test_only_transformers_takes_a_model() -> None:
    with pytest.raises(ValueError, match="vllm loads and inspects its model itself"):
        capabilities("vllm", torch.nn.Linear(1, 1))
