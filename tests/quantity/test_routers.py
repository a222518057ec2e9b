"""Routers and experts of mixtures, against logits by hand and against the experts that run."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.modules import Experts
from support.zoo import make, token_ids

IDS = token_ids()
SPARSE: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "mixtral": ({}, "mlp.gate", "softmax(router[chosen])"),
    "qwen3_moe": ({}, "mlp.gate", "softmax(router)[chosen]"),
    "gpt_oss": ({}, "mlp.router", "softmax(router[chosen])"),
    "deepseek_v3": (SPARSE, "mlp.gate", "sigmoid(router)[chosen] / sum"),
    "afmoe": ({}, "mlp.router.gate", "sigmoid(router)[chosen] / sum"),
    "hunyuan_v1_moe": ({}, "mlp.gate.wg", "softmax(router[chosen])"),
    "llama4_text": ({}, "feed_forward.router", "sigmoid(router)[chosen]"),
    # Shared experts have a part of the sum, and convolutions after the experts mix tokens.
    "inkling_text": (
        {},
        "mlp.gate",
        "sigmoid(router)[chosen] / sum = weights of the experts / sum",
    ),
}
"""Options, the module that has the router's weight, and the form of the weights."""


def experts_of(model: Any, block: int) -> nn.Module:
    found = [
        module
        for name, module in model.model.layers[block].named_modules()
        if name.endswith(".experts")
    ]
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_is_the_projection_of_what_the_mlp_takes(kind: str) -> None:
    options, path, form = KINDS[kind]
    model = make(kind, **options)
    table = fh.quantities(model)
    quantity = table["@router.1"]
    assert form in quantity.equation
    assert quantity.dimensions == ("batch * tokens", "experts")
    into = "@mlp_in.1" if "@mlp_in.1" in table else "@mixer_in.1"
    with torch.no_grad(), fh.capture(model, ["@router.1", into]) as acts:
        model(IDS)
    gate = model.model.layers[1].get_submodule(path)
    taken = acts[into].flatten(0, -2)
    expected = nn.functional.linear(taken, gate.weight, getattr(gate, "bias", None))
    found = acts["@router.1"]
    torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=1e-4, atol=1e-5)


def test_what_is_written_to_a_router_chooses_and_weighs_the_experts() -> None:
    model = make("afmoe")
    taken: list[tuple[Tensor, Tensor]] = []

    def see(_module: nn.Module, args: tuple[Any, ...]) -> None:
        _, numbers, weights = args
        taken.append((numbers, weights))

    handle = experts_of(model, 1).register_forward_pre_hook(see)
    assert fh.quantities(model)["@router.1"].writable
    bias = model.model.layers[1].mlp.expert_bias
    for expert in range(4):
        vector = torch.zeros(4)
        vector[expert] = -3.0
        with torch.no_grad():
            _, acts = fh.run(model, IDS, hooks={"@router.1": fh.Add(vector)}, capture=["@router.1"])
        scores = acts["@router.1"].sigmoid()
        numbers = (scores + bias).topk(2, -1).indices
        chosen = scores.gather(-1, numbers)
        assert torch.equal(taken[-1][0].sort(-1).values, numbers.sort(-1).values)
        expected = (chosen / chosen.sum(-1, keepdim=True)).sort(-1).values
        torch.testing.assert_close(taken[-1][1].sort(-1).values, expected, rtol=1e-4, atol=1e-5)
    handle.remove()
    assert len({tuple(numbers.flatten().tolist()) for numbers, _ in taken}) > 1


def test_a_router_that_weighs_in_its_own_code_is_read_and_not_written() -> None:
    model = make("mixtral")
    assert not fh.quantities(model)["@router.1"].writable
    with pytest.raises(fh.HookTypeError, match=r"@router.1 can be read but not written"):
        fh.register(model, "@router.1", fh.Zero())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("jetmoe", r"@router.1 is not proved.*weights = f\(router\) cannot be checked"),
        ("llama", r"^LlamaForCausalLM has no @router; it has @embed, @resid_pre, .*@logits$"),
    ],
)
def test_no_router_has_its_reason(kind: str, reason: str) -> None:
    with pytest.raises(fh.SelectionError, match=reason):
        fh.capture(make(kind), "@router.1")


def test_neurons_of_fused_experts_have_their_reason() -> None:
    with pytest.raises(fh.SelectionError, match=r"@mlp_act.1 .*through its own experts"):
        fh.capture(make("mixtral"), "@mlp_act.1")


