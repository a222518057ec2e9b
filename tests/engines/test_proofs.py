"""Proofs of an engine's quantities, on layers that carry the stream as engines do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.effects.routing import bound
from ferrohook.engines.model.looks import HeadSizes, look_at
from ferrohook.engines.model.modules import OBSERVED_ROWS, ModuleTable, observed_ids
from ferrohook.engines.model.observing import CallingForward, observe
from ferrohook.engines.rewriting import rewritten

WIDTH, HEADS = 24, (3, 8)
IDS = torch.tensor(observed_ids(1 + OBSERVED_ROWS))


class Norm(nn.Module):
    """Norm that adds the pending contribution, and returns the stream too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Any:
        stream = hidden if residual is None else hidden + residual
        normed = stream * stream.square().mean(-1, keepdim=True).rsqrt() * self.weight
        return normed if residual is None else (normed, stream)


class Attention(nn.Module):
    """Attention of flat q, k and v."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, HEADS).transpose(0, 1) for each in (q, k, v))
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return z.transpose(0, 1).flatten(1)


class Projection(nn.Linear):
    """Linear that returns a pair, as engines' do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Projection(WIDTH, 3 * WIDTH), Projection(WIDTH, WIDTH)
        self.attn = Attention()

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.chunk(3, -1)
        # A model of transformers in an engine calls `forward`.
        z = self.attn.forward(q[0], k[0], v[0])[None] if qkv.ndim > 2 else self.attn(q, k, v)
        out: Tensor = self.o_proj(z)[0]
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Projection(WIDTH, 40), Projection(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x)[0].relu())[0]
        return out


class Layer(nn.Module):
    """Layer whose output is a pair, with norms after its parts if `sandwich`."""

    def __init__(self, sandwich: bool, factor: float) -> None:
        super().__init__()
        self.input_norm, self.middle_norm = Norm(), Norm()
        self.self_attn, self.mlp = SelfAttention(), Mlp()
        self.behind = nn.ModuleList([Norm(), Norm()] if sandwich else [])
        self.factor = factor

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual, hidden = hidden, self.input_norm(hidden)
        else:
            hidden, residual = self.input_norm(hidden, residual)
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden = self.behind[0](hidden) if self.behind else hidden
        hidden, residual = self.middle_norm(hidden, residual)
        hidden = self.mlp(hidden)
        hidden = self.behind[1](hidden) if self.behind else hidden
        return hidden * self.factor, residual


class Model(nn.Module):
    def __init__(
        self, *, sandwich: bool = False, factor: float = 1.0, batched: bool = False
    ) -> None:
        super().__init__()
        self.batched = batched
        self.embed = nn.Embedding(1 + OBSERVED_ROWS, WIDTH)
        self.layers = nn.ModuleList(Layer(sandwich, factor) for _ in range(3))
        self.norm = Norm()

    def forward(self, ids: Tensor) -> Tensor:
        hidden, residual = self.embed(ids[None] if self.batched else ids), None
        for layer in self.layers:
            hidden, residual = layer(ids, hidden, residual)
        out: Tensor = self.norm(hidden, residual)[0]
        return out[0] if self.batched else out


def heads_of(module: nn.Module) -> HeadSizes | None:
    return HeadSizes(HEADS[0], HEADS[0], HEADS[1]) if isinstance(module, Attention) else None


def looked_at(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Model, ModuleTable]:
    torch.manual_seed(0)
    model = Model(**options).requires_grad_(requires_grad=False).to(dtype)
    modules = observe(model, lambda: model(IDS), heads_of)
    return model, modules.with_quantities(
        look_at(model, IDS.tolist(), lambda: model(IDS), heads_of)
    )


