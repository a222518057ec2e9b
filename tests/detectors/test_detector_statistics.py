"""Statistics of native detectors: NaN and infinity counts, norms."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import ferrohook as fh
from ferrohook.detectors import NonFiniteDetector, NormDetector, ShapeDetector
from support.detectors import snapshot_after, torch_moments
from support.modules import Returning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Elsewhere(Tensor):
    """A tensor subclass; its values may live outside its own memory."""


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Equal values in every layout with a separate read path."""
    odd = torch.empty(x.nbytes + 1, dtype=torch.uint8)
    odd[1:] = x.flatten().view(torch.uint8)
    return {
        "contiguous": x,
        "parameter": nn.Parameter(x.clone()),
        "transposed": x.T.contiguous().T,
        "strided": x.repeat_interleave(2, 1)[:, ::2],
        "subclass": x.clone().as_subclass(Elsewhere),
        "misaligned": torch.frombuffer(odd.numpy(), dtype=x.dtype, offset=1).view(x.shape),
        "negative": torch._neg_view(-x),
        "sparse": x.to_sparse(),
        "needs gradient": x.clone().requires_grad_() * 1,
    }


# NaN and infinity


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_counted_in_every_layout(dtype: torch.dtype) -> None:
    x = torch.randn(40, 60).to(dtype)
    x[3, 4] = x[39, 59] = torch.nan
    x[0, 0], x[20, 1], x[5, 5] = torch.inf, -torch.inf, torch.inf
    for name, tensor in layouts(x).items():
        found = snapshot_after(NonFiniteDetector(), tensor, torch.ones(3))
        assert found == {"tensors": 2, "affected": 1, "nan": 2, "inf": 3}, name


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_extremes_of_a_type_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    extremes = torch.tensor(
        [info.max, info.min, info.tiny, -0.0, info.smallest_normal], dtype=dtype
    )
    assert snapshot_after(NonFiniteDetector(), extremes)["affected"] == 0


def test_complex_numbers_count_as_pairs_and_other_dtypes_are_skipped() -> None:
    x = torch.tensor([complex(math.nan, math.inf), complex(1, math.nan), complex(1, 1)])
    assert snapshot_after(NonFiniteDetector(), x, x.conj()) == {
        "tensors": 2,
        "affected": 2,
        "nan": 4,
        "inf": 2,
    }
    for tensor in (torch.arange(3), torch.ones(2, dtype=torch.bool), torch.empty(0)):
        assert snapshot_after(NonFiniteDetector(), tensor)["tensors"] == 0
    assert snapshot_after(NonFiniteDetector(), torch.empty(2, device="meta"))["tensors"] == 0
    eighth = torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)
    assert snapshot_after(NonFiniteDetector(), eighth)["nan"] == 1


