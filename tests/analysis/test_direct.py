"""Direct logit attribution equals the norm's formula and the columns of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook import analysis
from support.analysis import HEADS, POSITIONS, WIDTH, WORDS, Net, cases, difference, output_of

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS = {
    "net": (["embed", "**.mix_", "**.mlp"], "norm"),
    "llama": (["model.embed_tokens", "**.self_attn", "**.mlp"], "model.norm"),
    "gpt2": (["transformer.w[pt]e", "**.attn", "**.mlp"], "transformer.ln_f"),
}
PROJECTIONS = {"llama": "**.o_proj", "gpt2": "**.attn.c_proj"}


def frozen(norm: Any, stream: Tensor) -> Callable[[Tensor], Tensor]:
    """The norm by its formula, with the scale of a stream."""
    if isinstance(norm, nn.LayerNorm):
        deviation = (stream.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        return lambda part: (part - part.mean(-1, keepdim=True)) / deviation * norm.weight
    size = (stream.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    return lambda part: part / size * norm.weight


def direction(model: Any) -> Tensor:
    head = model.head if isinstance(model, Net) else model.lm_head
    weight: Tensor = head.weight.detach()
    return weight[3] - weight[5]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_parts_of_the_stream_are_read_by_the_frozen_norm(kind: str) -> None:
    case = cases(kind)
    parts, norm = PARTS[kind]
    found = analysis.direct_logit_attribution(
        case.model, case.clean, case.metric, parts, norm=norm, over="position"
    )
    module = case.model.get_submodule(norm)
    streams = []
    handle = module.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    with torch.no_grad():
        logits = case.model(case.clean).logits
    handle.remove()
    linear = frozen(module, streams[0])
    for name in found.names:
        part = output_of(case.model.get_submodule(name), case.model, case.clean)
        expected = (linear(part.expand_as(streams[0]))[:, -1] @ direction(case.model)).mean()
        torch.testing.assert_close(found[name][-1].float(), expected, rtol=1e-3, atol=1e-4)
        assert not found[name][:-1].any()  # the metric reads the last position
    assert found.scores["metric"] == pytest.approx(float(difference(logits).mean()), abs=1e-5)
    bias = module.bias @ direction(case.model) if kind == "gpt2" else torch.tensor(0.0)
    assert found.scores["rest"] == pytest.approx(float(bias.detach()), abs=1e-3)
    total = analysis.direct_logit_attribution(case.model, case.clean, case.metric, parts, norm=norm)
    torch.testing.assert_close(total.values, found.values.sum(1))


def test_heads_are_columns_of_the_projection(kind: str) -> None:
    case = cases(kind)
    norm = case.model.get_submodule(PARTS[kind][1])
    found = analysis.direct_logit_attribution(
        case.model,
        case.clean,
        case.metric,
        PROJECTIONS[kind],
        norm=PARTS[kind][1],
        over=("position", "head"),
        heads=HEADS,
    )
    assert found.values.shape == (2, POSITIONS, HEADS)
    streams, zs = [], []
    projection: Any = case.model.get_submodule(found.names[1])
    handles = [
        norm.register_forward_pre_hook(lambda _, args: streams.append(args[0])),
        projection.register_forward_pre_hook(lambda _, args: zs.append(args[0])),
    ]
    with torch.no_grad():
        case.model(case.clean)
    for handle in handles:
        handle.remove()
    weight = projection.weight.detach()
    weight = weight if kind == "gpt2" else weight.T  # (width of z, width)
    for head in range(HEADS):
        columns = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        part = zs[0][..., columns] @ weight[columns]
        expected = (frozen(norm, streams[0])(part)[:, -1] @ direction(case.model)).mean()
        own = found.values[1, -1, head].float()
        torch.testing.assert_close(own, expected.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("over", ["position", "head"])
def test_batches_add_up_to_all_texts(kind: str, over: Any) -> None:
    case = cases(kind)
    ids = torch.cat([case.clean, case.clean.flip(1)])[:3]
    places = PROJECTIONS[kind] if over == "head" else PARTS[kind][0]
    whole, batched = (
        analysis.direct_logit_attribution(
            case.model,
            ids,
            case.metric,
            places,
            norm=PARTS[kind][1],
            over=over,
            heads=HEADS if over == "head" else None,
            batch_size=size,
        )
        for size in (None, 2)
    )
    torch.testing.assert_close(batched.values, whole.values, rtol=1e-4, atol=1e-6)
    assert batched.names == whole.names
    assert batched.scores == pytest.approx(whole.scores, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("width", [WIDTH, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_the_norm_is_told_by_calling_it(kind: Any, affine: bool, dtype: Any, width: int) -> None:
    torch.manual_seed(0)
    norm = kind(width, elementwise_affine=affine, dtype=dtype, eps=1e-5)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    model = nn.Sequential(nn.Embedding(WORDS, width, dtype=dtype), norm)
    model.append(nn.Linear(width, WORDS, bias=False, dtype=dtype))
    ids = torch.randint(WORDS, (2, POSITIONS))
    found = analysis.direct_logit_attribution(model, ids, difference, "0", norm="1")
    with torch.no_grad():
        weight = model[2].weight.double()[[3, 5]]
        bias = getattr(norm, "bias", None)
        bias = torch.zeros(width) if bias is None else bias
        expected = float((weight[0] - weight[1]) @ bias.double())
    tolerance = 20 * torch.finfo(dtype).eps * float(weight.norm() * 4)
    assert found.scores["rest"] == pytest.approx(expected, abs=tolerance)


def test_what_is_no_norm_is_refused(net: Net) -> None:
    ids = torch.randint(WORDS, (2, POSITIONS))
    for other in (nn.Tanh(), nn.Softmax(-1), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())):
        model = Net(other)
        with pytest.raises(
            fh.HookError, match=r"'norm' .* is neither a layer norm nor an RMS norm"
        ):
            analysis.direct_logit_attribution(model, ids, difference, "embed", norm="norm")


def test_places_that_are_not_in_the_stream_are_refused(net: Net) -> None:
    ids = torch.randint(WORDS, (2, POSITIONS))
    with pytest.raises(fh.HookTypeError, match=r"'head' has shape \(2, 5, 32\), but the stream"):
        analysis.direct_logit_attribution(net, ids, difference, "head", norm="norm")
    with pytest.raises(fh.HookError, match=r"'blocks\.0\.mlp' is not linear in its heads"):
        analysis.direct_logit_attribution(
            net, ids, difference, "blocks.0.mlp", norm="norm", over="head", heads=2
        )
    with pytest.raises(fh.HookTypeError, match=r"over='head' needs the number of heads"):
        analysis.direct_logit_attribution(net, ids, difference, "embed", norm="norm", over="head")
    with pytest.raises(
        fh.SelectionError, match=r"norm must select one module, 'blocks\.\*' matches 3"
    ):
        analysis.direct_logit_attribution(net, ids, difference, "embed", norm="blocks.*")


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_position_of_zeros_has_no_scale(kind: Any) -> None:
    """Padding may be zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH, padding_idx=0), kind(WIDTH))
    model.append(nn.Linear(WIDTH, WORDS, bias=False))
    ids = torch.randint(1, WORDS, (2, POSITIONS))
    ids[0, 0] = 0
    found = analysis.direct_logit_attribution(model, ids, difference, "0", norm="1")
    with torch.no_grad():
        expected = float(difference(model(ids)).mean())
    whole = float(found.values.sum()) + found.scores["rest"]
    assert whole == pytest.approx(expected, rel=1e-4, abs=1e-5)
