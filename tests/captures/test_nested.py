"""Nested tensors, which `nn.TransformerEncoder` makes in eval mode with a padding mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.plans import by_hand

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
WIDTH = 8
LENGTHS = (4, 2, 3)
V = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
INTERVENTIONS = (
    *(fh.Scale(2.0), fh.Zero(), fh.Add(V, 0.5), fh.Add(V[0]), fh.Ablate(V), fh.Replace(V)),
    *(fh.Clamp(V, -0.1, 0.1), fh.Clamp(V, high=0.0), fh.Replace(V[1])),
)
layouts = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)


def components(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, WIDTH, generator=generator) for length in LENGTHS]


def nested(layout: torch.layout, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nested.nested_tensor([it.to(dtype) for it in components()], layout=layout)


class Encoder(nn.TransformerEncoder):
    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, dropout=0.0)
        super().__init__(layer, 2)
        self.requires_grad_(False)


@pytest.mark.parametrize("intervention", INTERVENTIONS, ids=repr)
def test_an_encoder_in_eval_as_in_training(intervention: Any) -> None:
    model, x = Encoder(), torch.randn(3, 4, WIDTH)
    mask = torch.arange(4) >= torch.tensor(LENGTHS)[:, None]
    outputs = []
    for training in (True, False):
        model.train(training)
        with torch.no_grad(), fh.register(model, "layers.0", intervention):
            outputs.append(model(x, src_key_padding_mask=mask)[~mask])
    assert torch.allclose(*outputs, atol=1e-5)


@layouts
@pytest.mark.parametrize("intervention", INTERVENTIONS, ids=repr)
def test_interventions_change_each_component(layout: torch.layout, intervention: Any) -> None:
    model, x = nn.Sequential(nn.Identity()), nested(layout)
    with fh.register(model, "0", intervention):
        y = model(x)
    assert y.layout == layout
    for ours, component in zip(y.unbind(), x.unbind(), strict=True):
        assert torch.allclose(ours, by_hand(intervention, component), atol=1e-6)
    if layout == torch.jagged:
        assert (x + y).unbind()[0].shape == (LENGTHS[0], WIDTH)  # of the same sequences


@layouts
def test_gradients_pass(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with fh.register(model, "0", fh.Ablate(V)):
        y = model(nested(layout))
        torch.cat(y.unbind()).sum().backward()
    ours, model[0].weight.grad = model[0].weight.grad, None
    by_hand(fh.Ablate(V), model(torch.cat(components()))).sum().backward()
    assert torch.allclose(ours, model[0].weight.grad, atol=1e-5)


@layouts
def test_what_does_not_fit_is_named(layout: torch.layout) -> None:
    model, x = nn.Sequential(nn.Identity()), nested(layout)
    for intervention, message in (
        (fh.Add(torch.ones(WIDTH + 1)), "width"),
        (fh.Replace(torch.ones(2, WIDTH)), "vector with rows does not fit a nested tensor"),
        (fh.Add(V.to(torch.complex64)), "imaginary"),
    ):
        with (
            fh.register(model, "0", intervention),
            pytest.raises(fh.HookTypeError, match=message),
        ):
            model(x)


def captured(layout: torch.layout, **options: Any) -> fh.ActivationCache[Any]:
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    with fh.capture(model, ["0", "1"], **options) as acts:
        model(nested(layout))
    return acts


@layouts
def test_tables_have_the_values_of_all_components(layout: torch.layout) -> None:
    acts = captured(layout, copy="clone")
    assert "(3, None, 8)" in str(acts)
    assert "(3, None, 8)" in acts._repr_html_()
    pytest.importorskip("pandas")
    frame, values = acts.to_pandas(), torch.cat(components())
    assert frame["shape"][0] == (3, None, WIDTH)
    assert frame["bytes"][0] == values.nbytes
    assert frame["mean"][0] == pytest.approx(float(values.mean()), abs=1e-6)
    assert frame["norm"][0] == pytest.approx(float(values.norm(dim=-1).mean()), rel=1e-6)


@layouts
@pytest.mark.parametrize(
    "index", [(..., slice(0, 2)), slice(1, 3), (slice(None), slice(1, 2)), (slice(None), -1), ...]
)
def test_slices(layout: torch.layout, index: Any) -> None:
    if layout == torch.jagged and index == (slice(None), -1):
        pytest.skip("as_nested_tensor makes none of one dimension in this layout")
    taken = captured(layout, slice=index)["0"].unbind()
    steps = index if isinstance(index, tuple) else (index,)
    inside = (slice(None), *steps[1:]) if steps[0] is ... else steps
    expected = components()
    if inside[0] is ... or steps[0] is ...:
        expected = [it[(..., *steps[1:])] for it in expected]
    else:
        expected = [it[tuple(inside[1:])] for it in expected[inside[0]]]
    assert all(torch.equal(a, b) for a, b in zip(taken, expected, strict=True))


@layouts
def test_a_slice_of_one_sequence_is_dense(layout: torch.layout) -> None:
    assert torch.equal(captured(layout, slice=1)["0"], components()[1])
    assert torch.equal(captured(layout, slice=(2, 0, 3))["0"], components()[2][0, 3])
    with pytest.raises(fh.HookTypeError, match=r"slice of a nested tensor"):
        captured(layout, slice=[0, 1])


@layouts
def test_a_stack_is_padded_with_nan(layout: torch.layout) -> None:
    stacked = captured(layout, copy="clone").stack()
    assert stacked.shape == (2, 3, 4, WIDTH)
    for sequence, component in enumerate(components()):
        assert torch.equal(stacked[0, sequence, : len(component)], component)
        assert torch.equal(stacked[1, sequence, : len(component)], component.relu())
        assert stacked[:, sequence, len(component) :].isnan().all()


@layouts
def test_files(layout: torch.layout, tmp_path: Any) -> None:
    acts = captured(layout, copy="clone")
    acts.save(tmp_path / "nested.safetensors")
    again = fh.ActivationCache.load(tmp_path / "nested.safetensors")["0"]
    assert again.layout == layout
    assert all(torch.equal(a, b) for a, b in zip(again.unbind(), components(), strict=True))


@layouts
def test_a_budget_counts_the_bytes(layout: torch.layout) -> None:
    size = torch.cat(components()).nbytes
    assert captured(layout, max_bytes=2 * size).nbytes == 2 * size
    with pytest.raises(fh.errors.CaptureBudgetError):
        captured(layout, max_bytes=2 * size - 1)


@layouts
def test_backward_hooks(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    x, seen = nested(layout).requires_grad_(), []
    with fh.register(model, "0", lambda _m, gi, go: seen.append((gi, go)), phase="backward"):
        torch.cat(model(x).unbind()).sum().backward()
    ((of_input,), (of_output,)) = seen[0]
    dense = torch.cat(components()).requires_grad_()
    model(dense).sum().backward()
    assert torch.allclose(torch.cat(of_input.unbind()), dense.grad, atol=1e-5)
    assert torch.equal(torch.cat(of_output.unbind()), (model[0](dense) > 0).float())


@layouts
def test_positions_and_rows_are_not_guessed(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Identity())
    plan = fh.Plan(fh.on("0", fh.Scale(2.0)))
    with plan.prepare(model) as prepared:
        request = prepared.open()
        with fh.batch({request: slice(0, 2)}, size=3):
            y = model(nested(layout))
        assert isinstance(request.error, fh.HookError)
        assert "nested" in str(request.error)
    assert all(torch.equal(a, b) for a, b in zip(y.unbind(), components(), strict=True))
