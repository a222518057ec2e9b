"""Gates of the members of a batch, read and decided as one: equal to each member alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.plans import Unit

WIDTH = 8
TEXTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
LENGTHS = [3, 2, 4]
"""Tokens of the prompts."""


class Stack(nn.Module):
    """Layers without attention: each token is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.index: Tensor | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        x: Tensor = self.embed(input_ids)
        if self.index is not None:
            x = x[self.index]
        for layer in self.layers:
            x = x + layer(x)
        return x


def stack(dtype: torch.dtype = torch.float32) -> Stack:
    torch.manual_seed(0)
    return Stack().to(dtype)


class Counted(fh.Intervention):
    """Adds a vector, and counts its calls."""

    vector_field = "vector"
    number_fields = ()
    shapes: ClassVar[list[tuple[int, ...]]] = []

    @staticmethod
    def formula(x: Tensor, vector: Tensor) -> Tensor:
        Counted.shapes.append(tuple(x.shape))
        return x + vector


def alone(model: nn.Module, plans: list[fh.Plan]) -> tuple[list[Tensor], list[Any]]:
    outputs, requests = [], []
    for plan, text, length in zip(plans, TEXTS, LENGTHS, strict=True):
        with plan.prepare(model).open(prompt=length) as request:
            outputs.append(model(torch.tensor([text]))[0])
        requests.append(request)
    return outputs, requests


def padded(model: nn.Module, plans: list[fh.Plan]) -> tuple[list[Tensor], list[Any]]:
    longest = max(map(len, TEXTS))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in TEXTS])
    positions = torch.arange(longest).expand(len(TEXTS), -1).clone()
    for row, text in enumerate(TEXTS):
        positions[row, len(text) :] = -1
    requests = [plan.prepare(model).open() for plan in plans]
    lengths: Any = dict(zip(requests, LENGTHS, strict=True))
    rows: Any = {request: row for row, request in enumerate(requests)}
    with fh.batch(rows, positions=positions, lengths=lengths):
        found = model(ids)
    return [found[row, : len(text)] for row, text in enumerate(TEXTS)], requests


def flat(model: nn.Module, plans: list[fh.Plan]) -> tuple[list[Tensor], list[Any]]:
    ids = torch.tensor([token for text in TEXTS for token in text])
    positions = torch.cat([torch.arange(len(text)) for text in TEXTS])
    requests = [plan.prepare(model).open() for plan in plans]
    lengths: Any = dict(zip(requests, LENGTHS, strict=True))
    starts = [sum(map(len, TEXTS[:row])) for row in range(len(TEXTS))]
    rows: Any = {
        request: slice(start, start + len(text))
        for request, start, text in zip(requests, starts, TEXTS, strict=True)
    }
    with fh.batch(rows, positions=positions, lengths=lengths):
        found = model(ids)
    return [found[rows[request]] for request in requests], requests


Way = Callable[[nn.Module, list[fh.Plan]], tuple[list[Tensor], list[Any]]]
WAYS: list[Way] = [padded, flat]


def compare(model: nn.Module, plans: list[fh.Plan], way: Way, tolerance: float = 1e-5) -> None:
    expected, requests = alone(model, plans)
    found, members = way(model, plans)
    for mine, right, member, request in zip(found, expected, members, requests, strict=True):
        assert member.error is None, member.error
        torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)
        for name in request.acts:
            torch.testing.assert_close(
                member.acts[name].flatten(), request.acts[name].flatten(), equal_nan=True
            )


def vectors() -> list[Tensor]:
    return [*torch.randn(len(TEXTS), WIDTH, generator=torch.Generator().manual_seed(1))]


def matrix() -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))


