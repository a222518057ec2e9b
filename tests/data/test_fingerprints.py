"""Fingerprints change with the contents of tensors and structures, and with nothing else."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from ferrohook.data.fingerprints import fingerprint, fingerprints_of
from ferrohook.data.manifests import differences, manifest
from support.interpreters import run_with_torch

np = pytest.importorskip("numpy")

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL, LARGE = (10, 7), (301, 503)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_one_changed_element_changes_the_fingerprint(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = (torch.arange(shape[0] * shape[1]).view(shape) % 251).to(dtype)
    before = fingerprint(x)
    generator = torch.Generator().manual_seed(0)
    places = [0, x.numel() - 1, *torch.randint(x.numel(), (50,), generator=generator).tolist()]
    for place in places:
        flat = x.view(-1)
        was = flat[place].clone()
        flat[place] = ~was if dtype == torch.bool else was + 2
        assert fingerprint(x) != before
        flat[place] = was
    assert fingerprint(x.clone()) == before


@pytest.mark.parametrize("shape", [SMALL, LARGE, (4096, 4), (8, 3, 64, 64)])
def test_another_order_of_rows_changes_the_fingerprint(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert len({fingerprint(each) for each in (x, x.flip(0), x.roll(1, 0), x[:-1])}) == 4


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_dtype_and_shape_count_and_layout_does_not(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    others: list[Tensor] = [x.view(shape[::-1]), x.view(torch.int32), x.double(), x[None], x * 0]
    assert len({fingerprint(each) for each in (x, *others)}) == 6
    strided = torch.stack([x, x], 2)[..., 1]
    at_an_offset = torch.cat([torch.zeros(1), x.flatten()])[1:].view(shape)
    same: list[Tensor] = [strided, at_an_offset, x.T.contiguous().T, nn.Parameter(x), x.neg().neg()]
    for each in same:
        assert fingerprint(each) == fingerprint(x)
    z = torch.randn(shape, dtype=torch.complex64)
    assert fingerprint(z.conj()) == fingerprint(z.conj().resolve_conj()) != fingerprint(z)


def test_tensors_of_every_kind() -> None:
    x = torch.randn(4, 5)
    for make in (
        lambda y: y.to_sparse(),
        lambda y: torch.nested.nested_tensor([y, y[:2]], layout=torch.jagged),
        lambda y: y[0, 0],
    ):
        assert fingerprint(make(x)) == fingerprint(make(x.clone())) != fingerprint(make(x + 1))
    assert fingerprint(x[:0]) != fingerprint(x[:, :0])
    meta = torch.empty(3, device="meta")
    assert fingerprint(meta) == fingerprint(torch.empty(3, device="meta"))
    assert fingerprint(nn.LazyLinear(3).weight) == fingerprint(nn.LazyLinear(3).weight)


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = None


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


x, y = torch.ones(3), torch.zeros(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda it: [it, 1],
        lambda it: {"a": it, "b": None},
        lambda it: collections.UserDict(a=it),
        Record,
        Plain,
        Slotted,
        lambda it: {"deep": [(Plain({"x": it}),)]},
        lambda it: collections.deque([it]),
        np.asarray,
        lambda it: functools.partial(print, it),
    ],
)
def test_structures_count_by_their_contents(make: Callable[[Any], Any]) -> None:
    assert fingerprint(make(x)) == fingerprint(make(x.clone())) != fingerprint(make(y))


def test_data_counts_by_its_value() -> None:
    values = [None, 0, 0.0, False, "", "0", b"0", [0], [[0]], {0: 0}, {"0": 0}, {1, 2}, {1}, 1j]
    values += [print, len, nn.Linear, nn.ReLU, float("nan"), -0.0, "\ud800", (0, 0), torch]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint((1, 2)) == fingerprint([1, 2])


def test_objects_without_a_state_count_by_their_class() -> None:
    generator, other = (n for n in ()), (n for n in (1,))
    assert fingerprint(generator) == fingerprint(other)
    assert fingerprint(nn.Linear(2, 2)) == fingerprint(nn.Linear(2, 2))
    around: list[Any] = [1]
    around.append(around)
    assert fingerprint(around) == fingerprint(around)
    assert list(other) == [1]
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert fingerprint(deep) == fingerprint([deep]) != fingerprint([])


def test_fingerprints_are_those_of_another_process() -> None:
    code = """
from ferrohook.data.fingerprints import fingerprint
texts = {f"{number}" for number in range(99)}
print([*texts])
print(fingerprint([texts, {"x": torch.arange(50_000)}, "text", len]))
"""
    done = run_with_torch(code)
    order, found = done.stdout.splitlines()
    texts = {f"{number}" for number in range(99)}
    assert order != str([*texts]), "hashed with the same seed"
    assert found == fingerprint([texts, {"x": torch.arange(50_000)}, "text", len])


def test_shared_tensors_are_read_once() -> None:
    tied = torch.randn(3)
    found = fingerprints_of({"a": tied, "b": tied, "c": tied.clone()})
    assert found["a"] == found["b"] == found["c"]


def test_many_differences_are_counted() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    before = manifest(model, ["0"], None)
    assert differences(before, manifest(model, ["0"], None)) == []
    for parameter in model.parameters():
        parameter.data.add_(1)
    (told,) = differences(before, manifest(model, ["0"], None))
    names = "'0.weight', '0.bias', '1.weight', '1.bias', '2.weight'"
    assert told == f"parameters and buffers: {names} and 5 more changed"


@pytest.mark.cuda
def test_the_device_does_not_count() -> None:
    for shape in (SMALL, LARGE):
        z = torch.randn(shape)
        assert fingerprint(z.cuda()) == fingerprint(z)
