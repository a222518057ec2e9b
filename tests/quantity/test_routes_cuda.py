"""Experts that plans choose on a GPU, against the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.modules import Experts

pytestmark = pytest.mark.cuda
IDS = torch.arange(10).view(2, 5)


class Router(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        best = logits.softmax(-1).topk(2, -1)
        return logits, best.values, best.indices


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(8, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 8)
        _, weights, ids = self.router(flat)
        mixed: Tensor = self.experts(flat, ids, weights)
        return x + mixed.view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_route_on_a_gpu_gives_what_it_gives_on_the_cpu() -> None:
    made = Model().requires_grad_(requires_grad=False)
    on_gpu = copy.deepcopy(made).cuda()
    rows = torch.tensor([[3, 0], [-1, -1], [1, 2]])
    plan = fh.Plan(
        fh.on("@experts.1", fh.Route(rows), at=slice(1, None)),
        fh.on("@experts.0", fh.Route([0, 3], [0.25, 0.75]), at=2),
        fh.keep(["@experts.*", "@expert_weights.*"]),
    )
    with torch.no_grad():
        expected, acts = fh.run(made, IDS, plan=plan)
        output, found = fh.run(on_gpu, IDS.cuda(), plan=plan)
        plain = made(IDS)
    torch.testing.assert_close(output.cpu(), expected)
    assert not torch.equal(expected, plain)
    for name, value in acts.items():
        torch.testing.assert_close(found[name].cpu(), value)
        assert found[name].is_cuda