@pytest.mark.parametrize(
    "kind", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "jamba", "phimoe"]
)
def test_experts_are_those_of_the_router_and_can_be_chosen(kind: str) -> None:
    model = make(kind, **(SPARSE if kind == "deepseek_v3" else {}))
    experts, names = experts_of(model, 1), ["@experts.1", "@expert_weights.1"]
    calls: list[tuple[Any, ...]] = []
    experts.register_forward_hook(lambda _module, args, output: calls.append((*args, output)))
    table = fh.quantities(model)
    assert all(table[name].writable for name in names)
    assert table["@experts.1"].dimensions == ("batch * tokens", "chosen")
    with torch.no_grad(), fh.capture(model, names, copy="clone") as acts:
        model(IDS)
    for name, taken in zip(names, calls[-1][1:3], strict=True):
        assert torch.equal(acts[name], taken)
    wanted = (acts["@experts.1"] + 1) % 4, acts["@expert_weights.1"].flip(0)
    hooks: dict[str, Any] = {
        name: lambda _m, _a, _v, new=new: new for name, new in zip(names, wanted, strict=True)
    }
    with torch.no_grad():
        fh.run(model, IDS, hooks=hooks)
        x, numbers, weights, output = calls[-1]
        assert torch.equal(numbers, wanted[0])
        assert torch.equal(weights, wanted[1])
        # Expert by expert, for all tokens, with the weights of the tokens that chose it.
        one = torch.ones_like(weights[:, :1])
        alone = [experts.forward(x, torch.full_like(numbers[:, :1], n), one) for n in range(4)]
        share = [(weights * (numbers == n)).sum(1, keepdim=True) for n in range(4)]
    expected = sum(each * it for each, it in zip(alone, share, strict=True))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_plans_keep_the_experts_of_some_tokens() -> None:
    model = make("mixtral")
    plan = fh.Plan.from_json(
        fh.Plan(fh.keep(["@router.1", "@experts.*"], at=slice(1, 3))).to_json()
    )
    with torch.no_grad():
        _, acts = fh.run(model, IDS, plan=plan)
    assert acts["@experts.2"].dtype == torch.uint8
    assert torch.equal(acts["@experts.1"], acts["@router.1"].topk(2, -1).indices)


def test_numbers_of_experts_are_changed_by_no_addition() -> None:
    with pytest.raises(
        fh.HookTypeError, match=r"Add only works on floating-point tensors, got .*int64"
    ):
        fh.run(make("mixtral"), IDS, hooks={"@experts.1": fh.Add(torch.ones(2))})


