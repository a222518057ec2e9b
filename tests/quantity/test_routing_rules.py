"""Rules of routers for the weights of experts, and where they are proved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.modules import Experts
from support.zoo import make, token_ids

IDS = token_ids()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "lfm2_moe"])
def test_own_experts_change_no_bit_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    model = make(kind).to(dtype)
    names = [name for name in fh.quantities(model) if name.startswith("@experts.")]
    assert names
    with torch.no_grad():
        plain, acts = fh.run(model, IDS, capture=names)
        entries = [fh.on(name, fh.Route(acts[name].view(*IDS.shape, -1))) for name in names]
        output, _ = fh.run(model, IDS, plan=fh.Plan(*entries))
    assert torch.equal(output.logits, plain.logits)


def test_a_rule_that_was_proved_in_float32_holds_in_bfloat16() -> None:
    model = make("lfm2_moe")
    rule = fh.quantities(model)["@experts.2"].routing
    model.bfloat16()
    with torch.no_grad():
        plain, acts = fh.run(model, IDS, capture=["@experts.2"])
        route = fh.Route(acts["@experts.2"].view(*IDS.shape, -1))
        output, _ = fh.run(model, IDS, plan=fh.Plan(fh.on("@experts.2", route)))
    assert fh.quantities(model)["@experts.2"].routing == rule
    assert torch.equal(output.logits, plain.logits)


def test_tables_keep_rules_as_json() -> None:
    table = fh.quantities(make("deepseek_v2", routed_scaling_factor=2.5))
    routing = table["@experts.1"].routing
    assert routing is not None
    assert routing.rule is not None
    assert routing.rule.scale == 2.5
    assert (routing.ids, routing.weights, routing.logits) == (2, 1, 0)
    assert table["@experts.1"].experts == 4
    again = fh.Quantities.from_json(table.to_json())
    assert again["@experts.1"] == table["@experts.1"]
    assert table["@expert_weights.1"].routing is None
    assert table["@experts.1"].place.endswith("mlp.gate output[2]")
    assert table["@expert_weights.1"].place.endswith("mlp.gate output[1]")


class Router(nn.Module):
    """A router whose weights depend on its logits, and on more if `how` says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate, self.how, self.number = nn.Linear(8, 4), how, 0.75

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = self.gate(x.view(-1, 8))
        best = logits.softmax(-1).topk(2, -1)
        weights = best.values
        if self.how == "vectors":
            weights = weights * (1 + 1e-4 * x.view(-1, 8)[:, :1].tanh())
        elif self.how == "order":
            weights = weights * torch.tensor([1.0, 1.01])
        elif self.how == "float64":
            weights = logits.double().softmax(-1).gather(-1, best.indices).float()
        elif self.how == "own number":
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.number)
        elif self.how == "no logits":
            return weights, best.indices
        return logits, weights, best.indices


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.router, self.experts, self.how = Router(how), Experts(), how

    def forward(self, x: Tensor) -> Tensor:
        *_, weights, ids = self.router(x)
        if self.how == "written elsewhere":
            ids = ids + 0
        mixed: Tensor = self.experts(x.flatten(0, -2), ids, weights)
        return x + mixed.view_as(x)


def blocks(how: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Block(how), Block(how)), torch.randn(2, 5, 8)


def routing_of(how: str) -> Any:
    model, x = blocks(how)
    return fh.quantities(model, x)["@experts.1"].routing


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("vectors", "no rule that knows only the ids"),
        ("float64", "no rule that knows only the ids"),
        ("order", "its router is not proved"),
    ],
)
def test_weights_that_the_ids_do_not_define_have_no_rule(how: str, reason: str) -> None:
    routing = routing_of(how)
    assert routing.rule is None
    assert reason in routing.reason
    model, x = blocks(how)
    fh.quantities(model, x)
    with pytest.raises(fh.HookTypeError, match=f"needs weights= at @experts.1.*{reason}"):
        fh.Plan(fh.on("@experts.1", fh.Route([0, 1]))).prepare(model)


@pytest.mark.parametrize("how", ["plain", "own number"])
def test_a_rule_is_proved_with_the_numbers_of_its_router(how: str) -> None:
    rule = routing_of(how).rule
    assert rule is not None
    assert (rule.sum, rule.least) == ((None, 0.0) if how == "plain" else ("clamp", 0.75))


def test_a_router_without_logits_needs_weights() -> None:
    routing = routing_of("no logits")
    assert routing.rule is None
    assert "does not return the router's logits" in routing.reason


def test_experts_that_are_not_written_where_they_are_returned_stand_where_they_are_taken() -> None:
    model, x = blocks("written elsewhere")
    table = fh.quantities(model, x)
    assert table["@experts.1"].place == "1.experts input[1]"
    assert table["@experts.1"].writable
    with pytest.raises(fh.HookTypeError, match=r"a Route cannot change @experts.1: no module"):
        fh.Plan(fh.on("@experts.1", fh.Route([0, 1]))).prepare(model)


def test_a_look_for_rules_changes_nothing_of_the_model() -> None:
    model, x = blocks("plain")
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    fh.quantities(model, x)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(it.grad is None for it in model.parameters())
