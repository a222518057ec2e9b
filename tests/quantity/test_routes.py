"""Experts that plans choose, against hooks of PyTorch by hand on the experts of transformers."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.engines.rewriting import COMPILED, EAGER
from ferrohook.rows.site_tables import BACK_END as SITES
from support.zoo import make, token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

IDS = token_ids()
ROWS, TOKENS = IDS.shape
EXPERTS = 4
SPARSE: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def softmaxed(logits: Tensor, ids: Tensor, _config: Any) -> Tensor:
    return logits.softmax(-1, dtype=torch.float32).gather(-1, ids)


def shares(logits: Tensor, ids: Tensor, _config: Any) -> Tensor:
    found = logits.softmax(-1, dtype=torch.float32).gather(-1, ids)
    return found / found.sum(-1, keepdim=True)


def shares_if_normed(logits: Tensor, ids: Tensor, config: Any) -> Tensor:
    return (shares if config.norm_topk_prob else softmaxed)(logits, ids, config)


def of_chosen(logits: Tensor, ids: Tensor, _config: Any) -> Tensor:
    return logits.gather(-1, ids).softmax(-1)


def scaled(logits: Tensor, ids: Tensor, config: Any) -> Tensor:
    return softmaxed(logits, ids, config) * config.routed_scaling_factor


def sigmoids(logits: Tensor, ids: Tensor, config: Any, epsilon: float = 1e-20) -> Tensor:
    found = logits.sigmoid().gather(-1, ids)
    if config.norm_topk_prob:
        found = found / (found.sum(-1, keepdim=True) + epsilon)
    return found * config.routed_scaling_factor


def sigmoid_shares(logits: Tensor, ids: Tensor, _config: Any) -> Tensor:
    found = logits.sigmoid().gather(-1, ids)
    return found / found.sum(-1, keepdim=True)


def of_lfm2(logits: Tensor, ids: Tensor, config: Any) -> Tensor:
    return sigmoids(logits, ids, config, epsilon=1e-6)


def of_ernie(logits: Tensor, ids: Tensor, config: Any) -> Tensor:
    found = softmaxed(logits, ids, config)
    return found / found.sum(-1, keepdim=True).clamp(min=config.moe_norm_min)


SCALED = {"routed_scaling_factor": 2.5}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (shares, {}),
    "minimax": (shares, {}),
    "hunyuan_v1_moe": (shares, {}),
    "qwen2_moe": (shares_if_normed, {"norm_topk_prob": True}),
    "qwen3_moe": (shares_if_normed, {"norm_topk_prob": False}),
    "qwen3_next": (shares_if_normed, {"norm_topk_prob": True}),
    "olmoe": (shares_if_normed, {"norm_topk_prob": False}),
    "deepseek_v2": (scaled, SCALED),
    "deepseek_v3": (sigmoids, SPARSE | SCALED | {"norm_topk_prob": True}),
    "glm4_moe": (sigmoids, SCALED | {"norm_topk_prob": True}),
    "dots1": (sigmoids, SCALED | {"norm_topk_prob": False}),
    "gpt_oss": (of_chosen, {}),
    "granitemoe": (of_chosen, {}),
    "jamba": (softmaxed, {}),
    "minimax_m2": (sigmoid_shares, {}),
    "lfm2_moe": (of_lfm2, SCALED | {"norm_topk_prob": True}),
    "ernie4_5_moe": (of_ernie, {}),
}
"""Weights of experts by hand and options of the configuration, by type."""
families = pytest.mark.parametrize("kind", FAMILIES)
_MADE: dict[str, Any] = {}


def model_of(kind: str) -> Any:
    """Makes a model once: its routers choose other experts at other tokens."""
    if kind not in _MADE:
        _, options = FAMILIES.get(kind, (None, {}))
        _MADE[kind] = make(kind, **options)
    return _MADE[kind]


def mixtures(model: nn.Module) -> dict[int, tuple[nn.Module, nn.Module]]:
    """Returns the modules with the experts, and the routers beside them, by block."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            block = model.get_submodule(name.removesuffix(".experts"))
            router: Any = getattr(block, "gate", None) or getattr(block, "router", None)
            found[int(name.split(".")[2])] = (module, router)
    return found


Choice = dict[int, Tensor]
"""Ids of experts by block, -1 for the router's own: int64 of (rows, tokens, chosen)."""