@pytest.mark.parametrize("left", [0, 4, 100, (1 << 18) - 1])
@pytest.mark.parametrize("count", [256, 1 << 16])
def test_freed_memory_is_not_read(count: int, left: int) -> None:
    x = torch.ones(count)
    views = (x.view(16, -1).t(), x[count // 2 :])  # torch cannot create views of freed memory
    x.untyped_storage().resize_(min(left, 4 * count - 1))
    for tensor in (x, *views):
        for detector in (NonFiniteDetector(), NormDetector()):
            assert snapshot_after(detector, tensor)["tensors"] == 0
    if left >= 100:  # the remaining elements are read
        assert snapshot_after(NormDetector(), x[:25])["count"] == 25
        assert snapshot_after(NormDetector(), x[:25:2])["count"] == 13


def test_vmap_grad_and_nested_tensors_are_read_and_fake_ones_are_skipped() -> None:
    x = torch.tensor([[1.0, math.nan, 2.0], [3.0, 4.0, 5.0]])
    non_finite, norm, shapes = NonFiniteDetector(), NormDetector(), ShapeDetector()
    module = fh.HookedModule(Returning())
    for detector in (non_finite, norm, shapes):
        module.register_forward_hook(detector)
    torch.func.vmap(module)(x)
    torch.func.vmap(torch.func.grad(lambda row: module(row).sum()))(x)
    module(torch.nested.nested_tensor([*x], layout=torch.jagged))
    assert non_finite.snapshot() == {"tensors": 3, "affected": 3, "nan": 3, "inf": 0}
    assert norm.snapshot()["mean"] == 3
    starts, lengths = torch.tensor([0, 0]), torch.tensor([1, 1])
    ones = torch.tensor([[1.0, math.nan], [1.0, math.nan]])
    narrowed = torch.nested.narrow(ones, 1, starts, lengths, layout=torch.jagged)
    assert snapshot_after(NonFiniteDetector(), narrowed)["nan"] == 0
    with FakeTensorMode() as fake:
        module(fake.from_tensor(x))
    if packed := getattr(torch, "float4_e2m1fn_x2", None):
        module(torch.empty(3, dtype=packed))
    assert non_finite.snapshot()["tensors"] == norm.snapshot()["tensors"] == 3
    found = shapes.snapshot()
    assert (found["shapes"][3,], found["others"]) == (2 + (packed is not None), 1)


X = torch.tensor([[1.0, math.nan, 2.0], [3.0, 4.0, 5.0]])
MASK = torch.tensor([[True, False, True], [True, True, False]])


def detect(call: Callable[[nn.Module], object]) -> tuple[int, int, float | None]:
    """Tensor count, NaN count and mean, by detectors on a module in `call`."""
    found, norm = NonFiniteDetector(), NormDetector()
    module = fh.HookedModule(Returning())
    for detector in (found, norm):
        module.register_forward_hook(detector)
    call(module)
    assert found.snapshot()["tensors"] == norm.snapshot()["tensors"]
    return found.snapshot()["tensors"], found.snapshot()["nan"], norm.snapshot()["mean"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.torch.jit.script:")
@pytest.mark.parametrize(
    "call",
    [
        lambda module: torch.func.vmap(module)(X),
        lambda module: torch.func.grad(lambda x: module(x).sum())(X),
        lambda module: torch.func.jvp(module, (X,), (X,)),
        lambda module: torch.func.functionalize(module)(X),
        lambda module: torch.func.functionalize(lambda x: module(x.clone().mul_(1)))(X),
        lambda module: torch.func.functionalize(torch.func.vmap(module))(X),
        lambda module: torch.func.vmap(torch.func.functionalize(module))(X),
        lambda module: module(X.to_sparse()),
        lambda module: module(X.to_sparse_csr()),
        lambda module: module(torch.nested.nested_tensor([*X])),
        lambda module: module(torch.nested.nested_tensor([*X], layout=torch.jagged)),
    ],
)
def test_values_of_wrapped_tensors_are_read(call: Callable[[nn.Module], object]) -> None:
    assert detect(call) == (1, 1, 3.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo])
def test_masked_values_do_not_count(layout: torch.layout) -> None:
    if layout == torch.strided:
        masked = torch.masked.masked_tensor(X, MASK)
    else:
        mask = MASK.to_sparse()
        masked = torch.masked.masked_tensor(X.sparse_mask(mask), mask)
    assert detect(lambda module: module(masked)) == (1, 0, 2.5)


class Pair(Tensor):
    """Computes through the tensor it wraps; has no data."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type[Any], inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map_only(Pair, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Pair, func(*bare[0], **bare[1]))


class Unable(Pair):
    """Raises in every operation."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensor_subclasses_that_compute_are_read_and_others_are_skipped() -> None:
    assert detect(lambda module: module(Pair(X))) == (1, 1, 3.0)
    for tensor in (
        Unable(X),
        X.to("meta"),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        nn.UninitializedParameter(),
    ):
        assert detect(lambda module: module(tensor)) == (0, 0, None)  # noqa: B023
    aot = pytest.importorskip("torch._functorch.aot_autograd")
    traced = detect(lambda module: aot.aot_function(module, lambda graph, _: graph)(X))
    assert traced == (0, 0, None)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without distributed")
def test_the_local_shard_of_a_dtensor_is_read(tmp_path: Path) -> None:
    dtensor = pytest.importorskip("torch.distributed.tensor")
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dtensor.init_device_mesh("cpu", (1,))
        tensor = dtensor.distribute_tensor(X, mesh, [dtensor.Shard(0)])
        assert detect(lambda module: module(tensor)) == (1, 1, 3.0)
    finally:
        distributed.destroy_process_group()


@dataclasses.dataclass
class Record:
    first: Any
    other: Any


def test_each_tensor_of_a_structure_is_read() -> None:
    nan = torch.tensor([math.nan])
    output = Record({"a": [nan, (nan, None, "text")]}, (nan, 3))
    assert snapshot_after(NonFiniteDetector(), output)["nan"] == 3
    assert snapshot_after(ShapeDetector(), output)["shapes"] == {(1,): 3}
    deep: Any = nan
    for _ in range(100_000):
        deep = [deep]
    assert snapshot_after(NonFiniteDetector(), deep)["tensors"] == 0


# Norms


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(dtype, size) for dtype in FLOATS for size in (1, 1e30) if size <= torch.finfo(dtype).max],
)
@pytest.mark.parametrize("holes", [False, True])
def test_norms_equal_torchs_in_every_layout(dtype: torch.dtype, size: float, holes: bool) -> None:
    x = ((torch.randn(130, 150) * 3 + 5) * size).to(dtype)
    if holes:
        x[0, 0], x[64, 3], x[129, 149] = torch.nan, torch.inf, -torch.inf
    expected = torch_moments(x)
    for name, tensor in layouts(x).items():
        found = snapshot_after(NormDetector(), tensor)
        assert found.pop("tensors") == 1
        # Torch's own reductions run in float32.
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    assert snapshot_after(NormDetector(), x) | {"tensors": 0} == pytest.approx(
        expected | {"tensors": 0}, rel=1e-12
    )


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50),
    st.lists(st.integers(0, 50), max_size=3),
)
def test_norms_of_parts_add_up(values: list[float], cuts: list[int]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    expected = torch_moments(x)
    bounds = [0, *sorted(min(cut, len(x)) for cut in cuts), len(x)]
    parts = [x[low:high] for low, high in itertools.pairwise(bounds)]
    in_turn = snapshot_after(NormDetector(), *parts)
    merged = NormDetector()
    for part in parts:
        one = NormDetector()
        snapshot_after(one, part)
        merged.merge(one)
    for found in (in_turn, merged.snapshot()):
        del found["tensors"]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-5)


