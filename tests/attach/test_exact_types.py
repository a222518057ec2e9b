"""Exact types: libraries find their rules for the plain class of an instrumented module."""

from __future__ import annotations

import abc
import copy
import inspect
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.compiling import compiled

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

    assert Mine == Mine  # noqa: PLR0124 (the test compares them)
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
    call = torch.compile(model, backend="eager", fullgraph=True)
    handles = fh.register(model, "*", lambda *_: None)
    assert torch.equal(call(X), expected)
    handles.remove()


class Scaled(nn.Linear):
    factor = 3

    @classmethod
    def scale(cls) -> int:
        return cls.factor


class ScaledMore(Scaled):
    @classmethod
    def scale(cls) -> int:
        return super().scale() + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale()


class Inspecting(Scaled):
    """Reads its class in both ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * type(self).factor + self.__class__.factor
        if self.__class__ is Inspecting:
            y = y * 2
        return y + 1 if type(self).__name__ == self.__class__.__name__ else y


class AbstractInspecting(abc.ABC, Inspecting):
    """Class with a custom metaclass."""


class AbstractScaled(abc.ABC, ScaledMore):
    """Class with a custom metaclass."""


@compiled
@pytest.mark.parametrize("hooks", [0, 1])
@pytest.mark.parametrize("cls", [ScaledMore, Inspecting, AbstractInspecting, AbstractScaled])
def test_dynamo_traces_forwards_that_read_their_class(cls: type[nn.Linear], hooks: int) -> None:
    model = nn.Sequential(cls(4, 4), cls(4, 4))
    expected = model(X)
    with fh.instrument(model):
        for _ in range(hooks):
            fh.register(model, "*", lambda *_: None)
        call = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(model(X), expected)
        assert torch.equal(call(X), expected)


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
    assert [each.__class__ for each in quantized.modules()] == [
        each.__class__ for each in expected.modules()
    ]
    assert torch.equal(quantized(X), expected(X))