@pytest.mark.parametrize("sandwich", [False, True])
def test_all_is_found_where_it_is(sandwich: bool) -> None:
    model, modules = looked_at(sandwich=sandwich)
    table = modules.named.table
    found = {name: each.place for name, each in table.items() if name.endswith(".1")}
    layer = "layers.1"
    contributions = ("behind.0", "behind.1") if sandwich else ("self_attn", "mlp")
    assert found == {
        "@resid_pre.1": "layers.0 output['sum']",
        "@attn_in.1": f"{layer}.input_norm output[0]",
        "@q.1": f"{layer}.self_attn.attn input[0]",
        "@k.1": f"{layer}.self_attn.attn input[1]",
        "@v.1": f"{layer}.self_attn.attn input[2]",
        "@z.1": f"{layer}.self_attn.attn output",
        "@attn_out.1": f"{layer}.{contributions[0]} output",
        "@resid_mid.1": f"{layer}.middle_norm output[1]",
        "@mlp_in.1": f"{layer}.middle_norm output[0]",
        "@mlp_act.1": f"{layer}.mlp.down input",
        "@mlp_out.1": f"{layer}.{contributions[1]} output",
        "@resid_post.1": f"{layer} output['sum']",
    }
    assert {name for name, each in table.items() if not each.writable} == {
        f"@resid_mid.{layer}" for layer in range(3)
    }
    assert modules.named.heads["@z.1"] == HEADS
    # By hand: a hook on the layer would have to add these up.
    pair = []
    handle = model.layers[1].register_forward_hook(lambda _m, _a, output: pair.append(output))
    with fh.capture(model, ["@resid_post.1", "@z.2"]) as acts:
        model(IDS)
    handle.remove()
    assert torch.equal(acts["@resid_post.1"], pair[0][0] + pair[0][1])


def test_a_batch_dimension_of_one_changes_no_place() -> None:
    """Models of transformers in engines: (1, tokens, width), and `forward` of attention called."""
    model, batched = looked_at(batched=True)
    _, plain = looked_at()
    assert {name: each.place for name, each in batched.named.table.items()} == {
        name: each.place for name, each in plain.named.table.items()
    }
    assert batched.named.heads == plain.named.heads
    assert batched.dim == 1
    assert {*batched.other_dims(model).values()} == {0}
    front = ModuleTable.from_json(batched.to_json())
    plan = fh.Plan(fh.keep("layers.1", slice=(slice(None), 0)), fh.keep(""))
    own, other = rewritten(plan, front).entries
    assert (own.at, other.at) == (slice(0, None), None)
    assert [each.row_bytes for each in front.captures(fh.Plan(own, other))] == [4 * WIDTH] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sandwich", [False, True])
def test_half_precision_has_the_same_places(sandwich: bool, dtype: torch.dtype) -> None:
    tables = [looked_at(each, sandwich=sandwich)[1].named.table for each in (torch.float32, dtype)]
    full, half = ({name: (it.place, it.writable) for name, it in t.items()} for t in tables)
    assert half == full


def test_a_contribution_behind_a_multiplier_that_no_module_has_is_one_of_its_multiple() -> None:
    _, modules = looked_at(factor=0.25)
    quantity = modules.named.table["@mlp_out.1"]
    assert quantity.place == "0.25 * layers.1.mlp output"


def test_the_stream_may_take_what_a_norm_returns_beside_it() -> None:
    torch.manual_seed(0)
    model: Any = Model().requires_grad_(requires_grad=False)
    for layer in model.layers:
        layer.mlp = nn.Identity()
    table = look_at(model, IDS.tolist(), lambda: model(IDS), heads_of).table
    assert table["@resid_post.1"].place == "layers.1 output['sum']"
    assert table["@attn_out.1"].place == "layers.1.self_attn output"


def test_layers_that_hide_the_sum_prove_nothing() -> None:
    torch.manual_seed(0)
    model = Model().requires_grad_(requires_grad=False)
    original = Layer.forward

    def bent(self: Any, *args: Any) -> Any:
        hidden, residual = original(self, *args)
        return hidden.tanh(), residual

    model.layers[1].forward = bent.__get__(model.layers[1])
    named = look_at(model, IDS.tolist(), lambda: model(IDS), heads_of)
    assert "@resid_post.0" in named.table
    assert "@resid_post.1" not in named.table
    expected = (
        r"resid_pre \+ contributions = resid_post fails by \d\.\de-0\d: its output is not a sum"
    )
    assert re.match(expected, named.table.missing["resid_post.1"])
    with pytest.raises(fh.SelectionError, match=r"@mlp_out.1 is not proved.*" + expected):
        named.table.matching("@mlp_out.1")