def test_norms_are_none_without_finite_values() -> None:
    nothing = dict.fromkeys(("mean", "variance", "rms", "min", "max"))
    fresh = NormDetector().snapshot()
    assert fresh == nothing | {"tensors": 0, "count": 0, "not_finite": 0}
    holes = snapshot_after(NormDetector(), torch.full((3,), math.nan))
    assert holes == nothing | {"tensors": 1, "count": 0, "not_finite": 3}
    one = snapshot_after(NormDetector(), torch.tensor([2.0]))
    assert (one["mean"], one["variance"], one["rms"]) == (2.0, None, 2.0)


# Tensors that lie about themselves


class Lying(TorchFunctionMode):
    """Answers for torch how many numbers a tensor has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {Tensor.numel, Tensor.data_ptr, Tensor.storage_offset}:
            return 1 << 40
        return func(*args, **(kwargs or {}))


class Replacing(TorchDispatchMode):
    """Returns another tensor for an alias."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "detach" in str(func):
            return torch.ones(3)
        return func(*args, **(kwargs or {}))


class HugeStorage:
    def nbytes(self) -> int:
        return 1 << 60


@pytest.mark.parametrize("count", [4, 1 << 16])
@pytest.mark.parametrize(
    "lies",
    [
        {"numel": lambda: 1 << 30},
        {"numel": lambda: 1 << 30, "untyped_storage": HugeStorage},
        {"storage_offset": lambda: -5, "data_ptr": lambda: 64},
        {"data_ptr": lambda: 64},
        {"is_contiguous": lambda: True, "is_neg": lambda: False},
        {"detach": lambda: "text"},
    ],
)
def test_attributes_of_an_instance_do_not_change_what_is_read(
    count: int, lies: dict[str, Any]
) -> None:
    x = torch.ones(count, 2).T  # not contiguous
    for tensor in (torch.ones(count), x):
        for name, lie in lies.items():
            setattr(tensor, name, lie)
        found = snapshot_after(NormDetector(), tensor)
        assert (found["count"], found["mean"]) == (tensor.shape.numel(), 1.0)


@pytest.mark.parametrize("count", [4, 1 << 16])
def test_modes_do_not_change_what_is_read(count: int) -> None:
    with Lying():
        found = snapshot_after(NormDetector(), torch.ones(count))
    assert (found["count"], found["mean"]) == (count, 1.0)
    with Replacing():
        found = snapshot_after(NormDetector(), torch.ones(count))
    assert found["count"] in {3, count}
    assert found["mean"] == 1.0


def test_a_storage_that_was_cut_is_not_read() -> None:
    x = torch.ones(1 << 10)
    x.untyped_storage().resize_(8)
    found = snapshot_after(NormDetector(), x)
    assert found["count"] <= 2
