"""Quantisation of instrumented models: `prepare` registers observers, `convert` removes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

import ferrohook as fh

# Of torch: that its quantisation is deprecated, as its own calls do.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """A GRUCell, which `convert` leaves as it is, between layers that it swaps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.inp, self.cell, self.out = nn.Linear(4, 4), nn.GRUCell(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.dequant(self.inp(self.quant(x)))))  # type: ignore[no-any-return]


def quantized(way: str, mapping: Any, seen: list[str]) -> tuple[nn.Module, Tensor]:
    model: Any = Net().eval()
    model.qconfig = quantization.get_default_qconfig("x86")
    model.out.qconfig = None
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    if way == "before":
        fh.instrument(model)
        fh.register(model, "cell", lambda *_: seen.append("cell"))
    quantization.prepare(model, inplace=True)
    if way == "after":
        fh.instrument(model)
        fh.register(model, "cell", lambda *_: seen.append("cell"))
    model(x)
    quantization.convert(model, inplace=True, mapping=mapping)
    return model, model(x)


@pytest.mark.parametrize("way", ["before", "after"])
@pytest.mark.parametrize("mapping", [None, {}], ids=["default", "nothing is swapped"])
def test_an_instrumented_model_is_quantised_as_a_plain_one(way: str, mapping: Any) -> None:
    seen: list[str] = []
    plain, expected = quantized("plain", mapping, [])
    model, result = quantized(way, mapping, seen)
    assert torch.equal(result, expected)
    for name, module in plain.named_modules():
        assert type(model.get_submodule(name)) == type(module)  # noqa: E721 (as torch asks)
    assert seen == ["cell", "cell"]  # of each call: the user's hook stays
