"""Plans of quantities in vLLM: the same JSON, captures and texts as in transformers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import transformers

import ferrohook as fh
from ferrohook.engines.vllm.plugin import connect
from support import serving
from support.quantity_plans import (
    ABSENT,
    HEAD,
    NEW,
    PROMPTS,
    WIDTH,
    alone,
    check,
    check_router,
    differing,
    wrong_plans,
)
from support.routes import BAD_ROUTES, check_routes
from support.vllm_engine import sampling, serve_plans, start, start_compiled, stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIGS = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": HEAD, "num_key_value_heads": 1}),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": HEAD, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": HEAD},
    ),
    "llama": (transformers.LlamaConfig, {}),
    "moe": (transformers.Qwen2MoeConfig, {}),
    "mixtral": (transformers.MixtralConfig, {}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {}),
    "glm4_moe": (transformers.Glm4MoeConfig, {}),
    "olmo2": (transformers.Olmo2Config, {}),
    "neox": (transformers.GPTNeoXConfig, {"use_parallel_residual": False}),
}
BACKEND = {"olmo2": "transformers", "neox": "transformers"}
"""Implementations of models, where they are not vLLM's."""


def saved(kind: str, folder: Path) -> Any:
    """Saves a model of a kind, and returns it as transformers runs it."""
    config, more = CONFIGS[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(serving.CONFIGS, kind, config)
        model = serving.save_model(kind, folder, **more)
    if kind in BACKEND:
        for name, weight in model.named_parameters():
            if "norm" in name:  # two norms of one tensor are alike as they are made
                weight.add_(torch.linspace(0, 0.3, len(weight)).roll(len(name)))
        model.save_pretrained(folder)
        model.base_model.do_not_compile = True  # vLLM's decorator of the class asks for it
    model.set_attn_implementation("eager")  # sdpa has no softcap
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = saved(request.param, folder)
    llm = start(folder, model_impl=BACKEND.get(request.param, "auto"))
    yield llm, model
    stop(llm)


def test_plans_at_once_give_what_transformers_gives_for_each(engine: Any) -> None:
    llm, model = engine
    assert wrong_plans(model, lambda asked: serve_plans(llm, asked)) == {}


def test_what_does_not_fit_is_refused_at_the_door_with_the_reason(engine: Any) -> None:
    llm, _ = engine
    vector = torch.ones(WIDTH)
    for entry, reason in (
        (fh.keep("@pattern.1"), "@pattern.1 is not proved .* attention does not compute a pattern"),
        (fh.keep("@logits"), "@logits is not proved .* only for the tokens that it samples from"),
        (fh.keep("@resid_post.9"), r"has no @resid_post.9: its blocks are 0 to \d"),
        (fh.on("@resid_mid.1", fh.Zero()), "@resid_mid.1 can be read but not written"),
        (fh.on("@z.1", fh.Add(vector)), "has a width of 64, but the head of @z.1 has 32"),
        (fh.on("@z.1", fh.Ablate(torch.ones(HEAD))), "Ablate on @z.1 acts on each head"),
        (fh.on("@z.1.2", fh.Zero()), "@z.1.2 names no head: @z.1 has heads 0 to 1"),
        (fh.on("@z.1.1", fh.Add(vector)), "has a width of 64, but the tensor @z.1.1 has 32"),
        (fh.on("@q.1.1", fh.Zero(), at=0), "@q.1.1 can only be written at all positions"),
        (fh.keep("@resid_post.1", inputs=True), "leave out inputs"),
        (fh.keep(["@z.1", "@z.*"]), None),
        (fh.keep("@z.1", slice=[0]), "slice= of keep|captured whole"),
    ):
        params = sampling(fh.Plan(entry), 1)
        if reason is None:
            llm.generate({"prompt_token_ids": [3, 4]}, params, use_tqdm=False)
            continue
        with pytest.raises(ValueError, match=reason):
            llm.generate({"prompt_token_ids": [3, 4]}, params, use_tqdm=False)


def test_a_router_that_is_written_chooses_the_experts(engine: Any) -> None:
    llm, model = engine
    if "@router.1" not in connect(llm).modules.named.table:
        assert "@experts.1" not in fh.quantities(model)
        return
    check_router(model, lambda asked: serve_plans(llm, asked))
    for entry, reason in (
        (
            fh.on("@experts.1", fh.Zero()),
            "@experts.1 contains the ids of experts, which no intervention .* use a Route",
        ),
        (
            fh.on("@router.1", fh.Add(torch.ones(3))),
            "has a width of 3, but the tensor @router.1 has 4",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            llm.generate({"prompt_token_ids": [3]}, sampling(fh.Plan(entry), 1), use_tqdm=False)


def test_requests_take_their_own_experts(engine: Any) -> None:
    llm, model = engine
    if "@experts.1" not in connect(llm).modules.named.table:
        with pytest.raises(ValueError, match="has no @experts"):
            serve_plans(
                llm, [(PROMPTS[0], fh.Plan(fh.on("@experts.1", fh.Route([0, 1]))).to_json())]
            )
        return
    check_routes(model, lambda asked: serve_plans(llm, asked))
    for text, reason in BAD_ROUTES:
        with pytest.raises(ValueError, match=reason):
            serve_plans(llm, [(PROMPTS[0], text)])


def test_the_table_comes_with_its_proofs(engine: Any) -> None:
    llm, _ = engine
    named = connect(llm).modules.named
    for layer in range(4):
        for kind in ("resid_pre", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z"):
            quantity = named.table[f"@{kind}.{layer}"]
            assert quantity.writable
            assert quantity.residual < 1e-5
    assert named.heads["@q.0"] == (2, HEAD)


def test_the_engine_has_what_transformers_has(engine: Any) -> None:
    llm, model = engine
    assert differing(model, connect(llm).modules.named.table) <= ABSENT


@pytest.mark.parametrize("index", [slice(None), (slice(None), slice(1, 3)), (..., 0)])
def test_a_slice_of_a_module_gets_the_tokens_first(engine: Any, index: Any) -> None:
    llm, model = engine
    plan = fh.Plan(fh.keep(["model.layers.2", ""], slice=index))
    ((tokens, acts),) = serve_plans(llm, [(PROMPTS[0], plan.to_json())])
    quantities = fh.Plan(fh.keep(["@resid_post.2", "@final_norm"], at=slice(0, None)))
    expected, right = alone(model, quantities, PROMPTS[0], NEW)
    assert tokens == expected
    for name, quantity in (("model.layers.2", "@resid_post.2"), ("", "@final_norm")):
        torch.testing.assert_close(acts[name], right[quantity][index], rtol=1e-3, atol=1e-4)


def test_a_compiled_engine_serves_those_at_its_sites(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    plan = fh.Plan(fh.on("@resid_post.1", fh.Add(torch.ones(WIDTH))), fh.keep("@resid_post.2"))
    llm = start_compiled(tmp_path, additional_config={"ferrohook": {"sites": "model.layers.*"}})
    try:
        (served,) = serve_plans(llm, [(PROMPTS[0], plan.to_json())])
        check("sites", served, alone(model, plan, PROMPTS[0], NEW))
        with pytest.raises(ValueError, match="not a site of this compiled engine"):
            serve_plans(llm, [(PROMPTS[0], fh.Plan(fh.keep("@z.1")).to_json())])
    finally:
        stop(llm)
