"""Models in half precision: the same places as in float32, and no proof by rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.quantity.anatomy import subjects
from ferrohook.quantity.anatomy.equations import differ, tolerance
from support.zoo import make, token_ids

IDS = token_ids()
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES])
@pytest.mark.parametrize("kind", ["gpt2", "olmo2", "deepseek_v2", "granite"])
def test_places_are_those_of_float32(kind: str, dtype: torch.dtype) -> None:
    if kind == "deepseek_v2" and dtype == torch.float64:
        pytest.skip("transformers computes its experts in float32 at most")
    whole = make(kind)
    half = copy.deepcopy(whole).to(dtype)
    before = {name: it.clone() for name, it in half.state_dict().items()}
    found = fh.quantities(half)
    expected = fh.quantities(whole)
    assert {name: (it.place.split(" * ")[-1], it.writable) for name, it in found.items()} == {
        name: (it.place.split(" * ")[-1], it.writable) for name, it in expected.items()
    }
    for name, tensor in half.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("copied", [True, False])
def test_large_activations_hide_no_norm_in_float16(
    copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not copied:  # too large for a copy in float32
        monkeypatch.setattr(subjects, "LARGEST_COPY", 0)
    model = make("llama", initializer_range=0.3)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] = 300
    found = {name: it.path for name, it in fh.quantities(model).items()}
    assert "@final_norm" in found
    half = copy.deepcopy(model).half()
    assert {name: it.path for name, it in fh.quantities(half).items()} == found


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "granite", "llama", "olmo2", "phi"])
@pytest.mark.parametrize("size", [300.0, 3000.0])
def test_massive_activations_hide_no_place(kind: str, dtype: torch.dtype, size: float) -> None:
    """One channel of a few tokens is far larger than the rest, as in models that are trained."""
    expected = {name: it.place for name, it in fh.quantities(make(kind)).items()}
    model = make(kind)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[: len(weight) // 3, 3] = size
    found = fh.quantities(model.to(dtype))
    assert {name: it.place for name, it in found.items()} == expected


@pytest.mark.parametrize("large", [False, True])
def test_a_router_is_proved_at_the_gate_or_nowhere(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    if large:  # too large for a copy: looked at in its own precision
        monkeypatch.setattr(subjects, "LARGEST_COPY", 0)
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval().bfloat16()
    found = fh.quantities(model)
    routers = {name: it for name, it in found.items() if name.startswith("@router")}
    assert all(it.path.endswith("gate") for it in routers.values())
    assert large or len(routers) == 3


class Watched(nn.Module):
    """Block whose contribution also goes to a module that nothing takes the result of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp, self.monitor = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Identity(),
        )

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.mlp(self.norm(x))
        self.monitor(added)
        return x + added


class Stack(nn.Module):
    def __init__(self, beside: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(Watched(32) for _ in range(3))
        self.side, self.dtype = nn.Identity(), beside

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        self.side(x.to(self.dtype))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beside", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("large", [False, True])
def test_a_quantity_is_writable_if_writing_changes_what_the_model_returns(
    own: torch.dtype, beside: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(subjects, "LARGEST_COPY", 0)
    torch.manual_seed(0)
    model = Stack(beside).to(own).eval()
    table = fh.quantities(model)
    plain = model(IDS)
    names = [name for name in table if table[name].writable]
    assert any(name.startswith("@resid_post") for name in names)
    for name in names:
        changed = fh.run(model, IDS, hooks={name: lambda _m, _a, value: value * 0 + 5}).output
        assert not torch.equal(changed, plain), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
def test_the_tolerance_is_far_from_both_rounding_and_noise(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in "ab")
    x, weight = one.to(dtype), other.to(dtype)
    product = x @ weight
    exact = (x.double() @ weight.double()).to(dtype)
    limit = tolerance(product)
    assert differ(product, exact) < limit
    noisy = ((x.double() + 0.5 * torch.randn_like(one)) @ weight.double()).to(dtype)
    assert differ(noisy, exact) > 4 * limit