READINGS: dict[str, Callable[[Tensor], fh.Dot | Any]] = {
    "dot": lambda it: fh.Dot(it, float(it[0])),
    "cosine": fh.Cosine,
    "projected": lambda it: fh.Cosine(it, projected=True),
    "norm": lambda _: fh.Norm(),
    "probe": lambda it: fh.Probe(it, float(it[1]), mean=it / 2, scale=it.abs() + 1),
    # As many classes as the vectors are wide; equal, and not the same.
    "classes": lambda _: fh.Probe(matrix(), index=3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reading", READINGS)
@torch.no_grad()
def test_readings_of_a_batch_are_those_of_each_member(reading: str, way: Way) -> None:
    plans = [
        fh.Plan(
            fh.gate("g", "layers.0", READINGS[reading](vector), over="so_far", by="mean"),
            fh.on("layers.1", fh.Add(vector), strength=fh.ramp("g", -2.0, 2.0)),
            fh.keep("@gate.g"),
        )
        for vector in vectors()
    ]
    compare(stack(), plans, way)


@torch.no_grad()
def test_readings_of_many_kinds_share_a_module() -> None:
    chosen = ["dot", "projected", "classes"]
    plans = [
        fh.Plan(
            fh.gate("g", "layers.0", READINGS[name](vector)),
            fh.on("layers.1", fh.Add(vector), when=fh.above("g", 0.1)),
            fh.keep("@gate.g"),
        )
        for name, vector in zip(chosen, vectors(), strict=True)
    ]
    for way in WAYS:
        compare(stack(), plans, way)


DEPENDENT: dict[str, dict[str, Any]] = {
    "when": {"when": fh.above("g", 0.0)},
    "ramp": {"strength": fh.ramp("g", 0.0, 9.0)},
    "number": {"strength": 0.3},
    "both": {"when": fh.below("g", 2.5), "strength": 0.3, "at": "generated"},
    "at": {"at": "generated"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", DEPENDENT)
@torch.no_grad()
def test_hooks_of_all_members_run_as_one(options: str, dtype: torch.dtype, way: Way) -> None:
    plans = [
        fh.Plan(
            fh.gate("g", "layers.0", fh.Norm()),
            fh.on("layers.1", Counted(vector), **DEPENDENT[options]),
        )
        for vector in vectors()
    ]
    model = stack(dtype)
    expected, _ = alone(model, plans)
    Counted.shapes.clear()
    found, requests = way(model, plans)
    assert [request.error for request in requests] == [None] * len(TEXTS)
    assert len(Counted.shapes) == 1
    tolerance = 1e-5 if dtype.itemsize > 2 else 0.05
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)


class Scaled(fh.Intervention):
    """Scales its tensor, and counts its calls."""

    number_fields = ("factor",)
    calls: ClassVar[list[Any]] = []

    @staticmethod
    def formula(x: Tensor, factor: Any) -> Tensor:
        Scaled.calls.append(factor)
        return x * factor


class Norms(nn.Module):
    """A number for each token."""

    def forward(self, x: Tensor) -> Tensor:
        return x.norm(dim=-1)


@torch.no_grad()
def test_hooks_on_a_number_for_each_token_run_as_one() -> None:
    model = nn.Sequential(stack().embed, Norms())
    plan = fh.Plan(fh.on("1", Scaled(2.0), at="generated", strength=1.0))
    Scaled.calls.clear()
    found, requests = padded(model, [plan] * len(TEXTS))
    assert [request.error for request in requests] == [None] * len(TEXTS)
    assert len(Scaled.calls) == 1
    for mine, text, length in zip(found, TEXTS, LENGTHS, strict=True):
        expected = model(torch.tensor(text))
        expected[length:] *= 2
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_hook_that_acts_nowhere_fails_nobody(way: Way) -> None:
    model = stack()
    model.layers[1] = nn.Identity()  # any width
    wrong, right = torch.ones(WIDTH - 3), torch.ones(WIDTH)
    never = fh.Plan(
        fh.gate("g", "layers.0", fh.Norm()),
        fh.on("layers.1", fh.Add(wrong), when=fh.above("g", 1e9)),
    )
    compare(model, [never, fh.Plan(fh.on("layers.1", fh.Add(right), at=0)), fh.Plan()], way)
    nowhere = fh.Plan(fh.on("layers.1", fh.Add(wrong), at=77))
    compare(model, [nowhere, fh.Plan(fh.on("layers.1", fh.Add(right), at=0)), fh.Plan()], way)


class Positive(nn.Module):
    """Zeros where the first number is not positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x[..., :1] > 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_member_that_is_not_changed_has_its_own_gradient(way: Way) -> None:
    model = stack()
    model.layers[1] = Positive()
    plans = [
        fh.Plan(
            fh.gate("g", "layers.0", fh.Norm()),
            fh.on("layers.1", Unit(2.0), when=fh.above("g", limit)),
        )
        for limit in (1e9, 1e9, 1e9)
    ]
    plans[1] = fh.Plan(fh.gate("g", "layers.0", fh.Norm()), fh.keep("@gate.g"))
    outputs, requests = way(model, plans)
    assert [request.error for request in requests] == [None] * len(TEXTS)
    torch.cat([each.flatten() for each in outputs]).pow(2).sum().backward()
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_the_default_dtype_changes_no_gate(dtype: torch.dtype) -> None:
    plans = [
        fh.Plan(
            fh.gate("g", "layers.0", fh.Dot(vector, 0.3), over=fh.ema(0.5)),
            fh.on("layers.1", fh.Add(vector), strength=fh.ramp("g", -2.0, 2.0)),
            fh.keep("@gate.g"),
        )
        for vector in vectors()
    ]
    model, kept = stack(), torch.get_default_dtype()
    expected, _ = padded(model, plans)
    torch.set_default_dtype(dtype)
    try:
        for way in (alone, padded, flat):
            found, requests = way(model, plans)
            for mine, right, request in zip(found, expected, requests, strict=True):
                assert request.acts["@gate.g"].dtype == torch.float32
                torch.testing.assert_close(mine, right)
    finally:
        torch.set_default_dtype(kept)


def test_a_batch_in_inference_mode_leaves_later_ones_their_gradients() -> None:
    plans = [
        fh.Plan(
            fh.gate("g", "layers.0", fh.Dot(vector)),
            fh.on("layers.1", Counted(vector), strength=fh.ramp("g", -2.0, 2.0)),
        )
        for vector in vectors()
    ]
    model = stack()
    requests = [plan.prepare(model).open() for plan in plans]
    rows: Any = {request: row for row, request in enumerate(requests)}
    ids = torch.tensor([[1], [2], [3]])
    for step in range(3):
        Counted.shapes.clear()
        with torch.inference_mode(step != 1):
            lengths: Any = dict.fromkeys(requests, 1)
            positions = torch.full((3, 1), step)
            with fh.batch(rows, positions=positions, lengths=lengths):
                found = model(ids)
        assert len(Counted.shapes) == 1
        assert [request.error for request in requests] == [None] * len(TEXTS)
    with fh.batch(rows, positions=torch.full((3, 1), 3), lengths=lengths):
        found = model(ids)
    found.sum().backward()
    layer: Any = model.layers[0]
    assert layer.weight.grad is not None


def test_functions_get_the_positions_of_all_rows_of_a_request() -> None:
    seen = []

    def last(positions: Tensor) -> Tensor:
        seen.append(tuple(positions.shape))
        return positions == positions.max()

    model = stack()
    request = fh.Plan(fh.on("layers.1", fh.Zero(), at=last)).prepare(model).open()
    positions = torch.tensor([[0, 1, 2], [0, 1, -1]])
    with fh.batch({request: slice(0, 2)}, positions=positions, warn=False):
        assert request.error is None
    assert seen == [(2, 3)]


@pytest.mark.parametrize("index", [[0, 1], [1, 0], [0, 1, 0], [0, 0, 1], [0, 2, 1, 0]])
@torch.no_grad()
def test_gathered_rows_in_any_order_are_read_once(index: list[int]) -> None:
    model = stack()
    plan = fh.Plan(
        fh.gate("g", "layers.0", fh.Norm(), over="so_far", by="mean"),
        fh.on("layers.1", fh.Add(vectors()[0]), strength=fh.ramp("g", 0.0, 3.0)),
        fh.keep("@gate.g"),
    )
    with plan.prepare(model).open(prompt=3) as whole:
        model(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    request = plan.prepare(model).open()
    model.index = torch.tensor(index)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    positions, lengths = torch.arange(3).expand(3, -1), {request: 3}
    gathered = {"layers.*": model.index}
    with fh.batch({request: slice(0, 2)}, positions=positions, lengths=lengths, gathered=gathered):
        model(ids)
    assert request.error is None
    torch.testing.assert_close(request.acts["@gate.g"], whole.acts["@gate.g"])


@pytest.mark.parametrize("index", [[0, 1, 2], [2, 0, 1], [0, 0, 1, 2], [1, 2, 0, 1]])
@torch.no_grad()
def test_gathered_tokens_in_any_order_are_read_once(index: list[int]) -> None:
    model = stack()
    gate = fh.gate("g", "layers.0", fh.Norm(), over="so_far", by="mean")
    plan = fh.Plan(gate, fh.keep("@gate.g"))
    with plan.prepare(model).open() as whole:
        model(torch.tensor([[1, 2, 3]]))
    request = plan.prepare(model).open()
    model.index = torch.tensor(index)
    positions = torch.tensor([0, 1, 2, 0])
    gathered = {"layers.*": model.index}
    with fh.batch({request: slice(0, 3)}, positions=positions, gathered=gathered):
        model(torch.tensor([1, 2, 3, 4]))
    assert request.error is None
    torch.testing.assert_close(request.acts["@gate.g"], whole.acts["@gate.g"].flatten())


class Infinite(nn.Module):
    """Infinite at the first position."""

    def forward(self, x: Tensor) -> Tensor:
        first = (torch.arange(x.shape[1]) == 0)[None, :, None]
        return torch.where(first, torch.full_like(x, torch.inf), x)


@pytest.mark.parametrize("options", [{"at": slice(1, None)}, {"over": fh.window(2), "by": "mean"}])
def test_a_token_that_is_not_changed_gives_no_gradient(options: dict[str, Any]) -> None:
    model = stack()
    model.layers[1] = Infinite()
    plan = fh.Plan(
        fh.gate("g", "layers.0", fh.Dot(torch.ones(WIDTH)), **options),
        fh.on("layers.1", fh.Add(torch.ones(WIDTH)), strength=fh.ramp("g", -9.0, 9.0)),
    )
    with plan.prepare(model).open() as request:
        output = model(torch.tensor([[1, 2, 3, 4]]))
    assert request.error is None
    output[:, 1:].sum().backward()
    layer: Any = model.layers[0]
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("grad", [False, True])
def test_ends_of_a_ramp_may_be_beyond_float32(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        plan = fh.Plan(
            fh.gate("g", "layers.0", fh.Norm()),
            fh.on("layers.1", fh.Zero(), strength=fh.ramp("g", 1e39, 2e39)),
        )
        model: nn.Module = stack()
        with plan.prepare(model).open():
            found = model(torch.tensor([[1, 2]]))
        torch.testing.assert_close(found, model(torch.tensor([[1, 2]])))


def test_a_gate_that_was_used_is_pickled() -> None:
    gate: Any = fh.gate("g", "layers.0", fh.Norm(), over=fh.ema(0.5))
    values = gate.gate.aggregation().values([1.0, 2.0, 4.0], [0, 2, 3])
    again = pickle.loads(pickle.dumps(gate.gate)).aggregation().values([1.0, 2.0, 4.0], [0, 2, 3])
    assert str(values) == str(again) == "[nan, 1.5, 2.75]"
