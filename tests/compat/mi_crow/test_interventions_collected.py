"""Metadata and tensors of detectors, by context."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import gc
import json
import pickle
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.interventions import Model, Seen, X, on
from support.threads import in_thread

if TYPE_CHECKING:
    from pathlib import Path


def test_metadata_is_a_dict_by_context() -> None:
    detector = Seen()
    detector.metadata["calls"] = 1
    detector.tensor_metadata = {"x": X}
    assert detector.metadata == {"calls": 1}
    assert repr(detector.metadata) == "{'calls': 1}"
    copied = contextvars.copy_context()
    copied.run(detector.metadata.update, calls=2, more=True)
    assert detector.metadata == {"calls": 1}
    assert copied.run(dict, detector.metadata) == {"calls": 2, "more": True}
    assert (
        copied.run(detector.tensor_metadata.get, "x") is X
    )  # inherited by a copied context, as any context variable
    assert in_thread(lambda: dict(detector.metadata)) == {}
    del detector.metadata["calls"]
    assert not detector.metadata
    assert len(copied.run(dict, detector.metadata)) == 2
    with pytest.raises(KeyError):
        del detector.metadata["calls"]
    detector.metadata = {"fresh": 0}
    assert [*detector.metadata] == ["fresh"]


def test_metadata_is_a_dict() -> None:
    detector = fi.LayerActivationDetector("")
    on(module := nn.Identity(), detector)
    empty = detector.metadata
    module(X)
    metadata, tensors = detector.metadata, detector.tensor_metadata
    shape = {"activations_shape": tuple(X.shape)}
    assert isinstance(metadata, dict)
    assert json.dumps(metadata) == json.dumps(shape)
    assert metadata | {"a": 1} == shape | {"a": 1}
    assert {"a": 1} | metadata == {"a": 1} | shape
    assert {**metadata} == metadata.copy() == copy.copy(metadata) == empty == shape
    assert type(metadata.copy()) is type(copy.deepcopy(metadata)) is dict
    assert pickle.loads(pickle.dumps(metadata)) == shape
    assert [*reversed(metadata)] == [*shape]
    metadata |= {"b": 2}
    assert detector.metadata == metadata == shape | {"b": 2}
    assert json.loads(json.dumps(metadata))["b"] == 2
    assert metadata.pop("b") == 2
    assert detector.metadata.setdefault("c", 3) == metadata["c"] == 3
    assert isinstance(tensors, dict)
    for copied in (tensors.copy(), tensors | {}, {} | tensors, {**tensors}):
        assert type(copied) is dict
        assert torch.equal(copied["activations"], X)


def test_tasks_are_isolated(switch_often: None) -> None:
    detector = fi.LayerActivationDetector("")
    on(module := nn.Identity(), detector)

    async def work(number: int) -> bool:
        x = torch.full((2,), float(number))
        right = True
        for _ in range(20):
            module(x)
            await asyncio.sleep(0)
            right &= torch.equal(detector.tensor_metadata["activations"], x)
        return right

    async def main() -> list[bool]:
        module(X)
        right = await asyncio.gather(*map(work, range(8)))
        return [*right, torch.equal(detector.tensor_metadata["activations"], X)]

    assert asyncio.run(main()) == [True] * 9


def test_collected_tensors_are_freed_with_their_thread_and_with_their_detector() -> None:
    detector = fi.LayerActivationDetector("")
    layers = on(module := nn.Identity(), detector)

    def call(detector: fi.LayerActivationDetector) -> weakref.ref[Tensor]:
        module(X)
        return weakref.ref(detector.tensor_metadata["activations"])

    gc.disable()
    try:
        assert in_thread(functools.partial(call, detector))() is None
        first = call(detector)
        assert first() is not None
        second = call(detector)
        assert first() is None
        assert second() is not None
        layers.unregister_hook(detector)
        del detector
        assert second() is None
    finally:
        gc.enable()


def test_dropped_detectors_leave_nothing_in_a_context() -> None:
    def size() -> int:
        return len(contextvars.copy_context())

    fi.LayerActivationDetector("").metadata["x"] = 1
    before = size()
    for number in range(50):
        detector = fi.LayerActivationDetector("")
        assert not detector.metadata  # nothing of the previous detector
        assert not detector.tensor_metadata
        detector.metadata["x"] = number
        detector.tensor_metadata["x"] = X
    assert size() <= before + 2


def test_the_repr_of_a_detector_counts_what_it_collected() -> None:
    detector = fi.LayerActivationDetector("head", hook_id="mine")
    assert repr(detector) == "<LayerActivationDetector 'mine', forward>"
    model = Model()
    fi.Layers(model).register_hook("head", detector)
    model(X)
    expected = "<LayerActivationDetector 'mine', forward on 'head', tensors=1, values=1>"
    assert repr(detector) == expected


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_detectors_save_to_their_store(kind: str, tmp_path: Path) -> None:
    store = fh.data.MemoryStore() if kind == "memory" else fh.data.LocalStore(tmp_path)
    model = Model()
    detector = fi.LayerActivationDetector("model_head", store=store)
    other = Seen(store=store)
    layers = fi.Layers(model)
    layers.register_hook("model_head", detector)
    layers.register_hook("head", other)
    outputs = []
    for batch in range(2):
        outputs.append(model(X + batch))
        detector.save("run", batch)
        other.tensor_metadata["sum"] = outputs[-1].sum()
        other.save("run", batch)
        store.complete("run", batch)
    for batch, output in enumerate(outputs):
        found = store.get("run", batch, "head")
        assert [*found] == ["activations", "sum"]
        assert torch.equal(found["activations"], output)
        assert found["sum"] == output.sum()
    store.close()
    with pytest.raises(fh.errors.StoreError, match="closed"):
        detector.save("run", 2)
    layers.unregister_hook(detector)
    with pytest.raises(fh.HookError, match="not registered on a layer"):
        detector.save("run", 2)
    layers.register_hook("head", nowhere := Seen())
    with pytest.raises(fh.HookError, match="no store"):
        nowhere.save("run", 2)
    with pytest.raises(fh.HookTypeError, match=r"a ferrohook.data.Store or None, got object"):
        Seen(store=object())
