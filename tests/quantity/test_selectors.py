"""Names of quantities wherever a selector is taken, against transformers' own outputs."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.names.select import MOST_SELECTIONS
from ferrohook.quantity.known import known_of
from support.zoo import make, token_ids

IDS = token_ids()
KINDS = ("llama", "gpt2", "bert", "granite", "gemma2")
WIDTH = 32


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {kind: make(kind) for kind in KINDS}


def test_what_attention_adds_is_scaled_as_the_model_does(models: Any) -> None:
    model = models["granite"]
    path = "model.layers.1.self_attn"
    with torch.no_grad(), fh.capture(model, ["@attn_out.1", path]) as acts:
        model(IDS)
    torch.testing.assert_close(acts["@attn_out.1"], acts[path][0] * 0.7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["attn_out", "mlp_out"])
def test_a_vector_that_is_added_arrives_in_the_sum(models: Any, kind: str, name: str) -> None:
    model = models[kind]
    vector = torch.randn(WIDTH)
    seen = [f"@{name}.1", "@resid_pre.1", "@resid_post.0"]
    with torch.no_grad():
        before = fh.run(model, IDS, capture=seen)[1]
        native = fh.run(model, IDS, hooks={f"@{name}.1": fh.Add(vector)}, capture=seen)
        python = fh.run(
            model, IDS, hooks={f"@{name}.1": lambda _m, _a, x: x + vector}, capture=seen
        )
    torch.testing.assert_close(native[0].logits, python[0].logits)
    for _, after in (native, python):
        torch.testing.assert_close(after[seen[0]], before[seen[0]] + vector)
        assert all(torch.equal(after[other], before[other]) for other in seen[1:])


@pytest.mark.parametrize(
    "hook",
    [
        fh.Scale(2.5),
        fh.Zero(),
        fh.Ablate(torch.arange(1.0, WIDTH + 1)),
        fh.Clamp(torch.arange(1.0, WIDTH + 1), low=-0.5, high=0.25),
        fh.Replace(torch.arange(1.0, WIDTH + 1)),
        fh.Add(torch.arange(1.0, WIDTH + 1), scale=-0.1),
    ],
    ids=lambda hook: type(hook).__name__,
)
def test_interventions_act_on_the_quantity_and_not_on_the_tensor_at_its_place(
    models: Any, hook: Any
) -> None:
    name = "@attn_out.1"
    with torch.no_grad():
        before = fh.run(models["granite"], IDS, capture=name)[1][name]
        after = fh.run(models["granite"], IDS, hooks={name: hook}, capture=name)[1][name]
    torch.testing.assert_close(after, hook.apply(before), rtol=1e-4, atol=1e-5)


class Halve(fh.Intervention):
    """Kind that does not know its form on multiples."""

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        return x / 2


@pytest.mark.parametrize("options", [{"at": 0}, {"strength": 0.5}])
def test_an_intervention_without_a_form_on_multiples_acts_on_all_positions_only(
    models: Any, options: dict[str, Any]
) -> None:
    name = "@attn_out.1"
    with torch.no_grad():
        before = fh.run(models["granite"], IDS, capture=name)[1][name]
        after = fh.run(models["granite"], IDS, hooks={name: Halve()}, capture=name)[1][name]
    torch.testing.assert_close(after, before / 2)
    with pytest.raises(fh.HookTypeError, match=r"Halve here with at=.*: leave them out, or write"):
        fh.Plan(fh.on(name, Halve(), **options)).prepare(models["granite"])


def test_plans_name_quantities_in_json_and_at_positions(models: Any) -> None:
    model = models["granite"]
    vector = torch.randn(WIDTH)
    plan = fh.Plan(
        fh.keep("@attn_out.1", label="before"),
        fh.on("@attn_out.1", fh.Add(vector), at=2),
        fh.keep(["@attn_out.*", "model.norm"]),
    )
    plan = fh.Plan.from_json(plan.to_json())
    with torch.no_grad():
        _, acts = fh.run(model, IDS, plan=plan)
    change = acts["@attn_out.1"] - acts["before:@attn_out.1"]
    torch.testing.assert_close(change[:, 2], vector.expand(2, -1), rtol=1e-4, atol=1e-5)
    assert not change[:, [0, 1, 3, 4, 5, 6]].any()
    names = {f"@attn_out.{block}" for block in range(3)}
    assert {*acts} == {"before:@attn_out.1", "model.norm", *names}


def test_globs_of_quantities_that_differ_fill_no_memory(models: Any) -> None:
    for number in range(MOST_SELECTIONS + 5):
        fh.capture(models["gpt2"], f"@resid_post.[1{chr(0x4E00 + number)}]")
    assert 5 <= len(known_of(models["gpt2"]).resolved) <= MOST_SELECTIONS


def test_names_of_transformer_lens_are_taken_and_read_as_they_are(models: Any) -> None:
    names = ["blocks.1.hook_resid_post", "blocks.0.hook_mlp_out"]
    with torch.no_grad(), fh.capture(models["gpt2"], [*names, "blocks.*.hook_attn_out"]) as acts:
        output = models["gpt2"](IDS, output_hidden_states=True)
    assert torch.equal(acts[names[0]], output.hidden_states[2])
    assert {*acts} == {*names, *(f"blocks.{block}.hook_attn_out" for block in range(3))}


def test_gradients_are_those_of_the_quantity(models: Any) -> None:
    model = copy.deepcopy(models["granite"]).requires_grad_()
    with fh.capture(model, ["@attn_out.1", "@resid_mid.1"], grads=True) as acts:
        model(IDS).logits.sum().backward()
    # attn_out enters the sum with a factor of one, so both have one gradient.
    torch.testing.assert_close(acts.grads["@attn_out.1"], acts.grads["@resid_mid.1"])


def test_a_model_is_left_as_it_was(models: Any) -> None:
    model = copy.deepcopy(models["llama"]).train()
    calls: list[object] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    handle = fh.register(model, "model.layers.1", lambda *_: None)
    classes = [type(module) for module in model.modules()]
    state = {name: each.clone() for name, each in model.state_dict().items()}
    random = torch.get_rng_state()
    assert len(fh.quantities(model)) > 10
    assert torch.equal(random, torch.get_rng_state())
    assert not calls
    assert not handle.calls
    assert classes == [type(module) for module in model.modules()]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(state[name], each) for name, each in model.state_dict().items())


def test_a_table_is_kept_until_the_modules_change_and_goes_with_the_model(models: Any) -> None:
    model = copy.deepcopy(models["gpt2"])
    table = fh.quantities(model)
    assert fh.quantities(model) is table
    model.transformer.h[1].mlp = nn.Identity()
    assert fh.quantities(model) is not table
    reference = weakref.ref(model)
    fh.capture(model, "@logits")
    del model
    gc.collect()
    assert reference() is None


class Factors(nn.Module):
    """Block whose multipliers are attributes and values of a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.factor = config, 0.5
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: Any) -> Any:
        return x + self.factor * self.config.factor * self.mlp(x)