class Odd(nn.Module):
    """Mixture whose weights are no softmax and no sigmoid of what chose the experts."""

    def __init__(self, square: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Experts()
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        logits = self.gate(flat)
        best = logits.topk(2, -1)
        weights = best.values.square() if self.square else torch.full_like(best.values, 0.5)
        mixed: Tensor = self.experts(flat, best.indices, weights)
        return mixed.view_as(x)


class Normed(nn.Module):
    """Block of a norm and a mixture."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), mlp

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = x + self.mlp(self.norm(x))
        return moved


@pytest.mark.parametrize(
    ("square", "reason"),
    [
        (True, r"weights = f\(router\) fails by \d\.\de"),
        (False, "are all equal, or 0, so they do not"),
    ],
)
def test_weights_that_no_router_explains_prove_none(square: bool, reason: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Normed(Odd(square)), Normed(Odd(square)))
    table = fh.quantities(model, torch.randn(2, 5, 8))
    assert "@mlp_out.1" in table
    with pytest.raises(fh.SelectionError, match=reason):
        fh.capture(model, "@router.1")
    assert "mixture(experts, expert_weights) = " in table["@experts.1"].equation
    assert table["@expert_weights.1"].writable


class Bare(nn.Module):
    """A block with a router in its own code, and without a norm."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.gate, self.experts, self.size = nn.Linear(8, 4), Experts(), size

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        best = (self.gate(flat) * self.size).softmax(-1).topk(2, -1)
        mixed: Tensor = self.experts(flat, best.indices, best.values)
        return x + mixed.view_as(x)


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_weights_that_are_saturated_prove_no_router(size: float) -> None:
    torch.manual_seed(0)
    table = fh.quantities(nn.Sequential(Bare(size), Bare(size)), torch.randn(2, 5, 8))
    assert ("@router.1" in table) == (size == 1)


def test_what_experts_take_is_read_and_not_written() -> None:
    """The router takes the same of the stream, for itself."""
    torch.manual_seed(0)
    model = nn.Sequential(Bare(1.0), Bare(1.0))
    table = fh.quantities(model, torch.randn(2, 5, 8))
    assert table["@mlp_in.1"].path == "1.experts"
    assert not table["@mlp_in.1"].writable
    assert table["@mlp_out.1"].writable


class Scaling(nn.Module):
    """Mixture whose experts take all positions times their weights, and if odd something more."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Whole()
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        logits = self.gate(flat)
        best = logits.topk(2, -1)
        weights = torch.zeros_like(logits).scatter(1, best.indices, best.values.sigmoid())
        taken = flat[None] * weights.T[..., None]
        if self.odd:
            taken = taken + 0.01 * flat[None].roll(1, -1)
        moved: Tensor = self.experts(taken.flatten(0, 1))
        return moved.view(4, *x.shape).sum(0)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.view(4, -1, 8), self.down).tanh().view(-1, 8)


@pytest.mark.parametrize("odd", [False, True])
def test_weights_are_found_in_what_experts_take_of_all_positions(odd: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Normed(Scaling(odd)), Normed(Scaling(odd)))
    x = torch.randn(2, 5, 8)
    table = fh.quantities(model, x)
    if odd:
        assert "cannot be checked" in table.missing["router.1"]
        return
    assert table["@router.1"].path == "1.mlp.gate"
    assert table["@router.1"].writable
    assert "no module takes the ids and weights" in table.missing["experts.1"]


class Capped(Experts):
    """Experts that ignore their numbers or their weights, run all, or add something more."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        if self.how == "same expert":
            numbers = numbers * 0
        if self.how == "own weights":
            weights = torch.full_like(weights, 0.5)
        if self.how == "all":
            assert numbers.shape == weights.shape == (len(x), 4)
        mixed = super().forward(x, numbers, weights)
        return mixed + 0.01 * x if self.how == "shared" else mixed


class Selected(NamedTuple):
    weights: Tensor
    numbers: Tensor


class Select(nn.Module):
    def forward(self, logits: Tensor) -> Selected:
        return Selected(*logits.softmax(-1).topk(2, -1))


class Kernel(Experts):
    """Experts that take both in one argument, count each expert of a token, change x in place."""

    def forward(self, x: Tensor, selected: Selected) -> Tensor:  # type: ignore[override]
        ordered = selected.numbers.sort(-1).values
        assert bool((ordered[:, 1:] != ordered[:, :-1]).all())
        return x.copy_(super().forward(x, selected.numbers, selected.weights))


@pytest.mark.parametrize("again", [False, True])
def test_what_experts_take_in_a_named_tuple_stands_where_it_is_returned(again: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.topk, self.experts = nn.Linear(8, 4), Select(), Kernel()

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            logits = self.gate(flat)
            selected = self.topk(logits)
            if again:  # a write to its output goes no further
                selected = Selected(*logits.softmax(-1).topk(2, -1))
            mixed: Tensor = self.experts(flat.clone(), selected)
            return x + mixed.view_as(x)

    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 5, 8)
    table = fh.quantities(model, x)
    assert table["@router.1"].writable
    numbers, weights = table["@experts.1"], table["@expert_weights.1"]
    assert (numbers.place, weights.place) == ("1.topk output[1]", "1.topk output[0]")
    assert numbers.writable is weights.writable is not again
    if again:
        return
    with torch.no_grad(), fh.capture(model, ["@router.1", "@experts.1"]) as acts:
        model(x)
    assert torch.equal(acts["@experts.1"], acts["@router.1"].topk(2, -1).indices)
    hooks = {"@expert_weights.1": fh.Zero()}
    with torch.no_grad():
        output, acts = fh.run(model, x, hooks=hooks, capture=["@resid_pre.1"])
    assert torch.equal(output, acts["@resid_pre.1"])


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("how", ["same expert", "own weights", "all", "shared"])
def test_arguments_that_do_not_choose_experts_are_not_written(how: str, square: bool) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), Capped(how)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            scores = self.gate(flat).softmax(-1)
            weights, numbers = scores.topk(2, -1)
            weights = weights.square() if square else weights
            if how == "all":
                weights = torch.zeros_like(scores).scatter(1, numbers, weights)
                numbers = torch.arange(4).expand(len(flat), -1)
            mixed: Tensor = self.experts(flat, numbers, weights)
            return x + mixed.view_as(x)

    torch.manual_seed(0)
    table = fh.quantities(nn.Sequential(Sparse(), Sparse()), torch.randn(2, 5, 8))
    if square or how == "all":
        reason = "goes through all experts" if how == "all" else "no router explains the weights"
        assert reason in table.missing["experts.1"]
        assert reason in table.missing["expert_weights.1"]
        return
    assert "softmax(router)[chosen]" in table["@experts.1"].equation
    assert not table["@experts.1"].writable
    assert not table["@expert_weights.1"].writable