class Experts(nn.Module):
    """Experts of which an engine calls a method, with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def compute(self, x: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
        each = torch.einsum("pd,pkde->pke", x, self.down[numbers]).tanh()
        return (each * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """Mixture whose experts have the numbers of the router, or others."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.gate, self.experts, self.other = Projection(WIDTH, 4), Experts(), other

    def forward(self, x: Tensor) -> Tensor:
        weights, numbers = self.gate(x)[0].softmax(-1).topk(2, -1)
        numbers = ((numbers + self.other) % 4).int()
        out: Tensor = self.experts.compute(numbers=numbers, x=x, weights=weights)
        return out


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_experts_are_seen_where_their_module_is_called(called: bool, other: bool) -> None:
    torch.manual_seed(0)
    model: Any = Model()
    for layer in model.layers:
        layer.mlp = Mixture(other)
        if called:
            experts = layer.mlp.experts
            experts.forward = experts.compute = CallingForward(experts, "compute")
    model.requires_grad_(requires_grad=False)
    expected = model(IDS)
    modules = observe(model, lambda: model(IDS), heads_of)
    modules = modules.with_quantities(look_at(model, IDS.tolist(), lambda: model(IDS), heads_of))
    assert torch.equal(model(IDS), expected)
    table = modules.named.table
    names = ["@experts.1", "@expert_weights.1"]
    if not called or other:
        reason = "its router is not proved" if called else "no module takes the ids"
        assert all(reason in table.missing[name.removeprefix("@")] for name in names)
        assert "@router.1" not in table
        return
    assert [table[name].place for name in names] == [
        "layers.1.mlp.experts input[2]",
        "layers.1.mlp.experts input[1]",
    ]
    assert all(table[name].writable for name in [*names, "@router.1"])
    front = ModuleTable.from_json(modules.to_json())
    plan = rewritten(
        fh.Plan(fh.on("@router.1", fh.Scale(-1.0)), fh.keep(["@router.1", *names])), front
    )
    with plan.prepare(model) as prepared, prepared.open() as request:
        model(IDS)
    acts = request.acts
    weights, numbers = acts["@router.1"].softmax(-1).topk(2, -1)
    assert torch.equal(acts["@experts.1"], numbers.int())
    torch.testing.assert_close(acts["@expert_weights.1"], weights)
    with pytest.raises(ValueError, match=r"@experts.1 contains the ids of experts, which no inter"):
        rewritten(fh.Plan(fh.on("@experts.1", fh.Zero())), front)


class Chooser(nn.Module):
    """Router of an engine: a kernel, which rounds otherwise, or one that looks at the tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        weights, numbers = logits.double().softmax(-1).topk(2, -1)
        if self.how == "tokens":
            weights = weights * (1 + 1e-3 * x[:, :1].tanh())
        return logits, weights.float(), numbers.int()


class RoutedMixture(nn.Module):
    """Mixture whose output is multiplied, and not the weights of its experts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate, self.router, self.experts = Projection(WIDTH, 4), Chooser(how), Experts()
        experts: Any = self.experts
        experts.forward = experts.compute = CallingForward(experts, "compute")

    def forward(self, x: Tensor) -> Tensor:
        _, weights, numbers = self.router(x, self.gate(x)[0])
        out: Tensor = 2.5 * self.experts.compute(numbers=numbers, x=x, weights=weights)
        return out


