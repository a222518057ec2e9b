"""The pattern: read beside any attention function, and written."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.attach.attention import _added_mask, _Function, pattern_of, points_of
from support.attention_models import (
    KINDS,
    attention_model,
    attention_of,
    implemented,
    registered,
)
from support.zoo import make, token_ids

pytest.importorskip("transformers")
MODELS = functools.cache(attention_model)
IDS = torch.arange(1, 19).reshape(3, 6)
PADDING = torch.ones(3, 6, dtype=torch.long)
PADDING[1, :2] = 0


def point(kind: str, layer: int) -> Any:
    return points_of(attention_of(MODELS(kind), kind, layer)).pattern


def run(kind: str, **options: Any) -> Any:
    with torch.no_grad():
        return MODELS(kind)(IDS, attention_mask=PADDING, **options)


def eager_weights(kind: str) -> tuple[Tensor, ...]:
    with implemented(MODELS(kind), "eager"):
        weights: tuple[Tensor, ...] = run(kind, output_attentions=True).attentions
        return weights


def by_hand(  # noqa: PLR0913, PLR0917 (arguments of attention functions)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attention function of bool masks, softcap and sinks that returns no weights."""
    groups = query.shape[1] // key.shape[1]
    output = torch.empty_like(query)
    for head in range(query.shape[1]):
        scores = torch.einsum("bqd,bkd->bqk", query[:, head], key[:, head // groups]) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.where(mask[:, 0], torch.finfo(scores.dtype).min)
        weights = scores.exp() if s_aux is None else scores.clamp(min=-80).exp()
        if s_aux is None:
            weights = scores.softmax(-1)
        else:
            weights /= weights.sum(-1, keepdim=True) + s_aux[head].exp()
        output[:, head] = torch.einsum("bqk,bkd->bqd", weights, value[:, head // groups])
    return output.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [0, 1])
def test_it_is_eager_attentions_beside_another_function(kind: str, layer: int) -> None:
    model = MODELS(kind)
    expected = eager_weights(kind)[layer]
    seen = torch.ones(3, 6, dtype=torch.bool) if kind == "bert" else PADDING != 0
    capture = fh.capture(point(kind, layer), "")
    with registered("by_hand", by_hand, "sdpa"), implemented(model, "by_hand"), capture as acts:
        run(kind)
    torch.testing.assert_close(acts[""].transpose(1, 2)[seen], expected.transpose(1, 2)[seen])
    sums = expected.sum(-1)
    assert (float(sums.min()) < 0.99) == (kind == "gpt_oss")  # a sink takes the rest


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gpt_neox", "bert"])
def test_it_is_eager_attentions_beside_sdpa_with_and_without_a_mask(kind: str) -> None:
    model = MODELS(kind)
    assert model.config._attn_implementation == "sdpa"
    for mask in (None, PADDING):
        with implemented(model, "eager"), torch.no_grad():
            expected = model(IDS, attention_mask=mask, output_attentions=True).attentions[1]
        with fh.capture(point(kind, 1), "") as acts, torch.no_grad():
            model(IDS, attention_mask=mask)
        seen = torch.ones(3, 6, dtype=torch.bool) if mask is None else mask != 0
        torch.testing.assert_close(acts[""].transpose(1, 2)[seen], expected.transpose(1, 2)[seen])


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_under_eager_attention_it_is_the_weights_themselves(kind: str) -> None:
    expected = eager_weights(kind)
    with implemented(MODELS(kind), "eager"), fh.capture(point(kind, 1), "") as acts:
        weights = run(kind, output_attentions=True).attentions
    assert torch.equal(acts[""], expected[1])
    assert torch.equal(weights[1], expected[1])


def test_of_a_token_behind_a_cache_it_has_the_keys_of_the_cache() -> None:
    model = MODELS("llama")
    whole = eager_weights("llama")[1]
    with torch.no_grad():
        former = model(IDS[:, :5], attention_mask=PADDING[:, :5], use_cache=True)
        with fh.capture(point("llama", 1), "") as acts:
            # Its name since transformers 5.24, and before.
            name = {"cache", "past_key_values"} & inspect.signature(model.forward).parameters.keys()
            model(IDS[:, 5:], attention_mask=PADDING, **{name.pop(): former.past_key_values})
    torch.testing.assert_close(acts[""], whole[:, :, 5:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["eager", "by_hand"])
def test_written_it_replaces_the_output_by_pattern_times_v(kind: str, implementation: str) -> None:
    model = MODELS(kind)
    points = points_of(attention_of(model, kind, 1))

    def uniform(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return torch.full_like(output, 1 / output.shape[-1])

    with (
        registered("by_hand", by_hand, "sdpa"),
        implemented(model, implementation),
        fh.capture(points.z, "") as z,
        fh.capture(points.v, "") as v,
        fh.register(points.pattern, "", uniform),
    ):
        run(kind)
    mean = v[""].mean(1, keepdim=True)  # (batch, 1, kv_heads, head_dim)
    mean = mean.repeat_interleave(z[""].shape[2] // mean.shape[2], dim=2)
    torch.testing.assert_close(z[""], mean.expand_as(z[""]))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_rows_of_the_batch_that_nobody_wrote_have_the_functions_own_output(
    implementation: str,
) -> None:
    model = MODELS("llama")

    def first(module: nn.Module, args: Any, output: Tensor) -> None:
        output[0] = 0  # in place

    with implemented(model, implementation):
        plain = run("llama").logits
        with fh.register(point("llama", 1), "", first):
            written = run("llama").logits
        with fh.register(point("llama", 1), "", lambda *_: None):
            assert torch.equal(run("llama").logits, plain)
    assert torch.equal(written[1:], plain[1:])
    assert not torch.equal(written[0], plain[0])


def test_in_inference_mode_it_is_read_and_written() -> None:
    model = MODELS("llama")
    plain = run("llama").logits
    with torch.inference_mode(), fh.register(point("llama", 1), "", fh.Scale(0.5)):
        changed = model(IDS, attention_mask=PADDING).logits
    with torch.inference_mode(), fh.capture(point("llama", 1), "") as acts:
        read = model(IDS, attention_mask=PADDING).logits
    assert torch.equal(read, plain)
    assert not torch.equal(changed, plain)
    assert acts[""].shape == (3, 4, 6, 6)


def test_it_has_no_dropout_of_its_own() -> None:
    model = attention_model("gpt2")
    model.config.attn_pdrop = 0.5
    for attention in (attention_of(model, "gpt2", 0), attention_of(model, "gpt2", 1)):
        attention.attn_dropout.p = 0.5
    pattern = points_of(attention_of(model, "gpt2", 0)).pattern
    model.train()
    with fh.capture(pattern, "", calls="all") as acts, torch.no_grad():
        torch.manual_seed(0)
        model.transformer.drop.p = 0.0
        model(IDS)
        model(IDS)
    assert torch.equal(*acts[""])
    torch.testing.assert_close(acts[""][0].sum(-1), torch.ones(3, 4, 6))


def test_a_model_without_eager_attention_is_refused_by_name() -> None:
    def without_weights(module: Any, q: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        return q, None

    module = attention_of(MODELS("llama"), "llama", 0)
    function = _Function(without_weights, "sdpa", without_weights)
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(fh.HookError, match="pattern of LlamaAttention cannot be computed"):
        pattern_of(function, module, q, q[:, :2], q[:, :2], None, {"scaling": 1.0})


# --- Masks of functions that do not run here -----------------------------------------------------


def allowed(mask: Any, queries: int, keys: int, name: str, **options: Any) -> Tensor | None:
    causal = options.pop("causal", True)
    module: Any = SimpleNamespace(is_causal=causal)
    q, k = torch.zeros(2, 4, queries, 8), torch.zeros(2, 2, keys, 8)
    added = _added_mask(_Function(by_hand, name, by_hand), module, q, k, mask, options)
    return None if added is None else (added == 0).expand(2, 1, queries, keys)


def expected_mask(queries: int, keys: int, *, window: int | None = None, offset: int = 0) -> Tensor:
    rows = [
        [
            key <= query + offset and (window is None or key > query + offset - window)
            for key in range(keys)
        ]
        for query in range(queries)
    ]
    return torch.tensor(rows).expand(2, 1, queries, keys)


def test_a_mask_left_out_is_the_causal_one_where_the_function_counts_it() -> None:
    assert torch.equal(allowed(None, 4, 4, "sdpa"), expected_mask(4, 4))
    assert torch.equal(allowed(None, 4, 7, "sdpa"), expected_mask(4, 7))
    flash = allowed(None, 4, 7, "flash_attention_2")
    assert torch.equal(flash, expected_mask(4, 7, offset=3))
    windowed = allowed(None, 4, 7, "flash_attention_2", sliding_window=3)
    assert torch.equal(windowed, expected_mask(4, 7, offset=3, window=3))
    assert allowed(None, 4, 4, "sdpa", causal=False) is None
    assert allowed(None, 4, 4, "sdpa", is_causal=False) is None
    assert allowed(None, 1, 4, "sdpa") is None


def test_a_mask_of_the_padding_is_spread_over_queries() -> None:
    padding = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    found = allowed(padding, 4, 4, "flash_attention_2")
    assert torch.equal(found, expected_mask(4, 4) & (padding[:, None, None] != 0))
    both = allowed(padding, 4, 4, "flash_attention_2", causal=False)
    assert torch.equal(both, (padding[:, None, None] != 0).expand(2, 1, 4, 4))


def test_a_mask_of_flex_attention_is_written_out() -> None:
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    blocks = create_block_mask(
        lambda b, h, q, k: (q >= k) & (k > q - 2), 2, None, 5, 5, device="cpu"
    )
    assert torch.equal(allowed(blocks, 5, 5, "flex_attention"), expected_mask(5, 5, window=2))


# --- By name ------------------------------------------------------------------------------------


def test_by_name_it_is_read_and_written_of_a_layer_a_head_and_a_request() -> None:
    model = MODELS("llama")
    expected = eager_weights("llama")
    options = {"attention_mask": PADDING}
    with torch.no_grad():
        _, acts = fh.run(model, IDS, capture=["@pattern.*", "@pattern.1.2"], **options)
        first = fh.Plan(fh.on("@pattern.1.2", fh.Zero()), fh.keep("@z.1"))
        _, zeroed = fh.run(model, IDS, plan=first, **options)
        _, plain = fh.run(model, IDS, capture="@z.1", **options)
    seen = PADDING != 0
    for layer in (0, 1):
        found = acts[f"@pattern.{layer}"].transpose(1, 2)[seen]
        torch.testing.assert_close(found, expected[layer].transpose(1, 2)[seen])
    assert torch.equal(acts["@pattern.1.2"], acts["@pattern.1"][:, 2])
    assert not zeroed["@z.1"][:, :, 2].any()
    others = [0, 1, 3]
    kept = zeroed["@z.1"][seen][:, others]  # padding may attend to anything
    torch.testing.assert_close(kept, plain["@z.1"][seen][:, others])


def planned(plan: fh.Plan) -> Any:
    plan = fh.Plan.from_json(plan.to_json())
    with torch.no_grad():
        return fh.run(MODELS("llama"), IDS, plan=plan, attention_mask=PADDING)[1]


@pytest.mark.parametrize("at", [0, -1, 3, slice(2, 5), "prompt"])
def test_positions_of_a_pattern_are_its_queries(at: Any) -> None:
    name = "@pattern.1"
    whole = planned(fh.Plan(fh.keep(name)))[name].transpose(1, 2)  # (batch, queries, heads, keys)
    position = (PADDING.cumsum(1) - 1).masked_fill(PADDING == 0, -1)
    last = position.max(1, keepdim=True).values
    wanted = {
        0: position == 0,
        -1: position == last,
        3: position == 3,
        "prompt": position >= 0,
    }.get(at if isinstance(at, int | str) else "", (position >= 2) & (position < 5))
    acts = planned(fh.Plan(fh.keep([name, f"{name}.2"], at=at)))
    assert torch.equal(acts[name].reshape(-1, 4, 6), whole[wanted])
    assert torch.equal(acts[f"{name}.2"].reshape(-1, 6), whole[wanted][:, 2])


@pytest.mark.parametrize("name", ["@pattern.1", "@pattern.1.2"])
@pytest.mark.parametrize("hook", [fh.Zero(), fh.Scale(0.5)])
def test_written_at_a_position_it_changes_the_output_there_alone(name: str, hook: Any) -> None:
    plain = planned(fh.Plan(fh.keep(["@z.1", "@pattern.1"])))
    changed = planned(
        fh.Plan(
            fh.keep("@pattern.1", label="before", at=2),
            fh.on(name, hook, at=2),
            fh.keep(["@z.1"]),
            fh.keep("@pattern.1", at=2),
        )
    )
    heads = [2] if name.endswith(".2") else [0, 1, 2, 3]
    factor = 0.0 if isinstance(hook, fh.Zero) else 0.5
    expected = plain["@z.1"].clone()
    position = (PADDING.cumsum(1) - 1).masked_fill(PADDING == 0, -1)
    for head in heads:
        expected[..., head, :][position == 2] *= factor
    touched = torch.zeros(3, 6, 4, dtype=torch.bool)
    touched[position == 2] = torch.tensor([head in heads for head in range(4)])
    torch.testing.assert_close(changed["@z.1"][touched], expected[touched])
    assert torch.equal(changed["@z.1"][~touched], plain["@z.1"][~touched])  # bit for bit
    before, after = changed["before:@pattern.1"], changed["@pattern.1"]
    assert torch.equal(before.reshape(3, 4, 6), plain["@pattern.1"].transpose(1, 2)[position == 2])
    assert torch.equal(after.reshape(3, 4, 6)[:, heads], before.reshape(3, 4, 6)[:, heads] * factor)


def test_a_function_at_a_position_gets_the_head_that_it_names() -> None:
    shapes = []

    def see(_module: Any, _args: Any, value: Tensor) -> Tensor:
        shapes.append(tuple(value.shape))
        return value * 0

    model = MODELS("llama")
    for name in ("@pattern.1.2", "@z.1.2"):
        plan = fh.Plan(fh.on(name, see, at=2), fh.keep("@z.1"))
        with torch.no_grad():
            _, acts = fh.run(model, IDS, plan=plan)
        zero = (acts["@z.1"] == 0).all(-1)
        assert zero[:, 2, 2].all()
        assert zero.sum() == 3
    assert [shape[-1] for shape in shapes] == [6, 8]


def test_in_a_batch_each_request_has_its_own_queries() -> None:
    model = MODELS("llama")
    one = fh.Plan(fh.on("@pattern.1", fh.Zero(), at=0), fh.keep("@z.1")).prepare(model)
    other = fh.Plan(fh.keep("@pattern.1", at=-1)).prepare(model)
    plain = planned(fh.Plan(fh.keep(["@z.1", "@pattern.1"])))
    writer, reader = one.open(), other.open()
    with fh.batch({writer: 0, reader: slice(1, 3)}, size=3):
        run("llama")
    z = writer.acts["@z.1"]
    assert not z[0, 0].any()
    assert torch.equal(z[0, 1:], plain["@z.1"][0, 1:])
    expected = plain["@pattern.1"].transpose(1, 2)[1:, -1]
    assert torch.equal(reader.acts["@pattern.1"].reshape(2, 4, 6), expected)
    one.close()
    other.close()


def test_entries_at_positions_and_on_all_of_a_pattern_have_no_order_and_are_refused() -> None:
    plan = fh.Plan(fh.on("@pattern.1", fh.Zero(), at=2), fh.keep("@z.1"), fh.keep("@pattern.*"))
    with pytest.raises(fh.HookError, match="entries 0 and 2 of the plan use one attention"):
        plan.prepare(MODELS("llama"))
    both = planned(fh.Plan(fh.keep("@pattern.1", at=2), fh.keep("@pattern.1", label="all")))
    assert {*both} == {"@pattern.1", "all:@pattern.1"}


# --- Heads at positions -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["@z.1.2", "@q.1.2", "@v.1.1"])
@pytest.mark.parametrize("hook", [fh.Zero(), fh.Add(torch.ones(8), scale=2.0)])
def test_an_intervention_changes_one_head_at_its_positions_alone(name: str, hook: Any) -> None:
    whole, _, head = name.rpartition(".")
    plan = fh.Plan(fh.keep(whole, label="before"), fh.on(name, hook, at=2), fh.keep(whole))
    acts = planned(plan)
    expected = acts[f"before:{whole}"].clone()
    chosen = (PADDING.cumsum(1) - 1).masked_fill(PADDING == 0, -1) == 2
    expected[chosen, int(head)] = hook.apply(expected[chosen, int(head)])
    assert torch.equal(acts[whole], expected)
    assert not torch.equal(acts[whole], acts[f"before:{whole}"])


def test_in_a_batch_a_head_changes_at_the_positions_of_its_request() -> None:
    model = MODELS("llama")
    plan = fh.Plan(fh.on("@z.1.2", fh.Zero(), at=1), fh.keep("@z.1"))
    beside = fh.Plan(fh.keep("@z.1"))
    plain = planned(beside)["@z.1"]
    with plan.prepare(model) as prepared, beside.prepare(model) as other:
        writer, reader = prepared.open(), other.open()
        with fh.batch({writer: 0, reader: slice(1, 3)}, size=3):
            run("llama")
        expected = plain[:1].clone()
        expected[:, 1, 2] = 0
        assert torch.equal(writer.acts["@z.1"], expected)
        assert torch.equal(reader.acts["@z.1"], plain[1:])


def test_a_function_at_positions_of_a_part_is_refused_with_what_to_do() -> None:
    plan = fh.Plan(fh.on("@attn_out.1", lambda _module, _args, value: value, at=0))
    refused = r"entry 0 .*@attn_out.1 is the output\[0\] of .*: use an intervention"
    with pytest.raises(fh.HookTypeError, match=refused):
        plan.prepare(MODELS("llama"))


# --- Layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["@pattern.1", "@z.1"])
def test_a_model_that_views_its_output_can_be_written_to(name: str) -> None:
    model = make("afmoe")
    assert fh.quantities(model)[name].writable

    def other_strides(_module: Any, _args: Any, value: Tensor) -> Tensor:
        return (value * 2).transpose(1, 2).contiguous().transpose(1, 2)

    with torch.no_grad(), fh.register(model, name, other_strides):
        changed = model(token_ids()).logits
    with torch.no_grad():
        assert not torch.equal(changed, model(token_ids()).logits)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_hook_that_detaches_it_leaves_q_and_k_without_gradients(implementation: str) -> None:
    model = make("llama", attn_implementation=implementation).requires_grad_()
    attention = model.model.layers[1].self_attn

    def detach(_module: nn.Module, _args: Any, pattern: Tensor) -> Tensor:
        return pattern.detach()

    with fh.register(model, "@pattern.1", detach):
        logits = model(token_ids()).logits
    logits.square().sum().backward()
    assert attention.q_proj.weight.grad is None
    assert attention.v_proj.weight.grad.any()
