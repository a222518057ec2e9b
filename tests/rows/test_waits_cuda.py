"""Waits of the host for a GPU, in warm steps of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.gpu import waits
from support.made_engine import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH = 8
LAYERS = 3
LENGTH = 5

pytestmark = pytest.mark.cuda


def vector(seed: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def halve(_module: object, _args: object, output: Tensor) -> Tensor:
    return output / 2


# --- Steps of an engine --------------------------------------------------------------------------


def make_model() -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    return model.requires_grad_(requires_grad=False).cuda()


class Engine:
    """Steps in which requests have rows by turns: 1, 2 or 3."""

    def __init__(self) -> None:
        self.model = make_model()
        self.worker = Worker(self.model)
        self.positions: dict[str, int] = {}
        self.steps = 0

    def admit(self, plan: fh.Plan) -> str:
        request = str(len(self.positions))
        self.worker.take(request, plan)
        self.positions[request] = 0
        return request

    def step(self, requests: Sequence[str]) -> None:
        rows = []
        for number, request in enumerate(requests):
            count = 1 + (self.steps + number) % 3
            rows.append((request, self.positions[request], count))
            self.positions[request] += count
        self.steps += 1
        total = sum(count for *_, count in rows)
        x = torch.randn(total, WIDTH).pin_memory().to("cuda", non_blocking=True)
        with self.worker.step(*rows):
            self.model(x)
        assert self.worker.failures() == {}


ENTRIES: dict[str, Callable[[int], Any]] = {
    "Add": lambda seed: fh.on("*", fh.Add(vector(seed))),
    "Add at": lambda seed: fh.on("*", fh.Add(vector(seed)), at=slice(3, 12)),
    "Ablate": lambda seed: fh.on("*", fh.Ablate(vector(seed))),
    "Clamp": lambda seed: fh.on("*", fh.Clamp(vector(seed), -1.0, 1.0)),
    "Scale": lambda seed: fh.on("*", fh.Scale(1.0 + seed)),
    "vector with rows": lambda seed: fh.on("*", fh.Add(vector(seed)[None])),
    "vector with rows at": lambda seed: fh.on("*", fh.Add(vector(seed)[None]), at="generated"),
    "Python": lambda _seed: fh.on("*", halve),
    "Python at": lambda _seed: fh.on("*", halve, at="generated"),
    "keep": lambda _seed: fh.keep("*"),
    "keep at": lambda _seed: fh.keep("*", at="generated"),
    "keep on the CPU": lambda _seed: fh.keep("*", device="cpu", max_bytes=1 << 20),
    "keep cast at": lambda _seed: fh.keep("*", dtype=torch.bfloat16, at="generated"),
    "keep within a budget at": lambda _seed: fh.keep("*", max_bytes=1 << 20, at="generated"),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_step_waits_for_nothing(entry: Callable[[int], Any]) -> None:
    """Steps have new rows of known members, or a new member."""
    engine = Engine()
    known = [engine.admit(fh.Plan(entry(seed))) for seed in range(3)]
    for _ in range(3):
        engine.step(known)
    with waits() as found:
        for _ in range(4):
            engine.step(known)
        engine.step([*known, engine.admit(fh.Plan(entry(3)))])
    assert found == []


# --- Padded batches ------------------------------------------------------------------------------


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = make_model()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None
        return self.layers(self.embed(input_ids))


PADDED: dict[str, Callable[[int], Any]] = {
    "Add at": lambda seed: fh.on("layers.*", fh.Add(vector(seed)), at="last_prompt"),
    "Python at": lambda _seed: fh.on("layers.*", halve, at=slice(1, 3)),
    "keep at": lambda _seed: fh.keep("layers.*", at="last_prompt"),
    "keep cast at": lambda _seed: fh.keep("layers.*", dtype=torch.bfloat16, at=slice(1, 3)),
}


@pytest.mark.parametrize("generates", [False, True], ids=["positions", "generating"])
@pytest.mark.parametrize("entry", PADDED.values(), ids=PADDED)
def test_a_padded_forward_waits_once(entry: Callable[[int], Any], generates: bool) -> None:
    """The wait is for the positions, which are on the GPU."""
    model = Text().cuda()
    ids = torch.randint(16, (2, LENGTH)).cuda()
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).cuda()
    positions = torch.tensor([[-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]]).cuda()
    prepared = [fh.Plan(entry(seed)).prepare(model) for seed in range(2)]

    def step() -> None:
        first, second = (each.open() for each in prepared)
        if generates:
            batch = fh.rows.generating([first, second])
        else:
            lengths = {first: 4, second: 5}
            batch = fh.batch({first: 0, second: 1}, positions=positions, lengths=lengths)
        with torch.no_grad(), batch:
            model(ids, attention_mask=mask)
        assert [first.error, second.error] == [None, None]

    step()
    with waits() as found:
        step()
    assert len(found) == 1


@pytest.mark.parametrize(
    ("entry", "most"),
    [
        (lambda: fh.on("layers.*", fh.Add(vector(0)), at="last_prompt"), 0),
        (lambda: fh.keep("layers.*", at="last_prompt"), 1),  # for the number of its rows
    ],
    ids=["Add at", "keep at"],
)
def test_a_request_alone_waits_at_most_once(entry: Callable[[], Any], most: int) -> None:
    model = Text().cuda()
    ids, mask = torch.randint(16, (2, LENGTH)).cuda(), torch.ones(2, LENGTH).cuda()
    prepared = fh.Plan(entry()).prepare(model)

    def step() -> None:
        with torch.no_grad(), prepared.open():
            model(ids, attention_mask=mask)

    step()
    with waits() as found:
        step()
    assert len(found) == most
