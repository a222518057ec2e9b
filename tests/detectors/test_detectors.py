"""Native detectors: calls, shapes, latency, merging and threads."""

from __future__ import annotations

import copy
import math
import pickle
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.detectors import (
    CallCounter,
    LatencyDetector,
    NativeDetector,
    NonFiniteDetector,
    NormDetector,
    ShapeDetector,
)
from support.detectors import snapshot_after, torch_moments
from support.modules import Returning
from support.threads import in_threads, repeating, run_together

ALL = [CallCounter, LatencyDetector, ShapeDetector, NonFiniteDetector, NormDetector]


# Calls, shapes, latency


def test_an_invalid_limit_is_refused() -> None:
    for limit, error, told in (
        ("3", fh.HookTypeError, "limit must be an int, got str"),
        (True, fh.HookTypeError, "limit must be an int, got bool"),
        (-1, ValueError, "limit must be between 0 and .*, got -1"),
    ):
        with pytest.raises(error, match=told):
            ShapeDetector(limit=limit)  # type: ignore[arg-type]


def test_shapes_beyond_the_limit_count_as_others() -> None:
    detector = ShapeDetector(limit=2)
    found = snapshot_after(
        detector, torch.ones(1), torch.ones(2, 3), torch.ones(4), torch.ones(1), "text"
    )
    assert found == {"calls": 5, "shapes": {(1,): 2, (2, 3): 1}, "others": 1}
    other = ShapeDetector()
    snapshot_after(other, torch.ones(()), torch.ones(1))
    detector.merge(other)
    assert detector.snapshot() == {"calls": 7, "shapes": {(1,): 3, (2, 3): 1}, "others": 2}


def test_latency_excludes_the_time_of_hooks() -> None:
    inside: list[float] = []
    in_hooks: list[float] = []
    outside: list[float] = []

    def nap(seconds: float, log: list[float]) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        log.append(time.perf_counter() - start)

    module = fh.HookedModule(Returning(lambda seconds: nap(seconds, inside)))
    module.register_forward_pre_hook(lambda *_: nap(0.1, in_hooks))
    module.register_forward_hook(lambda *_: nap(0.1, in_hooks), priority=1)
    detector = LatencyDetector()
    module.register_forward_hook(detector)
    naps = [0.001, 0.01, 0.05]
    for seconds in naps:
        start = time.perf_counter()
        module(seconds)
        outside.append(time.perf_counter() - start - sum(in_hooks[-2:]))
    found = detector.snapshot()
    assert found["calls"] == len(naps)
    # Bounds on any machine: longer than the nap, shorter than the call minus the hooks' time.
    for key, pick in {"min": min, "max": max, "total": sum}.items():
        assert pick(inside) <= found[key] <= pick(outside), key
    assert sorted(inside)[1] / 1.02 <= found["p50"] <= sorted(outside)[1] * 1.02
    assert found["p99"] == pytest.approx(found["max"], rel=0.02)
    assert found["total"] == pytest.approx(3 * found["mean"], rel=1e-6)
    assert sum(calls for *_, calls in found["histogram"]) == len(naps)
    assert all(low <= high for low, high, _ in found["histogram"])


def test_latency_before_the_first_call_is_none() -> None:
    found = LatencyDetector().snapshot()
    assert (found["calls"], found["total"], found["histogram"]) == (0, 0.0, [])
    assert [found[key] for key in ("mean", "min", "max", "p50", "p99")] == [None] * 5


def test_a_failed_call_adds_no_latency() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    module = fh.HookedModule(Returning(fail))
    latency, calls = LatencyDetector(), CallCounter()
    module.register_forward_hook(latency, always_call=True)
    module.register_forward_hook(calls, always_call=True)
    module.register_forward_hook(CallCounter())
    with pytest.raises(ZeroDivisionError):
        module()
    assert latency.snapshot()["calls"] == 0
    assert calls.snapshot() == {"calls": 1}


def test_latency_registered_during_a_call_starts_with_the_next_call() -> None:
    detector = LatencyDetector()
    module = fh.HookedModule(Returning(lambda: module.register_forward_hook(detector)))
    module().remove()
    assert detector.snapshot()["calls"] == 0
    with module.register_forward_hook(detector):
        module().remove()
    # The detector of the test, and the one registered during the call.
    assert detector.snapshot()["calls"] == 2


# Registering


