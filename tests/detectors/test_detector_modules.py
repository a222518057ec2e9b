"""Statistics of one detector on many modules, for each of them."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.attach.hook_info import find_registry, hooks_of
from ferrohook.detectors import (
    CallCounter,
    LatencyDetector,
    NativeDetector,
    NonFiniteDetector,
    NormDetector,
    ShapeDetector,
    reductions,
)
from support.modules import Returning
from support.threads import in_threads

ALL = [CallCounter, LatencyDetector, ShapeDetector, NonFiniteDetector, NormDetector]


def nan_behind(x: torch.Tensor) -> torch.Tensor:
    return x * math.nan


@pytest.fixture
def model() -> nn.Sequential:
    layers = {
        "early": nn.Identity(),
        "broken": nn.Sequential(Returning(nan_behind)),
        "late": nn.Identity(),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


@pytest.mark.parametrize("cls", ALL)
def test_a_detector_has_statistics_for_each_module(cls: type[NativeDetector]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    total, expected = cls(), {name: cls() for name in ("0", "1", "2")}
    for name, detector in expected.items():
        fh.register(model[int(name)], "", detector)
    with fh.register(model, "*", total):
        for _ in range(2):
            model(torch.randn(5, 3))
    found = {name: detector.snapshot() for name, detector in total.modules.items()}
    assert list(found) == ["0", "1", "2"]
    if cls is LatencyDetector:
        assert [each["calls"] for each in found.values()] == [2, 2, 2]
        assert total.snapshot()["calls"] == 6
        return
    assert found == {name: detector.snapshot() for name, detector in expected.items()}
    merged = cls()
    for detector in expected.values():
        merged.merge(detector)
    assert total.snapshot() == merged.snapshot()


def test_the_first_module_with_nan_is_named(model: nn.Sequential) -> None:
    detector = NonFiniteDetector()
    assert detector.first is None
    with fh.register(model, "**", detector):
        model(torch.ones(2))
    # The innermost returns first; `named_modules` has it after its parents.
    assert detector.first == "broken.0"
    affected = {name: each.snapshot()["affected"] for name, each in detector.modules.items()}
    assert affected == {"": 1, "early": 0, "broken": 1, "broken.0": 1, "late": 1}
    assert detector.snapshot() == {"tensors": 5, "affected": 4, "nan": 8, "inf": 0}
    with fh.register(model, "early", detector):
        model(torch.full((2,), math.inf))
    assert detector.first == "broken.0"


def test_the_first_module_survives_copies_and_merges(model: nn.Sequential) -> None:
    detector = NonFiniteDetector()
    with fh.register(model, "**", detector):
        model(torch.ones(2))
    merged = NonFiniteDetector()
    merged.merge(detector)
    for duplicate in (merged, copy.deepcopy(detector), pickle.loads(pickle.dumps(detector))):
        assert duplicate.first == "broken.0"
        assert duplicate.snapshot() == detector.snapshot()
        assert duplicate.modules.keys() == detector.modules.keys()
        for name, each in duplicate.modules.items():
            assert each.snapshot() == detector.modules[name].snapshot()
    local, other = NonFiniteDetector(), nn.ModuleDict({"local": nn.Identity()})
    with fh.register(other, "local", local):
        other["local"](torch.tensor(math.nan))
    local.merge(pickle.loads(pickle.dumps(detector)))
    assert local.first == "local"


def test_calls_of_modules_without_a_name_count_in_the_sum_alone() -> None:
    module = fh.HookedModule(Returning())
    detector = CallCounter()
    module.register_forward_hook(detector)
    module(1)
    assert detector.snapshot() == {"calls": 1}
    assert detector.modules == {}
    with fh.register(nn.Sequential(module), "0", detector):
        module(1)
    assert detector.snapshot() == {"calls": 3}
    assert detector.modules["0"].snapshot() == {"calls": 1}


def test_a_limit_applies_to_each_module() -> None:
    model = nn.Sequential(nn.Identity(), nn.Flatten(0))
    detector = ShapeDetector(limit=1)
    with fh.register(model, "*", detector):
        model(torch.ones(1, 2))
        model(torch.ones(2, 2))
    assert detector.modules["0"].snapshot() == {"calls": 2, "shapes": {(1, 2): 1}, "others": 1}
    assert detector.modules["1"].snapshot() == {"calls": 2, "shapes": {(2,): 1}, "others": 1}


def test_a_copied_model_counts_in_the_copied_detector(model: nn.Sequential) -> None:
    detector, names = CallCounter(), ["early", "late"]
    with fh.instrument(model):
        fh.register(model, names, detector)
        duplicate = copy.deepcopy(model)
        duplicate(torch.ones(1))
    (early,), (late,) = (hooks_of(find_registry(duplicate.get_submodule(name))) for name in names)
    assert early.hook is late.hook
    assert early.hook is not detector
    assert early.hook.modules["late"].snapshot() == {"calls": 1}
    assert detector.snapshot() == {"calls": 0}


@pytest.mark.usefixtures("switch_often")
def test_threads_that_register_share_the_detector_of_a_module() -> None:
    detector, threads, calls = CallCounter(), 8, 20
    models = [nn.Sequential(nn.Identity()) for _ in range(threads)]

    def work(number: int) -> None:
        for _ in range(calls):
            with fh.register(models[number], "0", detector):
                models[number](1)

    in_threads(threads, work)
    assert detector.modules["0"].snapshot() == detector.snapshot() == {"calls": threads * calls}


MOMENTS = "mean=1, variance=0, rms=1, min=1, max=1"


@pytest.mark.parametrize(
    ("cls", "shown"),
    [
        (CallCounter, "CallCounter(calls=2)"),
        (ShapeDetector, "ShapeDetector(calls=2, shapes={(2,): 2}, others=0)"),
        (NonFiniteDetector, "NonFiniteDetector(tensors=2, affected=1, nan=0, inf=1, first='1')"),
        (NormDetector, f"NormDetector(tensors=2, count=3, {MOMENTS}, not_finite=1)"),
    ],
)
def test_a_repr_has_the_numbers(cls: type[NativeDetector], shown: str) -> None:
    def with_inf(x: torch.Tensor) -> Any:
        return torch.tensor([1.0, math.inf])

    model = nn.Sequential(nn.Identity(), Returning(with_inf))
    detector = cls()
    with fh.register(model, "*", detector):
        model(torch.ones(2))
    assert repr(detector) == shown


def test_the_repr_of_a_latency_has_no_histogram() -> None:
    module = fh.HookedModule(Returning())
    detector = LatencyDetector()
    module.register_forward_hook(detector)
    module(1)
    assert repr(detector).startswith("LatencyDetector(calls=1, total=")
    assert "histogram" not in repr(detector)


def test_a_pending_result_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pending:
        def numbers(self, wait: bool) -> tuple[int, int] | None:
            return (1, 0) if wait else None

    monkeypatch.setattr(reductions, "reduce", lambda *_: Pending())
    # The first is read by torch, as it is not contiguous; the second at once.
    model = nn.Sequential(nn.Identity(), Returning(torch.Tensor.contiguous))
    detector = NonFiniteDetector()
    with fh.register(model, "*", detector):
        model(torch.full((2, 3), math.nan).t())
    assert detector.modules["1"].snapshot()["nan"] == 6
    assert detector.first == "0"


@pytest.mark.cuda
def test_the_first_module_with_nan_on_a_gpu_is_named(model: nn.Sequential) -> None:
    detector = NonFiniteDetector()
    with fh.register(model, "**", detector):
        model(torch.ones(2, device="cuda"))
    assert detector.first == "broken.0"
