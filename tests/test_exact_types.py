"""Exact types: libraries find their rules for the plain class of an instrumented module."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(params=["register", "capture", "instrument"])
def hooked(request: pytest.FixtureRequest, model: nn.Sequential) -> Iterator[nn.Sequential]:
    """A copy of `model` with an observing hook, a capture or instrumentation alone."""
    observed = copy.deepcopy(model)
    observers = {
        "register": lambda: fh.register(observed, "*", lambda *_: None),
        "capture": lambda: fh.capture(observed, "*"),
        "instrument": lambda: fh.instrument(observed),
    }
    with observers[request.param]():
        yield observed
        observed(X)


X = torch.linspace(-1, 1, 20).reshape(5, 4)


def test_the_instrumented_class_equals_the_plain_one(hooked: nn.Sequential) -> None:
    cls = type(hooked[1])
    assert cls == nn.ReLU
    assert nn.ReLU == cls
    assert cls != nn.Linear
    assert {nn.ReLU: "rule"}[cls] == "rule"
    assert {cls: "rule"}[nn.ReLU] == "rule"
    assert cls in {nn.Linear, nn.ReLU}


def test_the_signature_equals_that_of_a_plain_module(
    model: nn.Sequential, hooked: nn.Sequential
) -> None:
    for plain, other in zip(model.modules(), hooked.modules(), strict=True):
        assert inspect.signature(other) == inspect.signature(plain)
        assert inspect.signature(other._call_impl) == inspect.signature(plain._call_impl)


def test_a_subclass_of_the_instrumented_class_equals_only_itself(hooked: nn.Sequential) -> None:
    cls = type(hooked[1])

    class Mine(cls):  # type: ignore[misc, valid-type]
        pass

    assert Mine == Mine  # noqa: PLR0124 (equality is what is tested)
    assert Mine != cls
    assert Mine != nn.ReLU


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Derived(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_dynamo_traces_super_calls() -> None:
    model = nn.Sequential(Derived(), Derived())
    expected = model(X)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    handles = fh.register(model, "*", lambda *_: None)
    assert torch.equal(compiled(X), expected)
    handles.remove()


@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
@pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients")
@pytest.mark.parametrize("rules", ["DeepLift", "LRP"])
def test_captum_finds_its_rules(model: nn.Sequential, hooked: nn.Sequential, rules: str) -> None:
    attribution = getattr(pytest.importorskip("captum.attr"), rules)
    expected = attribution(model).attribute(X, target=1)
    assert torch.equal(attribution(hooked).attribute(X, target=1), expected)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantize_dynamic_finds_its_modules(model: nn.Sequential, hooked: nn.Sequential) -> None:
    quantize = torch.ao.quantization.quantize_dynamic
    expected = quantize(model, {nn.Linear}, dtype=torch.qint8)
    quantized = quantize(hooked, {nn.Linear}, dtype=torch.qint8)
    assert [type(each) for each in quantized.modules()] == [
        type(each) for each in expected.modules()
    ]
    assert torch.equal(quantized(X), expected(X))
