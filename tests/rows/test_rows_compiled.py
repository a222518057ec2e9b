"""Random batches of one compiled model whose sites were laid before, against a loop by hand."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import ferrohook as fh
from support.amounts import amount
from support.compiling import compiled
from support.row_models import WIDTH, RowModel, pick
from support.rows import Keep, Loop, Member, On, assert_close
from support.threads import in_threads

pytestmark = pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")

SITES = ("layers.0", "layers.1", "layers.2")
ROWS = 8
PLANS = 6
THREADS = 4


class Layers(RowModel):
    parts: ClassVar = dict.fromkeys(SITES, (None,))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in SITES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def entries(seed: int) -> tuple[On | Keep, ...]:
    """Entries of a plan that sites serve."""
    dice = random.Random(seed)  # noqa: S311 (chooses entries)
    generator = torch.Generator().manual_seed(seed)
    made: list[On | Keep] = []
    for name in SITES:
        for _ in range(dice.choice((0, 1, 1, 2))):
            vector = torch.randn(WIDTH, generator=generator)
            made.append(On(name, fh.Add(vector, dice.choice((1.0, -2.0))), "forward"))
        if dice.random() < 0.5:
            made.append(Keep(name, "kept"))
    return tuple(made)


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=[*HealthCheck])


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, tuple[int, ...]]]:
    """Numbers of plans and rows of each member."""
    order = draw(st.permutations(range(ROWS)))
    count = draw(st.integers(0, 4))
    cuts = sorted(draw(st.sets(st.integers(0, ROWS), min_size=count + 1, max_size=count + 1)))
    numbers = draw(st.lists(st.integers(0, PLANS - 1), min_size=count, max_size=count))
    return [
        (number, tuple(order[start:end]))
        for number, start, end in zip(numbers, cuts, cuts[1:], strict=False)
    ]


class Compiled:
    """A compiled model with sites, and plans prepared for it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Layers().double().requires_grad_(False)
        self.plain = copy.deepcopy(self.model)
        self.sites = fh.rows.sites(self.model, SITES, max_requests=4, max_rows=ROWS)
        self.backend = CompileCounter()
        self.call: Any = torch.compile(self.model, backend=self.backend, fullgraph=True)
        self.entries = [entries(seed) for seed in range(PLANS)]
        self.prepared = [
            fh.Plan(
                *(
                    fh.on(each.what, each.hook)
                    if isinstance(each, On)
                    else fh.keep(each.what, label=each.label)
                    for each in some
                )
            ).prepare(self.model)
            for some in self.entries
        ]

    def check(self, drawn: list[tuple[int, tuple[int, ...]]], x: Tensor) -> None:
        """Runs a batch, and compares it with the loop by hand."""
        if not drawn:
            torch.testing.assert_close(self.call(x), self.plain(x), rtol=0, atol=1e-12)
            return
        opened = [self.prepared[number].open() for number, _ in drawn]
        rows = {request: list(own) for request, (_, own) in zip(opened, drawn, strict=True)}
        with fh.batch(rows, size=ROWS):
            y = self.call(x)
        members = [Member(own, None, self.entries[number]) for number, own in drawn]
        by_hand = copy.deepcopy(self.plain)
        Loop(by_hand, members, ROWS)
        assert_close(y, by_hand(x), relative=1e-12)
        for request, member in zip(opened, members, strict=True):
            assert request.error is None
            assert_close(dict(request.acts), member.acts, relative=1e-12)
            request.close()

    def nobodys(self, drawn: list[tuple[int, tuple[int, ...]]], x: Tensor) -> None:
        """Compares the rows without a member with a call in no batch, bit for bit."""
        plain = self.call(x)
        opened = {self.prepared[number].open(): list(own) for number, own in drawn}
        with fh.batch(opened, size=ROWS):
            y = self.call(x)
        others = [row for row in range(ROWS) if all(row not in own for _, own in drawn)]
        assert torch.equal(pick(y, 0, others), pick(plain, 0, others))


@compiled
@few(amount(7, whole=15))
@given(program=st.lists(batches(), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_batches_of_a_compiled_model_are_a_loop_by_hand(program: Any, seed: int) -> None:
    torch._dynamo.reset()
    case = Compiled()
    generator = torch.Generator().manual_seed(seed)
    with case.sites:
        for drawn in program:
            x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
            case.check(drawn, x)
            if drawn:
                case.nobodys(drawn, x)
        assert case.backend.frame_count == 1


@compiled
@pytest.mark.usefixtures("switch_often")
@pytest.mark.timeout(3_000)
def test_threads_share_a_compiled_model(request: pytest.FixtureRequest) -> None:
    case = Compiled()
    total = request.config.getoption("requests") or 4_000
    turn = threading.Lock()  # sites serve one batch at a time
    case.check([], torch.zeros(ROWS, WIDTH, dtype=torch.float64))

    def by_hand(drawn: list[tuple[int, tuple[int, ...]]], x: Tensor) -> Tensor:
        """Steers the rows of a copy: a vector for each site."""
        for site, layer in zip(SITES, case.plain.layers, strict=True):
            y = layer(x)
            for number, own in drawn:
                for each in case.entries[number]:
                    if isinstance(each, On) and each.what == site:
                        vector, scale = each.hook.values
                        y[list(own)] += vector * scale
            x = x + y.tanh()
        return x

    def work(thread: int) -> int:
        dice = random.Random(thread)  # noqa: S311 (chooses plans and rows)
        wrong = done = 0
        while done < total // 10 // THREADS:
            order = dice.sample(range(ROWS), ROWS)
            count = dice.randint(1, 4)
            drawn = [
                (dice.randrange(PLANS), tuple(order[2 * place : 2 * place + 2]))
                for place in range(count)
            ]
            x = torch.full((ROWS, WIDTH), float(thread), dtype=torch.float64)
            opened = {case.prepared[number].open(): list(own) for number, own in drawn}
            with turn, fh.batch(opened, size=ROWS):
                y = case.call(x)
            wrong += not torch.allclose(y, by_hand(drawn, x), rtol=0, atol=1e-9)
            wrong += sum(each.error is not None for each in opened)
            done += count
        return wrong

    with case.sites:
        assert in_threads(THREADS, work) == [0] * THREADS
        assert case.backend.frame_count == 1