@pytest.mark.parametrize("cls", ALL)
def test_one_detector_registers_on_many_modules_by_name(cls: type[NativeDetector]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    detector = cls()
    with fh.register(model, "*", detector) as handles:
        model(torch.randn(5, 3))
    assert handles.calls == 3
    found = detector.snapshot()
    assert found.get("calls", found.get("tensors")) == 3
    assert type(model) is nn.Sequential


def test_a_detector_runs_in_the_phase_of_its_registration() -> None:
    module = fh.HookedModule(Returning(lambda x: x * math.nan))
    phases = ("forward_pre", "forward", "backward_pre", "backward")
    detectors = {phase: NormDetector() for phase in phases}
    for phase, detector in detectors.items():
        fh.register(module, "", detector, phase=phase)
    module(torch.ones(2, requires_grad=True)).sum().backward()
    found = {phase: detector.snapshot() for phase, detector in detectors.items()}
    assert [found[phase]["count"] for phase in phases] == [2, 0, 2, 0]
    assert [found[phase]["not_finite"] for phase in phases] == [0, 2, 0, 2]


def test_keyword_arguments_are_the_input_of_a_call_without_positional_ones() -> None:
    module = fh.HookedModule(Returning(lambda *_, **__: None))
    detector = ShapeDetector()
    module.register_forward_pre_hook(detector)
    module(x=torch.ones(2), y=torch.ones(3))
    module(torch.ones(4), torch.ones(5), z=torch.ones(6))
    assert detector.snapshot()["shapes"] == {(2,): 1, (3,): 1, (4,): 1, (5,): 1}


def test_unsupported_phases_and_options_are_refused() -> None:
    module = fh.HookedModule(Returning())
    with pytest.raises(
        fh.HookTypeError, match=r"LatencyDetector only works in forward: .* forward_pre"
    ):
        module.register_forward_pre_hook(LatencyDetector())
    with pytest.raises(fh.HookTypeError, match="with_kwargs only works with plain callables"):
        module.register_forward_hook(CallCounter(), with_kwargs=True)
    with pytest.raises(TypeError):
        NativeDetector()  # an abstract base
    assert not module.hooks()


def test_scopes_order_and_removal_work_as_for_other_hooks() -> None:
    module = fh.HookedModule(Returning())
    inside, behind = CallCounter(), ShapeDetector()
    with fh.scope() as s:
        module.register_forward_hook(inside, scope=s)
        module.register_forward_hook(behind)
        module.register_forward_hook(lambda *_: torch.ones(7), priority=1)
        module(torch.ones(2))
        handle = module.register_forward_hook(inside)
        handle.disable()
        module(torch.ones(2))
    module(torch.ones(2))
    assert inside.snapshot() == {"calls": 2}
    assert behind.snapshot()["shapes"] == {(7,): 3}


def test_errors_are_handled_as_for_other_hooks(caplog: pytest.LogCaptureFixture) -> None:
    class UnreadableError(Exception):
        pass

    class Broken(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *args: Any, **kwargs: Any) -> Any:
            raise UnreadableError(func.__name__)

    broken = torch.ones(2).as_subclass(Broken)
    module = fh.HookedModule(Returning())
    handle = module.register_forward_hook(NonFiniteDetector())
    with pytest.raises(UnreadableError) as caught:
        module(broken)
    assert "forward hook `NonFiniteDetector(" in caught.value.__notes__[0]
    handle.remove()
    module.register_forward_hook(NonFiniteDetector(), on_error="disable")
    assert module(broken) is broken
    assert module(broken) is broken
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_compiled_calls_are_detected() -> None:
    module = fh.HookedModule(nn.Linear(3, 3))
    detector = NormDetector()
    module.register_forward_hook(detector)
    compiled = torch.compile(module, backend="eager")
    compiled(torch.ones(2, 3))
    assert detector.snapshot()["count"] == 6
    torch.compiler.reset()  # Dynamo does not retry a frame that broke the graph
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(module, backend="eager", fullgraph=True)(torch.ones(2, 3))


# Merging, copying, pickling


def fed(cls: type[NativeDetector]) -> NativeDetector:
    detector = cls()
    snapshot_after(detector, torch.tensor([1.0, math.nan, 3.0]), torch.ones(2, 2))
    return detector


@pytest.mark.parametrize("cls", ALL)
def test_copies_and_pickles_include_the_statistics(cls: type[NativeDetector]) -> None:
    detector = fed(cls)
    expected = detector.snapshot()
    for duplicate in (
        copy.copy(detector),
        copy.deepcopy(detector),
        pickle.loads(pickle.dumps(detector)),
    ):
        assert type(duplicate) is cls
        assert duplicate.snapshot() == expected
        snapshot_after(duplicate, torch.zeros(1))
        assert duplicate.snapshot() != expected
    assert detector.snapshot() == expected
    with pytest.raises((TypeError, ValueError)):
        cls().__setstate__("nonsense")


@pytest.mark.parametrize("cls", ALL)
def test_merged_statistics_equal_those_of_one_detector(cls: type[NativeDetector]) -> None:
    left, right = fed(cls), fed(cls)
    kept = right.snapshot()
    left.merge(pickle.loads(pickle.dumps(right)))
    merged = left.snapshot()
    assert right.snapshot() == kept
    for key in ("calls", "tensors", "nan", "count"):
        assert merged.get(key) == (2 * kept[key] if key in kept else None)
    with pytest.raises(fh.HookError, match="itself would count everything twice"):
        left.merge(left)
    other = CallCounter() if cls is not CallCounter else NormDetector()
    for wrong in (other, 3):
        with pytest.raises(fh.HookTypeError, match=f"a {cls.__name__} can only merge another"):
            left.merge(wrong)
    assert left.snapshot() == merged


def test_a_copied_model_has_a_detector_of_its_own() -> None:
    module = fh.HookedModule(Returning())
    detector = LatencyDetector()
    module.register_forward_hook(detector)
    duplicate = copy.deepcopy(module)
    duplicate(1)
    duplicate(1)
    module(1)
    assert detector.snapshot()["calls"] == 1
    (info,) = duplicate.hooks()
    assert info.hook.snapshot()["calls"] == 2


def test_a_removed_detector_leaves_calls_untimed() -> None:
    module = fh.HookedModule(Returning())
    first, second = LatencyDetector(), LatencyDetector()
    handle = module.register_forward_hook(first)
    module(1)
    handle.remove()
    module(1)
    with fh.scope() as s:
        module.register_forward_hook(second, scope=s)
        module(1)
    module(1)
    assert (first.snapshot()["calls"], second.snapshot()["calls"]) == (1, 1)


# Threads


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("size", [8, 1 << 15])
def test_calls_of_all_threads_are_counted(size: int) -> None:
    threads, calls = 8, 60
    module = fh.HookedModule(Returning())
    detectors = [cls() for cls in ALL]
    for detector in detectors:
        module.register_forward_hook(detector)
    total = NonFiniteDetector()

    def work(number: int) -> None:
        x = torch.full((size,), float(number))
        x[number] = math.nan
        own = NonFiniteDetector()
        for _ in range(calls):
            module(x)
            snapshot_after(own, x)
            detectors[3].snapshot()
        total.merge(own)

    in_threads(threads, work)
    counter, latency, shapes, non_finite, norm = (detector.snapshot() for detector in detectors)
    everything = threads * calls
    assert counter["calls"] == latency["calls"] == shapes["shapes"][size,] == everything
    expected = {"tensors": everything, "affected": everything, "nan": everything, "inf": 0}
    assert non_finite == total.snapshot() == expected
    assert norm["count"] == everything * (size - 1)
    assert norm["mean"] == pytest.approx((threads - 1) / 2)


@pytest.mark.usefixtures("switch_often")
def test_concurrent_mutual_merges_do_not_deadlock() -> None:
    left, right = fed(NormDetector), fed(NormDetector)

    def work(into: NativeDetector, other: NativeDetector) -> None:
        for _ in range(20):
            into.merge(other)

    run_together(lambda: work(left, right), lambda: work(right, left))


def test_a_large_tensor_is_read_without_the_gil() -> None:
    x = torch.zeros(1 << 26)
    module = fh.HookedModule(Returning())
    module.register_forward_hook(NormDetector())
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(time.perf_counter())
        time.sleep(0.0005)

    def ticks_in_a_call() -> int:
        before = time.perf_counter()
        module(x)
        after = time.perf_counter()
        return sum(before < tick < after for tick in ticks)

    # With the GIL held, ticks would come only at the edges of a call.
    with repeating(tick):
        assert any(ticks_in_a_call() >= 5 for _ in range(20))


def test_memory_stays_alive_while_a_detector_reads_it() -> None:
    x = torch.ones(1 << 22)
    module = fh.HookedModule(Returning())
    detector = NormDetector()
    module.register_forward_hook(detector)

    def replace() -> None:
        x.data = torch.ones(1 << 22)

    with repeating(replace):
        for _ in range(30):
            module(x)
    found = detector.snapshot()
    assert (found["count"], found["mean"], found["variance"]) == (30 << 22, 1.0, 0.0)


# On a GPU


@pytest.mark.cuda
def test_only_snapshot_waits_for_the_gpu() -> None:
    x = torch.randn(1000, device="cuda") + 2
    x[3], x[5] = torch.nan, torch.inf
    expected = torch_moments(x.cpu())
    module = fh.HookedModule(Returning())
    non_finite, norm = NonFiniteDetector(), NormDetector()
    module.register_forward_hook(non_finite)
    module.register_forward_hook(norm)
    module(x)
    calls = 10  # of some 40 kernels each: launching waits for the GPU after about 1,000
    # Pinning memory waits too: pinned here, and reused.
    for size in (2, 6):
        pinned = [torch.empty(size, dtype=torch.float64, pin_memory=True) for _ in range(calls)]
        del pinned
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    busy = torch.cuda.Event()
    busy.record()
    for _ in range(calls):
        module(x)
    assert not busy.query()  # otherwise a call has waited for the GPU
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        module(x)
    count = calls + 2
    assert non_finite.snapshot() == {
        "tensors": count,
        "affected": count,
        "nan": count,
        "inf": count,
    }
    found = norm.snapshot()
    assert (found["count"], found["not_finite"]) == (count * 998, 2 * count)
    for key in ("mean", "variance", "rms", "min", "max"):
        assert found[key] == pytest.approx(expected[key], rel=2e-3)
