"""Memory of a GPU and pinned memory over many steps of batches."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 4
ROWS = 4
STEPS = 60

pytestmark = pytest.mark.cuda


def vector(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


PLANS: dict[str, Callable[[int], fh.Plan]] = {
    "Add": lambda seed: fh.Plan(fh.on("*", fh.Add(vector(seed)))),
    "Add at": lambda seed: fh.Plan(fh.on("*", fh.Add(vector(seed)), at=slice(1, 3))),
    "keep": lambda seed: fh.Plan(fh.on("*", fh.Add(vector(seed))), fh.keep("*")),
    "keep on the host": lambda _seed: fh.Plan(fh.keep("*", device="cpu")),
}


@pytest.mark.parametrize("at_sites", [False, True], ids=["modules", "sites"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_steps_leave_no_memory(
    plan: Callable[[int], fh.Plan], at_sites: bool, pytestconfig: pytest.Config
) -> None:
    """Requests live for three steps, and one in seven has the same plan.

    10,000 steps that keep at sites (`--requests 10000`) are 92 s of CPU on the emulated device.
    """
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).cuda().requires_grad_(requires_grad=False)
    x = torch.ones(ROWS, WIDTH).cuda()
    positions = torch.arange(ROWS)
    sizes: dict[str, Any] = {"max_requests": 2, "max_rows": ROWS, "width": WIDTH}
    sites = fh.rows.sites(model, "*", **sizes) if at_sites else None
    prepared = [plan(seed).prepare(model) for seed in range(7)]

    def serve(number: int) -> None:
        request = prepared[number % 7].open()
        for _ in range(3):
            with torch.no_grad(), fh.batch({request: slice(0, 3)}, positions=positions):
                model(x)
        assert request.error is None
        assert all(act.shape[1] == WIDTH for act in request.acts.values())
        request.close()

    def allocated(requests: int) -> int:
        for number in range(requests):
            serve(number)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    steps = pytestconfig.getoption("--requests") or STEPS
    before = allocated(7)
    assert allocated(steps // 3) <= before
    if sites is not None:
        sites.close()
