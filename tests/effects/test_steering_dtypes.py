"""Interventions on tensors of each dtype, by each machine that interprets them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.compiling import compiled
from support.plans import by_hand

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 4
COMPLEX = (torch.complex64, torch.complex128)
REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int8, torch.uint8, torch.bool)
WAYS = ("eager", "plan", "batch", "batch of two plans")


def vector(dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(WIDTH, dtype=dtype, generator=generator)
    return torch.randn(WIDTH, generator=generator).to(dtype)


def interventions(dtype: torch.dtype, seed: int = 0) -> Iterator[Any]:
    """Makes the interventions that have a vector, in a dtype."""
    v = vector(dtype, seed)
    yield from (fh.Add(v, 0.3), fh.Add(v[0]), fh.Ablate(v), fh.Replace(v), fh.Replace(v[1]))


def values(dtype: torch.dtype) -> Tensor:
    made = torch.randn(5, WIDTH, dtype=torch.complex128, generator=torch.Generator().manual_seed(9))
    return made.to(dtype) if dtype.is_complex else (made.real * 3).to(dtype)


def ran(way: str, x: Tensor, intervention: Any, other: Any = None) -> Tensor:
    """Values after an intervention; in a batch of two plans after another on the rows from 2."""
    model = nn.Sequential(nn.Identity())
    if way == "eager":
        with fh.register(model, "0", intervention):
            return model(x)  # type: ignore[no-any-return]
    with contextlib.ExitStack() as stack:
        plans = [fh.Plan(fh.on("0", each or intervention)) for each in (None, other)]
        prepared = [stack.enter_context(plan.prepare(model)) for plan in plans]
        if way == "plan":
            with prepared[0].open():
                return model(x)  # type: ignore[no-any-return]
        second = prepared[way == "batch of two plans"]
        members = prepared[0].open(), second.open()
        with fh.batch({members[0]: slice(0, 2), members[1]: slice(2, 5)}):
            y = model(x)
        for member in members:
            if member.error is not None:
                raise member.error
    return y  # type: ignore[no-any-return]


def close(ours: Tensor, expected: Tensor) -> bool:
    """Equal up to the rounding of sums of the width."""
    bound = 4 * WIDTH * torch.finfo(expected.dtype).eps * expected.abs().max()
    return ours.dtype == expected.dtype and bool(((ours - expected).abs() <= bound).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("of", [*COMPLEX, torch.float32, torch.float64])
def test_complex_values(way: str, dtype: torch.dtype, of: torch.dtype) -> None:
    x = values(dtype)
    for one, other in zip(interventions(of), interventions(of, 1), strict=True):
        expected = by_hand(one, x)
        if way == "batch of two plans":
            expected = torch.cat([expected[:2], by_hand(other, x[2:])])
        assert close(ran(way, x, one, other), expected), one


@pytest.mark.parametrize("way", WAYS)
def test_factors_of_complex_values_are_exact(way: str) -> None:
    x = values(torch.complex128)
    expected = torch.cat([x[:2] * 0.3, x[2:] * (0.7 if way == "batch of two plans" else 0.3)])
    assert torch.equal(ran(way, x, fh.Scale(0.3), fh.Scale(0.7)), expected)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_a_batch_with_real_and_complex_vectors(dtype: torch.dtype) -> None:
    x = values(dtype)
    for one, other in zip(interventions(dtype), interventions(torch.float32, 1), strict=True):
        for pair in ((one, other), (other, one)):
            expected = torch.cat([by_hand(pair[0], x[:2]), by_hand(pair[1], x[2:])])
            assert close(ran("batch of two plans", x, *pair), expected)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_nothing_is_left_along_an_ablated_direction(dtype: torch.dtype) -> None:
    d = vector(dtype)
    left = (ran("eager", values(dtype), fh.Ablate(d)) * (d / d.norm()).conj()).sum(-1)
    assert left.abs().max() < 4 * WIDTH * torch.finfo(dtype).eps * values(dtype).abs().max()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("of", COMPLEX)
def test_a_complex_vector_is_refused_on_real_values(
    way: str, dtype: torch.dtype, of: torch.dtype
) -> None:
    for one in interventions(of):
        with pytest.raises(
            fh.HookTypeError, match=f"{type(one).__name__} with a vector of {of}.*imaginary"
        ):
            ran(way, values(dtype), one, one)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", COMPLEX)
def test_a_clamp_is_refused_on_complex_values(way: str, dtype: torch.dtype) -> None:
    clamp = fh.Clamp(vector(torch.float32), -0.1, 0.1)
    with pytest.raises(fh.HookTypeError, match=r"Clamp.*no order"):
        ran(way, values(dtype), clamp, clamp)
    with pytest.raises(fh.HookTypeError, match=r"Clamp.*no order"):
        fh.Clamp(vector(dtype), -0.1, 0.1)


@pytest.mark.parametrize("way", WAYS)
def test_a_bound_may_be_beyond_the_dtype(way: str) -> None:
    x, v = values(torch.float16), vector(torch.float32)
    expected = ran(way, x, fh.Clamp(v, high=0.1))
    assert torch.equal(ran(way, x, fh.Clamp(v, -1e6, 0.1)), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_not_changed(way: str, dtype: torch.dtype) -> None:
    x = values(dtype)
    clamp = fh.Clamp(vector(torch.float32), -0.1, 0.1)
    for one in (*interventions(torch.float32), clamp, fh.Scale(2.0)):
        with pytest.raises(fh.HookTypeError, match=f"{type(one).__name__}.*{dtype}"):
            ran(way, x, one, one)
    assert torch.equal(ran(way, x, fh.Zero()), torch.zeros_like(x))


@pytest.mark.parametrize("way", WAYS)
def test_a_dtype_without_arithmetic_is_named(way: str) -> None:
    for one in (fh.Scale(2.0), fh.Add(torch.ones(WIDTH)), fh.Ablate(torch.ones(WIDTH))):
        with pytest.raises(fh.HookTypeError, match=r"hook.*float8_e4m3fn does not support"):
            ran(way, values(torch.float8_e4m3fn), one, one)


@compiled
@pytest.mark.parametrize("of", [torch.complex64, torch.float32])
def test_complex_values_in_a_graph(of: torch.dtype) -> None:
    x, model = values(torch.complex64), nn.Sequential(nn.Identity())
    with fh.instrument(model):
        call = torch.compile(model, backend="eager", fullgraph=True)
        for one in interventions(of):
            with fh.register(model, "0", one):
                assert close(call(x), by_hand(one, x))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_graph_refuses_what_a_call_refuses(dtype: torch.dtype) -> None:
    x, model = values(dtype), nn.Sequential(nn.Identity())
    refused = [*interventions(torch.complex64)]
    if dtype == torch.int64:
        refused += [*interventions(torch.float32), fh.Scale(2.0)]
    with fh.instrument(model):
        for one in refused:
            torch._dynamo.reset()
            with fh.register(model, "0", one), pytest.raises(fh.HookTypeError):
                torch.compile(model, backend="eager")(x)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_sites_add_complex_vectors(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity())
    x = values(dtype)
    x[0] = torch.tensor(complex(-0.0, -0.0), dtype=dtype)
    v = vector(dtype)
    with (
        fh.rows.sites(model, "0", max_requests=2, max_rows=8, width=WIDTH, dtype=dtype),
        fh.Plan(fh.on("0", fh.Add(v))).prepare(model) as prepared,
        fh.batch({prepared.open(): slice(2, 5)}, size=5),
    ):
        y = model(x)
    assert torch.equal(y[2:], x[2:] + v)
    signs = torch.view_as_real(y[:2]).signbit()
    assert torch.equal(signs, torch.view_as_real(x[:2]).signbit())


def test_sites_of_real_values_refuse_complex_vectors() -> None:
    model = nn.Sequential(nn.Identity())
    with fh.rows.sites(model, "0", max_requests=2, max_rows=8, width=WIDTH):
        plan = fh.Plan(fh.on("0", fh.Add(vector(torch.complex64))))
        with plan.prepare(model) as prepared, contextlib.ExitStack() as stack:
            batch = fh.batch({prepared.open(): slice(0, 5)}, size=5)
            with pytest.raises(fh.errors.RowsError, match=r"complex64.*imaginary"):
                stack.enter_context(batch)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_a_plan_with_a_complex_vector_is_no_json(dtype: torch.dtype) -> None:
    plan = fh.Plan(fh.on("0", fh.Add(vector(dtype))))
    with pytest.raises(fh.HookTypeError, match=str(dtype).removeprefix("torch.")):
        plan.to_json()


def test_a_strength_needs_floats() -> None:
    plan = fh.Plan(fh.on("", fh.Zero(), strength=0.5))
    with pytest.raises(fh.errors.HookTypeError, match="int64"):
        fh.run(nn.Identity(), torch.arange(4), plan=plan)
