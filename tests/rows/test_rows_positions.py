"""Steps of an engine: positions of rows, for `at=` and for captures over several batches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ferrohook as fh
from support.plans import by_hand

pytestmark = pytest.mark.filterwarnings("ignore::ferrohook.NeverFiredWarning")

WIDTH = 4
LAYERS = ("0", "1", "2")
LENGTH = 9
"""Most tokens of a request."""

ATS: dict[str, tuple[Any, Any]] = {
    # The positions as a plan has them, and as a function of (position, length of the prompt).
    "all": (None, lambda p, n: True),
    "prompt": ("prompt", lambda p, n: p < n),
    "last_prompt": ("last_prompt", lambda p, n: p == n - 1),
    "generated": ("generated", lambda p, n: p >= n),
    "first": (0, lambda p, n: p == 0),
    "int": (4, lambda p, n: p == 4),
    "last but one": (-2, lambda p, n: p == n - 2),
    "slice": (slice(1, 4), lambda p, n: 1 <= p < 4),
    "from the end": (slice(-2, None), lambda p, n: p >= max(n - 2, 0)),
    "steps": (slice(None, None, 2), lambda p, n: p % 2 == 0),
    "function": (lambda positions: positions % 3 == 1, lambda p, n: p % 3 == 1),
}


class Gain(nn.Module):
    """Elementwise, so that a row's result does not depend on other rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5 + 0.25


@dataclass(frozen=True)
class Change:
    layer: str
    hook: Any
    at: str


@dataclass
class Served:
    """A request: its plan, its tokens so far, and its captures by hand."""

    prompt: int
    total: int
    changes: tuple[Change, ...]
    keeps: tuple[tuple[str, str], ...]
    """Layers and positions captured."""
    done: int = 0
    kept: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    request: Any = None

    def plan(self) -> fh.Plan:
        changes = [fh.on(each.layer, each.hook, at=ATS[each.at][0]) for each in self.changes]
        keeps = [
            fh.keep(layer, at=ATS[at][0], label=f"k{number}", copy="clone")
            for number, (layer, at) in enumerate(self.keeps)
        ]
        return fh.Plan(*changes, *keeps)

    def by_hand(self, x: Tensor, position: int) -> Tensor:
        """Runs one token through the layers; records what is kept."""
        for layer in LAYERS:
            x = Gain()(x)
            for change in self.changes:
                if change.layer == layer and ATS[change.at][1](position, self.prompt):
                    x = by_hand(change.hook, x)
            for number, (kept, at) in enumerate(self.keeps):
                if kept == layer and ATS[at][1](position, self.prompt):
                    self.kept.setdefault(f"k{number}:{layer}", {})[position] = x
        return x

    def chunk(self, dice: random.Random) -> range:
        """Chooses the positions of the next step: the following ones, or some again."""
        again = self.done > 0 and dice.random() < 0.2  # preempted, say
        start = dice.randrange(self.done) if again else self.done
        count = dice.randint(1, 3) if start < self.prompt else 1
        end = min(start + count, self.total)
        self.done = max(end, start)
        return range(start, end)

    def check(self) -> None:
        assert self.request.error is None
        assert set(self.request.acts) == set(self.kept)
        for name, values in self.kept.items():
            positions = sorted(values)
            expected = torch.stack([values[position] for position in positions])
            assert torch.equal(self.request.acts[name], expected)
            assert self.request.positions(name) == positions


vectors = st.integers(0, 7).map(
    lambda seed: torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
)
hooks = st.one_of(
    vectors.map(fh.Add), vectors.map(fh.Ablate), vectors.map(fh.Replace), st.just(fh.Scale(-2.0))
)
some_at = st.sampled_from([*ATS])
served = st.builds(
    Served,
    prompt=st.integers(1, 5),
    total=st.integers(5, LENGTH),
    changes=st.lists(st.builds(Change, st.sampled_from(LAYERS), hooks, some_at), max_size=3).map(
        tuple
    ),
    keeps=st.lists(st.tuples(st.sampled_from(LAYERS), some_at), max_size=3).map(tuple),
)


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=[*HealthCheck])


class Net(nn.Sequential):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def model() -> Net:
    return Net(*(Gain() for _ in LAYERS))


@few(80)
@given(
    requests=st.lists(served, min_size=1, max_size=4),
    dim=st.sampled_from((0, 1)),
    seed=st.integers(0, 999),
)
def test_steps_of_tokens_without_padding(requests: list[Served], dim: int, seed: int) -> None:
    dice, net = random.Random(seed), model()  # noqa: S311 (chooses tokens)
    prepared = [each.plan().prepare(net) for each in requests]
    for each, plan in zip(requests, prepared, strict=True):
        each.request = plan.open()
    for _ in range(8):
        chunks = [
            (each, position)
            for each in requests
            if dice.random() < 0.7 and each.done < each.total
            for position in each.chunk(dice)
        ]
        tokens: list[tuple[Served | None, int]] = [*chunks, *[(None, -1)] * dice.randint(0, 2)]
        if dice.random() < 0.5:
            dice.shuffle(tokens)
        if not chunks:
            continue
        rows: dict[Any, list[int]] = {}
        for row, (owner, _) in enumerate(tokens):
            if owner is not None:
                rows.setdefault(owner.request, []).append(row)
        x = torch.randn(len(tokens), WIDTH)
        lengths = {each.request: each.prompt for each in requests if each.request in rows}
        positions = torch.tensor([position for _, position in tokens])
        with fh.batch(rows, dim=dim, positions=positions, lengths=lengths):
            y = net(x if dim == 0 else x[None])
        expected = [
            Served(1, 1, (), ()).by_hand(x[row], 0) if owner is None else owner.by_hand(x[row], p)
            for row, (owner, p) in enumerate(tokens)
        ]
        assert torch.equal(y if dim == 0 else y[0], torch.stack(expected))
    for each in requests:
        each.check()


@few(60)
@given(
    requests=st.lists(served, min_size=1, max_size=4),
    left=st.booleans(),
    seed=st.integers(0, 999),
)
def test_steps_of_a_padded_batch(requests: list[Served], left: bool, seed: int) -> None:
    dice, net = random.Random(seed), model()  # noqa: S311 (chooses tokens)
    prepared = [each.plan().prepare(net) for each in requests]
    for each, plan in zip(requests, prepared, strict=True):
        each.request = plan.open()
    lengths = {each.request: each.prompt for each in requests}
    for _ in range(6):
        chunks = [each.chunk(dice) if each.done < each.total else range(0) for each in requests]
        columns = max(map(len, chunks)) + dice.randint(0, 1)
        if not any(chunks):
            break
        positions = torch.full((len(requests) + 1, columns), -1)  # the last row is nobody's
        for row, chunk in enumerate(chunks):
            start = columns - len(chunk) if left else 0
            positions[row, start : start + len(chunk)] = torch.tensor([*chunk])
        x = torch.randn(len(requests) + 1, columns, WIDTH)
        rows = {each.request: row for row, each in enumerate(requests)}
        with fh.batch(rows, positions=positions, lengths=lengths):
            y = net(x)
        nobody = Served(1, 1, (), ())
        for row, each in enumerate([*requests, nobody]):
            for column, position in enumerate(positions[row].tolist()):
                if position >= 0 or each is nobody:
                    expected = each.by_hand(x[row, column], position)
                    assert torch.equal(y[row, column], expected)
    for each in requests:
        each.check()