class ByHand:
    """Calls the experts of a model with other ids, and with weights by a formula.

    Args:
        kind: type of the model.
        choice: of the tokens in the next call.
    """

    def __init__(self, kind: str, choice: Choice) -> None:
        self.model = model_of(kind)
        self.formula, _ = FAMILIES[kind]
        self.choice = choice
        self.calls: dict[int, tuple[Tensor, Tensor]] = {}
        """Ids and weights that the experts took, by block."""

    def __enter__(self) -> Self:
        self._handles = []
        for block, (experts, router) in mixtures(self.model).items():
            self._handles += self._hooks(block, experts, router)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hooks(self, block: int, experts: nn.Module, router: nn.Module) -> Iterator[Any]:
        logits: list[Tensor] = []

        def see(_module: nn.Module, _args: Any, output: Any) -> None:
            logits[:] = [output[0]]

        def change(_module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> Any:
            x, ids, weights = args
            if block in self.choice:
                wanted = self.choice[block].flatten(0, -2)
                taken = (wanted >= 0).all(-1, keepdim=True)
                ids = torch.where(taken, wanted, ids)
                made = self.formula(logits[0], ids, self.model.config).to(weights.dtype)
                weights = torch.where(taken, made, weights)
            self.calls[block] = ids, weights
            return x, ids, weights

        yield router.register_forward_hook(see)
        yield experts.register_forward_pre_hook(change)


def logits_by_hand(kind: str, choice: Choice, **call: Any) -> tuple[Tensor, ByHand]:
    hand = ByHand(kind, choice)
    with hand, torch.no_grad():
        output = hand.model(IDS, **call)
    return output.logits, hand


def drawn(shape: tuple[int, ...], seed: int = 0, chosen: int = 2) -> Tensor:
    """Draws experts, each once for a token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((*shape, EXPERTS), generator=generator).argsort(-1)[..., :chosen]


def spread(ids: Tensor, here: Tensor) -> Tensor:
    """Returns rows of ids at some tokens, (rows, tokens), and -1 at others."""
    found = torch.full((*here.shape, ids.shape[-1]), -1)
    found[here] = ids
    return found


@families
def test_own_experts_that_are_replayed_change_no_bit(kind: str) -> None:
    model = model_of(kind)
    with torch.no_grad():
        plain, acts = fh.run(model, IDS, capture=["@experts.*", "@expert_weights.*"])
        layers = model.config.num_hidden_layers
        array = torch.zeros(ROWS, TOKENS, layers, 2, dtype=torch.uint8)
        for block in mixtures(model):
            array[:, :, block] = acts[f"@experts.{block}"].view(ROWS, TOKENS, -1)
        plan = fh.Plan(fh.replay(array), fh.keep(["@experts.*", "@expert_weights.*"]))
        output, again = fh.run(model, IDS, plan=plan)
    assert torch.equal(output.logits, plain.logits)
    assert {*again} == {*acts}
    for name in acts:
        assert torch.equal(again[name], acts[name]), name


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "lfm2_moe", "kolibri1"])
def test_own_experts_of_single_tokens_change_no_bit(kind: str) -> None:
    """torch rounds the last elements of a tensor otherwise, and one token has no others."""
    model = model_of(kind)
    ids = torch.arange(31)[None] + 11
    with torch.no_grad():
        plain, acts = fh.run(model, ids, capture=["@experts.*", "@expert_weights.*"])
        names = [name for name in acts if name.startswith("@experts.")]
        entries = [
            fh.on(name, fh.Route(acts[name][position]), at=position)
            for name in names
            for position in range(31)
        ]
        kept = fh.keep(["@experts.*", "@expert_weights.*"])
        output, again = fh.run(model, ids, plan=fh.Plan(*entries, kept))
    assert len(names) > 0
    assert torch.equal(output.logits, plain.logits)
    for name in acts:
        assert torch.equal(again[name], acts[name]), name


@families
def test_other_experts_are_weighed_by_the_models_own_rule(kind: str) -> None:
    model = model_of(kind)
    choice = {block: drawn((ROWS, TOKENS), block) for block in mixtures(model)}
    entries = [fh.on(f"@experts.{block}", fh.Route(ids)) for block, ids in choice.items()]
    expected, hand = logits_by_hand(kind, choice)
    with torch.no_grad():
        plain = model(IDS).logits
        plan = fh.Plan(*entries, fh.keep(["@experts.*", "@expert_weights.*"]))
        output, acts = fh.run(model, IDS, plan=plan)
    assert torch.equal(output.logits, expected)
    assert not torch.equal(expected, plain)
    for block, taken in hand.calls.items():
        for name, tensor in zip(("experts", "expert_weights"), taken, strict=True):
            assert torch.equal(acts[f"@{name}.{block}"], tensor)


def test_rows_of_a_route_are_on_no_default_device() -> None:
    model, name = model_of("mixtral"), "@experts.1"
    plan = fh.Plan(fh.on(name, fh.Route(drawn((ROWS, TOKENS)))), fh.keep(name))
    fh.quantities(model)
    with torch.no_grad():
        _, expected = fh.run(model, IDS, plan=plan)
        with torch.device("meta"):
            _, acts = fh.run(model, IDS, plan=plan)
    assert torch.equal(acts[name], expected[name])


ATS: dict[str, tuple[Any, Callable[[int], list[int]]]] = {
    "all": (None, lambda _n: [*range(TOKENS)]),
    "slice": (slice(1, 5), lambda _n: [1, 2, 3, 4]),
    "every second": (slice(1, None, 2), lambda n: [*range(1, n, 2)]),
    "from the end": (slice(-2, None), lambda n: [n - 2, n - 1]),
    "int": (2, lambda _n: [2]),
    "last": (-1, lambda n: [n - 1]),
    "last_prompt": ("last_prompt", lambda n: [n - 1]),
    "prompt": ("prompt", lambda n: [*range(n)]),
}


@pytest.mark.parametrize(("at", "chosen"), ATS.values(), ids=ATS)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_ids_are_those_of_the_tokens_at_positions(
    at: Any, chosen: Callable[[int], list[int]], padded: bool
) -> None:
    model = model_of("mixtral")
    mask = torch.ones_like(IDS)
    mask[0, : 3 if padded else 0] = 0
    here = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    ids = drawn((TOKENS,))
    wanted = torch.full((ROWS, TOKENS, 2), -1)
    for row in range(ROWS):
        length = int(mask[row].sum())
        for number, position in enumerate(chosen(length)):
            if position < length:
                here[row, TOKENS - length + position] = True
                wanted[row, TOKENS - length + position] = ids[number]
    expected, hand = logits_by_hand("mixtral", {1: wanted}, attention_mask=mask)
    plan = fh.Plan(fh.on("@experts.1", fh.Route(ids), at=at), fh.keep("@experts.1"))
    with torch.no_grad(), plan.open(model) as request:
        output = model(IDS, attention_mask=mask)
    assert torch.equal(output.logits, expected)
    assert torch.equal(request.acts["@experts.1"], hand.calls[1][0])
    assert here.any()


def test_rows_that_are_missing_or_minus_one_are_left_to_the_router() -> None:
    ids = drawn((4,))
    ids[1] = -1
    wanted = torch.full((ROWS, TOKENS, 2), -1)
    wanted[:, :4] = ids
    expected, _ = logits_by_hand("mixtral", {0: wanted})
    with torch.no_grad():
        output, _ = fh.run(
            model_of("mixtral"), IDS, plan=fh.Plan(fh.on("@experts.0", fh.Route(ids)))
        )
    assert torch.equal(output.logits, expected)


def test_one_row_is_for_all_tokens_and_a_function_chooses_them() -> None:
    here = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    here[:, ::3] = True
    wanted = spread(torch.tensor([3, 0]).expand(int(here.sum()), -1), here)
    expected, _ = logits_by_hand("mixtral", {0: wanted})
    entry = fh.on("@experts.0", fh.Route([3, 0]), at=lambda positions: positions % 3 == 0)
    with torch.no_grad():
        output, _ = fh.run(model_of("mixtral"), IDS, plan=fh.Plan(entry))
    assert torch.equal(output.logits, expected)


@pytest.mark.parametrize("kind", ["mixtral", "phimoe"])
def test_weights_are_used_as_they_are(kind: str) -> None:
    model = model_of(kind)
    ids, weights = drawn((TOKENS,)), torch.rand(TOKENS, 2)
    experts, _ = mixtures(model)[1]
    taken: list[tuple[Tensor, Tensor]] = []
    handle = experts.register_forward_pre_hook(lambda _m, args: taken.append(args[1:]))
    plan = fh.Plan(fh.on("@experts.1", fh.Route(ids, weights), at=slice(2, 5)))
    with torch.no_grad():
        model(IDS)
        fh.run(model, IDS, plan=plan)
    handle.remove()
    plain, routed = ([each.view(ROWS, TOKENS, 2) for each in call] for call in taken)
    for before, after, new in zip(plain, routed, (ids, weights), strict=True):
        assert torch.equal(after[:, 2:5], new[:3].expand(ROWS, -1, -1))
        assert torch.equal(after[:, :2], before[:, :2])
        assert torch.equal(after[:, 5:], before[:, 5:])


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_gradients_reach_the_router(kind: str) -> None:
    model = model_of(kind)
    choice = {block: drawn((ROWS, TOKENS), block) for block in mixtures(model)}
    entries = [fh.on(f"@experts.{block}", fh.Route(ids)) for block, ids in choice.items()]
    routers = [router.weight.requires_grad_() for _, router in mixtures(model).values()]

    def gradients(output: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output.logits.square().sum(), routers)

    with ByHand(kind, choice) as hand:
        expected = gradients(hand.model(IDS))
    output, _ = fh.run(model, IDS, plan=fh.Plan(*entries))
    for found, wanted in zip(gradients(output), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        assert wanted.abs().max() > 1e-6


def test_a_forward_that_is_repeated_takes_the_same_experts() -> None:
    model = make("mixtral").train()
    router = mixtures(model)[1][1].weight.requires_grad_()
    plan = fh.Plan(fh.on("@experts.1", fh.Route(drawn((TOKENS,))), at=slice(1, 6)))

    def gradient() -> Tensor:
        with plan.open(model):
            output = model(IDS)
            (found,) = torch.autograd.grad(output.logits.square().sum(), [router])
        return found

    expected = gradient()
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
    assert torch.equal(gradient(), expected)
    assert bool(expected.abs().max() > 1e-6)


def test_a_weight_that_is_trained_has_a_gradient() -> None:
    weights = torch.full((2,), 0.5, requires_grad=True)
    plan = fh.Plan(fh.on("@experts.1", fh.Route([0, 1], weights)))
    output, _ = fh.run(model_of("mixtral"), IDS, plan=plan)
    output.logits.sum().backward()
    assert weights.grad is not None
    assert bool(weights.grad.abs().min() > 0)


def forced(prompt: int, new: int) -> tuple[fh.Plan, Tensor]:
    """Returns a plan for all tokens of a sequence, and the ids of block 1."""
    ids = drawn((prompt + new,), 5)
    return fh.Plan(fh.on("@experts.1", fh.Route(ids)), fh.keep("@experts.1", calls="all")), ids


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_generated_tokens_take_their_experts_with_a_cache(kind: str) -> None:
    model, new = model_of(kind), 4
    plan, ids = forced(TOKENS, new)
    with torch.no_grad(), plan.open(model) as request:
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        tokens = model.generate(IDS, eos_token_id=None, **options)
    taken = [each.view(ROWS, -1, 2) for each in request.acts["@experts.1"]]
    assert [each.shape[1] for each in taken] == [TOKENS, *[1] * (new - 1)]
    assert torch.equal(torch.cat(taken, 1), ids[:-1].expand(ROWS, -1, -1))
    # Without a cache, token by token.
    expected = IDS
    for _ in range(new):
        length = expected.shape[1]
        choice = {1: ids[:length].expand(ROWS, -1, -1)}
        with ByHand(kind, choice), torch.no_grad():
            logits = model(expected).logits
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, expected)


def test_prompts_that_generate_together_take_their_own_experts() -> None:
    model, new = model_of("mixtral"), 3
    prompts = [IDS[0], IDS[1, :4]]
    padded = torch.stack([prompts[0], torch.cat([torch.zeros(3, dtype=torch.int64), prompts[1]])])
    mask = torch.ones_like(padded)
    mask[1, :3] = 0
    plans = [
        fh.Plan(fh.on("@experts.1", fh.Route(drawn((9,), seed))), fh.keep("@experts.1"))
        for seed in range(2)
    ]
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    requests = [plan.prepare(model).open() for plan in plans]
    with torch.no_grad(), fh.rows.generating(requests):
        together = model.generate(padded, attention_mask=mask, **options)
    for row, (plan, prompt, request) in enumerate(zip(plans, prompts, requests, strict=True)):
        with torch.no_grad(), plan.open(model) as alone:
            expected = model.generate(prompt[None], **options)
        assert request.error is None
        assert torch.equal(together[row, -new:], expected[0, -new:])
        kept = request.acts["@experts.1"]
        assert torch.equal(kept, drawn((9,), row)[: len(kept)])
        assert len(kept) == len(prompt) + new - 1
        assert alone.error is None


def test_only_generated_tokens_take_experts_in_order() -> None:
    model, ids = model_of("mixtral"), drawn((2,), 7)
    plan = fh.Plan(
        fh.on("@experts.1", fh.Route(ids), at="generated"), fh.keep("@experts.1", calls="all")
    )
    with torch.no_grad(), plan.open(model) as request:
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        model.generate(IDS, eos_token_id=None, **options)
    prompt, *steps = [each.view(ROWS, -1, 2) for each in request.acts["@experts.1"]]
    _, hand = logits_by_hand("mixtral", {})
    assert torch.equal(prompt.flatten(0, 1), hand.calls[1][0])
    assert torch.equal(torch.cat(steps[:2], 1), ids.expand(ROWS, -1, -1))
    # What has no row is the router's: its ids come in the order of their weights.
    assert len(steps) == 4


def test_chunks_of_a_prompt_take_their_experts() -> None:
    model = model_of("mixtral")
    plan, ids = forced(TOKENS, 0)
    expected, _ = logits_by_hand("mixtral", {1: ids.expand(ROWS, -1, -1)})
    with torch.no_grad(), plan.open(model) as request:
        first = model(IDS[:, :3], use_cache=True)
        name = "cache" if hasattr(first, "cache") else "past_key_values"
        second = model(IDS[:, 3:], **{name: getattr(first, name)})
    taken = torch.cat([each.view(ROWS, -1, 2) for each in request.acts["@experts.1"]], 1)
    assert torch.equal(taken, ids.expand(ROWS, -1, -1))
    found = torch.cat([first.logits, second.logits], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_members_of_a_batch_take_their_own_experts(kind: str) -> None:
    model = model_of(kind)
    ids = torch.cat([IDS, IDS.flip(0)])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = mask.cumsum(1) - 1
    routes = [drawn((2, TOKENS), 1), drawn((TOKENS,), 2)]
    plans = [
        fh.Plan(
            fh.on("@experts.1", fh.Route(routes[0])), fh.keep(["@experts.1", "@expert_weights.1"])
        ),
        fh.Plan(
            fh.on("@experts.1", fh.Route(routes[1]), at=slice(1, 4)),
            fh.keep(["@experts.1", "@expert_weights.1"]),
        ),
    ]
    names = ["@experts.1", "@expert_weights.1"]
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        first, second = (plan.prepare(model).open() for plan in plans)
        with fh.batch({first: slice(0, 2), second: slice(2, 3)}, positions=positions):
            together = model(ids, attention_mask=mask).logits
        for plan, request, rows in zip(
            plans, (first, second), (slice(0, 2), slice(2, 3)), strict=True
        ):
            with plan.open(model) as alone:
                expected = model(ids[rows], attention_mask=mask[rows]).logits
            torch.testing.assert_close(together[rows], expected, rtol=1e-4, atol=1e-5)
            assert request.error is None
            assert torch.equal(request.acts[names[0]], alone.acts[names[0]])
            torch.testing.assert_close(request.acts[names[1]], alone.acts[names[1]])
    assert torch.equal(together[3], plain[3])
    assert not torch.equal(together[0], plain[0])
    assert torch.equal(second.acts["@experts.1"][1:4], routes[1][:3])


def test_a_member_whose_sequences_have_no_ids_fails_and_the_others_go_on() -> None:
    model = model_of("mixtral")
    plan = fh.Plan(fh.on("@experts.1", fh.Route(drawn((1, TOKENS)))))
    with torch.no_grad():
        with plan.open(model), pytest.raises(fh.HookError, match="ids of 1 sequences"):
            model(IDS)
        failing, well = plan.prepare(model).open(), fh.Plan(fh.keep("@experts.1")).prepare(model)
        reading = well.open()
        positions = torch.arange(TOKENS).expand(2 * ROWS, -1)
        with fh.batch({failing: slice(0, 2), reading: slice(2, 4)}, positions=positions):
            model(torch.cat([IDS, IDS]))
    assert "ids of 1 sequences" in str(failing.error)
    assert reading.error is None
    assert reading.acts["@experts.1"].shape == (ROWS * TOKENS, 2)


@pytest.mark.parametrize(("count", "dtype"), [(256, torch.uint8), (257, torch.uint16)])
def test_captured_ids_are_as_small_as_their_number_allows(count: int, dtype: torch.dtype) -> None:
    model = make("mixtral", num_local_experts=count, num_hidden_layers=1)
    top = torch.tensor([count - 1, 0])
    plan = fh.Plan(
        fh.on("@experts.0", fh.Route(top)),
        fh.keep(["@experts.0", "@router.0"], calls="all", label="calls"),
        fh.keep("@experts.0", at=slice(1, 3), copy="clone"),
        fh.keep("model.layers.0.mlp.gate", output_index=2),
    )
    request, other = plan.prepare(model).open(), plan.prepare(model).open()
    positions = torch.arange(TOKENS).expand(ROWS, -1)
    with torch.no_grad(), fh.batch({request: 0, other: 1}, positions=positions):
        model(IDS)
    with torch.no_grad(), plan.open(model) as alone:
        model(IDS[:1, :4])
        model(IDS[:1])
    for found, tokens in ((request, TOKENS), (alone, 4)):
        assert found.error is None
        kept = found.acts["calls:@experts.0"][0]
        assert kept.dtype == dtype
        assert kept.tolist() == [top.tolist()] * tokens
        assert found.acts["@experts.0"].dtype == dtype
        assert found.acts["@experts.0"][:2].tolist() == [top.tolist()] * 2
        # The module itself has them as they are.
        assert found.acts["model.layers.0.mlp.gate"].dtype == torch.int64


def test_entries_act_in_their_order() -> None:
    model = model_of("mixtral")
    own = logits_by_hand("mixtral", {})[1].calls[1][0]
    plan = fh.Plan(
        fh.keep("@experts.1", label="before"),
        fh.on("@experts.1", fh.Route([0, 1])),
        fh.keep("@experts.1", label="between"),
        fh.on("@experts.1", fh.Route([2, 3]), at=0),
        fh.keep(["@experts.1", "@router.1"]),
    )
    with torch.no_grad():
        _, acts = fh.run(model, IDS, plan=plan)
        logits = model(IDS, output_router_logits=True).router_logits[1]
    assert torch.equal(acts["before:@experts.1"], own)
    assert acts["between:@experts.1"].tolist() == [[0, 1]] * (ROWS * TOKENS)
    expected = torch.tensor([0, 1]).repeat(ROWS, TOKENS, 1)
    expected[:, 0] = torch.tensor([2, 3])
    assert torch.equal(acts["@experts.1"], expected.flatten(0, 1))
    assert torch.equal(acts["@router.1"], logits)


def test_a_route_is_registered_outside_of_plans() -> None:
    model, ids = model_of("mixtral"), drawn((TOKENS,))
    choice = {1: ids.expand(ROWS, -1, -1)}
    expected, _ = logits_by_hand("mixtral", choice)
    with torch.no_grad():
        with fh.register(model, "@experts.1", fh.Route(ids)):
            found = model(IDS).logits
        output, _ = fh.run(model, IDS, hooks={"@experts.1": fh.Route(ids)})
        with fh.register(model, "@experts.1", fh.Route(ids[2:4]), at=slice(2, 4)):
            some = model(IDS).logits
        plain = model(IDS).logits
    assert torch.equal(found, expected)
    assert torch.equal(output.logits, expected)
    here = torch.full_like(choice[1], -1)
    here[:, 2:4] = choice[1][:, 2:4]
    assert torch.equal(some, logits_by_hand("mixtral", {1: here})[0])
    assert torch.equal(plain, logits_by_hand("mixtral", {})[0])


def test_arrays_of_engines_replay_all_tokens_but_the_last() -> None:
    model = model_of("deepseek_v3")
    array = np.stack([drawn((TOKENS - 1,), layer).numpy() for layer in range(3)], 1)
    array[:, 0] = 0  # a dense layer
    array = array.astype(np.uint8)
    choice = {}
    for block in mixtures(model):
        wanted = torch.full((ROWS, TOKENS, 2), -1)
        wanted[:, :-1] = torch.from_numpy(array[:, block]).long()
        choice[block] = wanted
    assert {*choice} == {1, 2}
    expected, _ = logits_by_hand("deepseek_v3", choice)
    plan = fh.Plan(fh.replay(array))
    with torch.no_grad():
        for each in (plan, fh.Plan.from_json(plan.to_json())):
            output, _ = fh.run(model, IDS, plan=each)
            assert torch.equal(output.logits, expected)
        later = fh.Plan(fh.replay(array[3:].astype(np.int32), start=3), fh.keep("@experts.1"))
        _, acts = fh.run(model, IDS, plan=later)
    taken = acts["@experts.1"].view(ROWS, TOKENS, 2)
    assert torch.equal(taken[:, 3:-1], choice[1][:, 3:-1])
    own = logits_by_hand("deepseek_v3", {})[1].calls[1][0].view(ROWS, TOKENS, 2)
    assert torch.equal(taken[:, :3], own[:, :3])
    assert torch.equal(taken[:, -1], own[:, -1])


def test_plans_with_routes_are_data() -> None:
    ids, weights = drawn((TOKENS,)), torch.rand(TOKENS, 2)
    plan = fh.Plan(
        fh.on("@experts.1", fh.Route(ids, weights), at="generated"),
        fh.on("@experts.2", fh.Route([0, 1])),
        fh.replay(drawn((3, 4)), start=2),
    )
    for again in (fh.Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
        assert again == plan
        assert hash(again) == hash(plan)
    assert plan != fh.Plan(*plan.entries[1:])
    assert fh.Route(ids) != fh.Route(ids.flip(0))
    assert fh.Route(ids) == fh.Route(ids.numpy())
    assert "Route(<7x2 ids>, weights)" in repr(plan)
    changed = ids.clone()
    route = fh.Route(changed)
    changed.zero_()
    assert torch.equal(route.ids.long(), ids)


@pytest.mark.parametrize(
    ("ids", "weights", "error", "text"),
    [
        (torch.tensor([0.0, 1.0]), None, fh.HookTypeError, "must be ints, got torch.float32"),
        (torch.tensor([True, False]), None, fh.HookTypeError, "must be ints, got torch.bool"),
        ("ab", None, fh.HookTypeError, "must be ints in a tensor, an array or lists"),
        ([[0, 1], [2]], None, fh.HookTypeError, "must be ints in a tensor, an array or lists"),
        (3, None, ValueError, r"must have the shape \(chosen,\).*got \(\)"),
        (torch.zeros(1, 1, 1, 1, dtype=torch.int64), None, ValueError, r"got \(1, 1, 1, 1\)"),
        (torch.zeros(0, 2, dtype=torch.int64), None, ValueError, r"at least one id; got \(0, 2\)"),
        ([-2, 0], None, ValueError, "must be from -1 to 32767, got -2"),
        ([0, 2**40], None, ValueError, "must be from -1 to 32767, got 1099511627776"),
        ([[0, 1], [2, 2]], None, ValueError, r"row \[1\] has an expert twice: \[2, 2\]"),
        ([[0, 1], [-1, 2]], None, ValueError, r"row \[1\] has both ids and -1: \[-1, 2\]"),
        ([1, 1], None, ValueError, r"row \[\] has an expert twice"),
        ([0, 1], [1, 2], fh.HookTypeError, "weights of Route must be floats, got torch.int64"),
        ([0, 1], "ab", fh.HookTypeError, "weights of Route must be floats in a tensor"),
        ([0, 1], [0.5], ValueError, r"shape of its ids, \(2,\), got \(1,\)"),
        ([0, 1], [0.5, float("nan")], ValueError, "NaN or infinities"),
    ],
)
def test_hostile_ids_are_refused_as_a_route_is_made(
    ids: Any, weights: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fh.Route(ids, weights)


@pytest.mark.parametrize(
    ("kind", "entry", "text"),
    [
        ("mixtral", fh.on("@experts.1", fh.Route([0, 1, 2])), "3 ids for each token.*has 2"),
        ("mixtral", fh.on("@experts.1", fh.Route([0, 4])), "has the id 4.*has experts 0 to 3"),
        (
            "phimoe",
            fh.on("@experts.1", fh.Route([0, 1])),
            "needs weights= at @experts.1.*not proved",
        ),
        ("phimoe", fh.on("@experts.1", fh.Route([0, 4], [1.0, 1.0])), "has experts 0 to 3"),
        ("mixtral", fh.replay(drawn((3, 2))), "has 2 layers, and none for block 2"),
        ("mixtral", fh.replay(torch.zeros(3, 3, 2, dtype=torch.uint8)), "ids of block 0 .*twice"),
        ("mixtral", fh.on("@router.1", fh.Route([0, 1])), "register it at '@experts.N'"),
        ("mixtral", fh.on("@expert_weights.1", fh.Route([0, 1])), "register it at '@experts.N'"),
        ("mixtral", fh.on("model.layers.1", fh.Route([0, 1])), "register it at '@experts.N'"),
    ],
)
def test_ids_that_do_not_fit_a_model_are_refused_as_a_plan_is_prepared(
    kind: str, entry: Any, text: str
) -> None:
    model = model_of(kind)
    with pytest.raises(fh.HookTypeError, match=f"entry 0 of the plan: .*{text}"):
        fh.Plan(entry).prepare(model)
    with torch.no_grad():
        model(IDS)  # nothing is left registered


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"phase": "forward_pre"}, "leave out phase="),
        ({"with_kwargs": True}, "leave out with_kwargs="),
        ({"always_call": True}, "leave out always_call="),
        ({"when": fh.above("g", 0.0)}, "leave out when="),
        ({"strength": 0.5}, "leave out strength="),
        ({"at": lambda positions: positions > 1}, "must be a name, an int or a slice"),
    ],
)
def test_options_that_a_route_ignores_are_refused(options: Any, text: str) -> None:
    with pytest.raises(fh.HookTypeError, match=text):
        fh.on("@experts.1", fh.Route(drawn((3,))), **options)
    if options.keys() <= {"phase", "with_kwargs", "always_call"}:
        with pytest.raises(fh.HookTypeError, match=text):
            fh.register(model_of("mixtral"), "@experts.1", fh.Route([0, 1]), **options)


def test_models_of_another_form_are_refused() -> None:
    plan = fh.Plan(fh.on("@experts.1", fh.Route([0, 1])))
    with pytest.raises(fh.SelectionError, match=r"@experts.1 is not proved in Llama4.*no module"):
        plan.prepare(make("llama4_text"))


def hook(**fields: Any) -> Mapping[str, Any]:
    entry = {"type": "on", "what": "@experts.1", "hook": {"type": "Route", **fields}}
    return {"version": 1, "entries": [entry]}


def tensor(dtype: str, shape: list[int], text: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "base64": text}


@pytest.mark.parametrize(
    ("fields", "limits", "text"),
    [
        ({}, {}, "the key 'ids' is missing"),
        ({"ids": [0, 1]}, {}, "expected an object"),
        ({"ids": tensor("float32", [1], "AAAAAA==")}, {}, "dtype of a tensor must be one of uint8"),
        ({"ids": tensor("int16", [2], "AAAAAA=="), "weights": None}, {}, "has an expert twice"),
        ({"ids": tensor("int16", [2], "AAABAA=="), "start": 1}, {}, "unknown key 'start'"),
        ({"ids": tensor("int16", [2], "!AABAA==")}, {}, "entries.0..hook.ids"),
        (
            {"ids": tensor("uint8", [2], "AAE="), "weights": tensor("uint8", [2], "AAE=")},
            {},
            "float32",
        ),
        ({"ids": tensor("int64", [2**30, 2], "AAAA")}, {}, "exceed max_bytes=67,108,864"),
        ({"ids": tensor("int16", [2], "AAABAA==")}, {"max_bytes": 3}, "exceed max_bytes=3"),
    ],
)
def test_hostile_json_is_refused_by_name(fields: Any, limits: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fh.Plan.from_json(hook(**fields), **limits)


def test_named_tensors_are_ids(tmp_path: Any) -> None:
    ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    plan = fh.Plan(fh.on("@experts.1", fh.Route(ids)))
    text = hook(ids={"tensor": "ids"})
    assert fh.Plan.from_json(text, {"ids": ids}) == plan
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"ids": ids}, tmp_path / "ids.safetensors")
    assert fh.Plan.from_json(text, tmp_path / "ids.safetensors") == plan


def test_back_ends_without_routes_refuse_them_by_name() -> None:
    entry = fh.on("@experts.1", fh.Route([0, 1]))
    assert "sites do not run Python" in str(SITES.refusal(entry))
    assert "a compiled engine chooses no other experts" in str(COMPILED.refusal(entry))
    assert EAGER.refusal(entry) is None


def test_a_compiled_model_runs_a_route_outside_of_its_graph() -> None:
    model, ids = model_of("mixtral"), drawn((TOKENS,))
    expected, _ = logits_by_hand("mixtral", {1: ids.expand(ROWS, -1, -1)})
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), fh.Plan(fh.on("@experts.1", fh.Route(ids))).open(model):
        found = compiled(IDS).logits
    torch.testing.assert_close(found, expected)