@pytest.mark.parametrize("how", ["kernel", "tokens"])
def test_routers_of_engines_have_rules_within_rounding_and_factors(how: str) -> None:
    torch.manual_seed(0)
    model: Any = Model()
    for layer in model.layers:
        layer.mlp = RoutedMixture(how)
    model.requires_grad_(requires_grad=False)

    def factor_of(router: nn.Module) -> float:
        return 2.5 if isinstance(router, Chooser) else 1.0

    modules = observe(model, lambda: model(IDS), heads_of)
    looked = look_at(model, IDS.tolist(), lambda: model(IDS), heads_of, factor_of=factor_of)
    front = ModuleTable.from_json(modules.with_quantities(looked).to_json())
    table = front.named.table
    route = fh.Plan(fh.on("@experts.1", fh.Route(torch.tensor([3, 0]))))
    if how == "tokens":
        assert "@experts.1" not in table or table["@experts.1"].routing.rule is None
        with pytest.raises(ValueError, match=r"@experts\.1"):
            rewritten(route, front)
        return
    assert table["@expert_weights.1"].place == "2.5 * layers.1.mlp.router output[1]"
    routing = table["@experts.1"].routing
    assert routing is not None
    assert routing.rule is not None
    assert routing.rule.scores == "softmax(router)[ids]"
    assert rewritten(route, front).entries
    given = fh.Route(torch.tensor([3, 0]), torch.tensor([0.5, 1.5]))
    form = bound(given, "@experts.1", routing, 2, 4)
    output = torch.randn(3, 4), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    _, weights, numbers = form.change(output, torch.tensor([1]), *form.routed.at([0]))
    assert numbers.tolist() == [[0, 0], [3, 0], [0, 0]]
    torch.testing.assert_close(weights[1] * 2.5, torch.tensor([0.5, 1.5]))
    assert torch.equal(weights[::2], output[1][::2])


def test_a_look_that_fails_leaves_the_engine_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()

    def fail() -> None:
        raise ZeroDivisionError

    named = look_at(model, IDS.tolist(), fail, heads_of)
    assert not named.table
    assert "its forward failed with ZeroDivisionError" in named.table.missing["resid_post"]
    assert "inspecting the engine's model failed" in caplog.text
    assert not any(module._forward_hooks for module in model.modules())


