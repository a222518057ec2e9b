"""Ablation sweeps equal the loop by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from ferrohook import analysis
from support.analysis import HEADS, POSITIONS, WIDTH, changed, difference, modules, output_of

if TYPE_CHECKING:
    from support.analysis import Case, Net


@pytest.mark.parametrize("by", ["zero", "mean"])
@pytest.mark.parametrize("over", [(), "head", "position"])
def test_each_cell_is_switched_off_as_by_hand(case: Case, by: Any, over: Any) -> None:
    heads = HEADS if over == "head" else None
    effects = analysis.ablation(
        case.model, case.clean, case.metric, case.layers, by=by, over=over, heads=heads
    )
    with torch.no_grad():
        plain = case.metric(case.model(case.clean)).mean()
    assert effects.scores == {"plain": pytest.approx(float(plain), abs=1e-5)}
    head = WIDTH // HEADS
    everything = slice(None)
    cells: dict[Any, list[tuple[Any, ...]]] = {
        (): [(everything,)],
        "head": [(..., slice(h * head, h * head + head)) for h in range(HEADS)],
        "position": [(everything, p) for p in range(POSITIONS)],
    }
    for name, module in modules(case.model, case.layers).items():
        value = output_of(module, case.model, case.clean)
        off = value.mean((0, 1)).expand_as(value) if by == "mean" else torch.zeros_like(value)
        moved = []
        for cell in cells[over]:

            def change(tensor: Tensor, cell: Any = cell, off: Tensor = off) -> Tensor:
                tensor = tensor.clone()
                tensor[cell] = off[cell]
                return tensor

            with changed(module, change), torch.no_grad():
                moved.append(case.metric(case.model(case.clean)).mean() - plain)
        own = effects[name].flatten().float()
        torch.testing.assert_close(own, torch.stack(moved), rtol=1e-3, atol=1e-4)


def test_means_may_be_those_of_other_inputs(net: Net) -> None:
    ids = torch.randint(32, (2, POSITIONS))
    many = torch.randint(32, (7, POSITIONS))
    found = analysis.ablation(net, ids, difference, "blocks.1", by="mean", reference=many)
    mean = output_of(net.blocks[1], net, many).mean((0, 1))
    with torch.no_grad():
        plain = difference(net(ids)).mean()
    with changed(net.blocks[1], mean.expand_as), torch.no_grad():
        expected = difference(net(ids)).mean() - plain
    torch.testing.assert_close(found.values[0].float(), expected, rtol=1e-4, atol=1e-5)


def test_bad_arguments_are_refused(net: Net) -> None:
    ids = torch.randint(32, (2, POSITIONS))
    with pytest.raises(ValueError, match="by must be 'zero' or 'mean', got 'median'"):
        analysis.ablation(net, ids, difference, "blocks.1", by="median")  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="reference must contain a tensor with one row"):
        analysis.ablation(net, ids, difference, "blocks.1", by="mean", reference=[])
    with pytest.raises(fh.HookTypeError, match="reference= only works with by='mean'"):
        analysis.ablation(net, ids, difference, "blocks.1", reference=ids)
    model, batch = padded_llama()
    options: Any = {"by": "mean", "reference": batch["input_ids"][:, :4]}
    with pytest.raises(fh.HookError, match=r"\(1, 4, 1, 4\).* does not fit \(2, 4, 7, 7\)"):
        analysis.ablation(model, batch, difference, "@pattern.1", **options)


def padded_llama() -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        initializer_range=0.3,
        pad_token_id=0,
    )
    ids, mask = torch.randint(3, 90, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    ids[1, :5] = mask[1, :5] = 0
    model = transformers.LlamaForCausalLM(config).eval()
    return model, {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("what", ["@attn_out.1", "model.layers.1.self_attn", "@z.1"])
def test_a_mean_leaves_out_padding(what: str) -> None:
    model, batch = padded_llama()

    def metric(output: Any) -> Tensor:
        logits: Tensor = output.logits[:, -1]
        return logits[:, 7] - logits[:, 9]

    effects = analysis.ablation(model, batch, metric, what, by="mean", progress=False)
    with torch.no_grad():
        output, acts = fh.run(model, **batch, capture=what)
        value = acts[what][0] if isinstance(acts[what], tuple) else acts[what]
        mean = value[batch["attention_mask"].bool()].mean(0)

        def replaced(_module: Any, _args: Any, out: Any) -> Any:
            tensor = out[0] if isinstance(out, tuple) else out
            new = mean.expand_as(tensor).clone()
            return (new, *out[1:]) if isinstance(out, tuple) else new

        moved = metric(fh.run(model, **batch, hooks={what: replaced}).output) - metric(output)
    torch.testing.assert_close(float(effects.values[0]), float(moved.mean()), rtol=1e-3, atol=1e-5)


def test_a_mean_over_places_whose_padding_is_not_known_is_refused() -> None:
    model, batch = padded_llama()
    long = {**batch, "attention_mask": batch["attention_mask"].repeat(1, 2)}
    targets = analysis.targets.Targets(model, "@attn_out.1")
    mask = analysis.calls.ModelCall.of(long).mask
    with pytest.raises(fh.HookTypeError, match=r"\(2, 14\).*which positions are padding"):
        targets.mean("@attn_out.1", torch.ones(2, 7, 32), mask)


@pytest.mark.parametrize("metric", [lambda o: o.logits[:, -1], lambda o: o.logits[0, -1]])
def test_a_metric_of_another_shape_is_refused(metric: Any) -> None:
    model, batch = padded_llama()
    with pytest.raises(fh.HookTypeError, match=r"one number per row, got Tensor of shape"):
        analysis.ablation(model, batch, metric, "@attn_out.1", progress=False)