def test_a_changed_multiplier_drops_the_table_and_a_call_or_dtype_does_not() -> None:
    config = types.SimpleNamespace(factor=0.8)
    model, x = nn.Sequential(Factors(config), Factors(config)), torch.randn(2, 3, 8)
    table = fh.quantities(model, x)
    assert table["@mlp_out.1"].multiplier == pytest.approx(0.4)
    model(x)
    assert fh.quantities(model.half().float()) is table
    for owner, factor in ((config, 0.2), (model[1], 0.25)):
        owner.factor = factor
        with pytest.raises(fh.HookError, match="as an example"):
            fh.quantities(model)
        found = fh.quantities(model, x)["@mlp_out.1"].multiplier
        assert found == pytest.approx(model[1].factor * config.factor)
    del model[1].factor
    with pytest.raises(fh.HookError, match="as an example"):
        fh.quantities(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_hook_on_a_multiple_changes_what_it_writes(dtype: torch.dtype, in_place: bool) -> None:
    config = types.SimpleNamespace(factor=0.44)
    model = nn.Sequential(Factors(config), Factors(config)).to(dtype)
    x = torch.randn(4, 5, 8, dtype=dtype)
    assert fh.quantities(model, x)["@mlp_out.1"].multiplier == pytest.approx(0.22, rel=0.01)
    weight = torch.ones((), dtype=dtype, requires_grad=True)

    def hook(_module: nn.Module, _args: Any, value: torch.Tensor) -> torch.Tensor | None:
        new = value if in_place else value.clone()
        new[0] = 3.0
        new[1:] *= weight  # to the same values
        return None if in_place else new

    read: list[torch.Tensor] = []
    with fh.scope():
        fh.register(model, "@mlp_out.1", hook)
        fh.register(model, "1.mlp", lambda _module, _args, output: read.append(output))
        with torch.inference_mode(in_place):
            output = model(x)
        if in_place:
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            with torch.no_grad():
                assert torch.equal(compiled(x), output)
    plain, changed = model[1].mlp(model[0](x)), read[0]
    written = torch.full_like(changed[0], 3.0 / 0.22)
    torch.testing.assert_close(changed[0], written, rtol=0.01, atol=0)
    assert torch.equal(changed[1:], plain[1:])
    if not in_place:
        (gradient,) = torch.autograd.grad(changed.sum(), weight)
        torch.testing.assert_close(gradient, plain[1:].sum(), rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("@resid_post.9", "LlamaForCausalLM has no @resid_post.9: its blocks are 0 to 2"),
        ("@nothing", "@nothing is not proved in LlamaForCausalLM"),
        ("resid_post.1", r"the quantity of this name is '@resid_post\.1'"),
        ("h.1.hook_mlp_out", r"the quantity of this name is '@mlp_out\.1'"),
        ("hook_rot_k", r"the quantity of this name is '@k\.\*'"),
        ("blocks.1.attn.hook_q", r"'@q\.1' is after RoPE"),
        ("blocks.1.attn.hook_k", r"'@k\.1' is after RoPE"),
        ("blocks.*.hook_mlp_in", r"'@mlp_in\.\*' is after the norm"),
        ("blocks.1.hook_attn_in", r"'@attn_in\.1' is after the norm"),
        ("model.layers.1.mlp.experts", "the closest names in it are"),
        ("blocks.1.attn.hook_router", "the (closest|first) names in it are"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(models: Any, what: str, message: str) -> None:
    with pytest.raises(fh.SelectionError, match=message):
        fh.capture(models["llama"], what)


def test_a_quantity_has_a_place_of_its_own(models: Any) -> None:
    model = models["llama"]
    with pytest.raises(fh.HookTypeError, match="leave out inputs"):
        fh.capture(model, "@resid_post.1", inputs=True)
    with pytest.raises(fh.HookTypeError, match="leave out the output_index"):
        fh.register(model, "@resid_post.1", fh.Zero(output_index=0))
    with pytest.raises(fh.HookTypeError, match="leave out phase"):
        fh.register(model, "@resid_post.1", lambda *_: None, phase="forward_pre")
    with pytest.raises(fh.HookTypeError, match=r"width of 31, but @resid_post.1 has 32"):
        fh.register(model, "@resid_post.1", fh.Add(torch.ones(31)))
    with pytest.raises(fh.HookTypeError, match=r"entry 0 of the plan.*read but not written"):
        fh.Plan(fh.on("@resid_mid.1", fh.Zero())).prepare(model)
    with pytest.raises(fh.SelectionError, match="is a quantity, not a module"):
        fh.select(model, "@resid_post.1")
    with (
        fh.register(model, "@attn_out.1", lambda _m, _a, x: x[:1]),
        pytest.raises(fh.HookTypeError, match=r"a tensor of shape \(2, 7, 32\) in this call"),
    ):
        model(IDS)