VECTOR = torch.ones(HEADS[1])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (fh.keep("@resid_post.7"), "Model has no @resid_post.7: its blocks are 0 to 2"),
        (fh.keep("@pattern.1"), "attention does not compute a pattern"),
        (fh.keep("@q.1", output_index=0), "leave out inputs and output_index"),
        (fh.keep("@q.1", slice=(slice(None), 0)), "captured whole"),
        (fh.on("@resid_mid.1", fh.Zero()), "can be read but not written"),
        (fh.on("@z.1", fh.Ablate(VECTOR)), "Ablate on @z.1 acts on each head"),
        (fh.on("@z.1", fh.Add(torch.ones(WIDTH))), "width of 24, but the head of @z.1 has 8"),
        (fh.on("@attn_out.1", fh.Add(VECTOR)), "width of 8, but the tensor @attn_out.1 has 24"),
        (fh.on("@attn_out.1", fh.Scale(2), phase="forward_pre"), "leave out phase"),
        (fh.on("layers.1", fh.Zero(), phase="forward_pre"), "but 'layers.1' has several"),
        (fh.keep("@z.1.3"), "@z.1.3 names no head: @z.1 has heads 0 to 2"),
        (fh.keep("@z.1.0", slice=(..., 0)), "captured whole"),
        (fh.on("@z.1.0", fh.Add(torch.ones(WIDTH))), "width of 24, but the tensor @z.1.0 has 8"),
        (fh.on("@v.1.0", fh.Zero(), at=0), "@v.1.0 can only be written at all positions"),
        (fh.keep("@attn_out.1", slice=(..., 0, slice(None))), "must keep all tokens"),
        (fh.keep("layers.1", slice=(..., [0, 1], [2, 3])), "must keep all tokens"),
        (fh.keep("layers.1", slice=(..., -WIDTH - 1)), "does not fit the tensor at 'layers.1'"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_at_the_front_end(entry: Any, reason: str) -> None:
    _, modules = looked_at()
    front = ModuleTable.from_json(modules.to_json())
    with pytest.raises(ValueError, match=reason):
        rewritten(fh.Plan(entry), front)


@pytest.mark.parametrize(("index", "meant"), [(None, "sum"), (0, 0), (1, 1)])
def test_entries_act_at_the_part_that_they_name(index: Any, meant: Any) -> None:
    """Without one, at the stream of a layer that returns (hidden, residual)."""
    _, modules = looked_at()
    plan = fh.Plan(
        fh.on("layers.1", fh.Zero(output_index=index)),
        fh.keep("layers.1", output_index=index),
        fh.gate("g", "layers.1", fh.Norm(), output_index=index),
    )
    hook, *read = rewritten(plan, modules).entries
    assert [hook.hook.output_index] == [meant]
    assert [entry.options["output_index"] for entry in read] == [meant] * 2


def test_names_are_kept_and_vectors_spread_over_heads() -> None:
    _, modules = looked_at()
    front = ModuleTable.from_json(modules.to_json())
    plan = rewritten(
        fh.Plan(
            fh.on("@z.1", fh.Add(VECTOR)),
            fh.keep(["blocks.*.hook_resid_post", "layers.1.mlp", "@q.0"]),
        ),
        front,
    )
    add, *kept = plan.entries
    assert add.hook == fh.Add(VECTOR.repeat(HEADS[0]))
    assert [entry.what for entry in kept] == [
        *([f"blocks.{layer}.hook_resid_post"] for layer in range(3)),
        ["@q.0"],
        ["layers.1.mlp"],
    ]
    captures = front.captures(plan)
    assert [each.row_bytes for each in captures] == [4 * WIDTH] * 5
    assert [each.values[0].heads for each in captures] == [None, None, None, HEADS, None]


def test_ranks_of_tensor_parallelism_have_no_quantities() -> None:
    _, modules = looked_at()
    front = ModuleTable.from_json(modules.without(["layers.1"]).to_json())
    for name in ("@resid_post.1", "@z.1.0", "blocks.1.attn.hook_z"):
        with pytest.raises(ValueError, match=r"is not proved in the engine .*tensor parallelism"):
            rewritten(fh.Plan(fh.keep(name)), front)


def test_a_head_is_a_part_of_the_tensor_of_all() -> None:
    model, modules = looked_at()
    front = ModuleTable.from_json(modules.to_json())
    plan = fh.Plan(
        fh.keep("@z.0", label="all"),
        fh.on("@z.0.1", fh.Zero()),
        fh.keep(["@z.0.*", "layers.0.self_attn.attn"]),
    )
    plan = rewritten(plan, front)
    assert [each.name for entry in front.captures(plan) for each in entry.values] == [
        "all:@z.0",
        *(f"@z.0.{head}" for head in range(HEADS[0])),
        "layers.0.self_attn.attn",
    ]
    with plan.prepare(model) as prepared, prepared.open() as request:
        model(IDS)
    before = request.acts["all:@z.0"].unflatten(-1, HEADS)
    after = request.acts["layers.0.self_attn.attn"].unflatten(-1, HEADS)
    for head in range(HEADS[0]):
        right = before[:, head] * (head != 1)
        assert torch.equal(request.acts[f"@z.0.{head}"], right)
        assert torch.equal(after[:, head], right)


def test_a_compiled_engine_has_those_at_its_sites() -> None:
    _, modules = looked_at()
    sited, parts = modules.at_sites("layers.*")
    assert parts == {f"layers.{n}": "sum" for n in range(3)}
    front = ModuleTable.from_json(sited.to_json())
    assert front.compiled
    assert {*front.named.table} == {f"@resid_post.{n}" for n in range(3)} | {
        f"@resid_pre.{n}" for n in (1, 2)
    }
    with pytest.raises(ValueError, match="not a site of this compiled engine"):
        rewritten(fh.Plan(fh.keep("@z.1")), front)
