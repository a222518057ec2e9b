"""Quantisation of models with hooks: `prepare` registers observers, `convert` replaces modules."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

import ferrohook as fh
from support.internals import instrumented

if TYPE_CHECKING:
    from collections.abc import Callable

# Of torch: that its quantisation is deprecated, as its own calls do.
pytestmark = pytest.mark.filterwarnings("ignore:(?!quantisation)")


class Net(nn.Module):
    """A GRUCell, which `convert` leaves as it is, among modules that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.drop, self.inp = nn.Dropout(0.1), nn.Linear(4, 4)
        self.cell, self.out = nn.GRUCell(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.relu(self.bn(self.conv(self.quant(x))))).mean((2, 3))
        return self.out(self.cell(self.dequant(self.inp(x))))  # type: ignore[no-any-return]


X = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(1))
HOOKED = ["conv", "inp", "cell"]


def instrument(model: nn.Module, hook: Any, **options: Any) -> Callable[[], None]:
    instrumentation = fh.instrument(model, **options)
    handles = fh.register(model, HOOKED, hook)

    def undo() -> None:
        handles.remove()
        instrumentation.restore()

    return undo


def register(model: nn.Module, hook: Any) -> Callable[[], None]:
    return fh.register(model, HOOKED, hook).remove


def wrap(model: nn.Module, hook: Any) -> Callable[[], None]:
    wrappers = {name: fh.HookedModule(getattr(model, name)) for name in HOOKED}
    handles = [wrapper.register_forward_hook(hook) for wrapper in wrappers.values()]
    for name, wrapper in wrappers.items():
        setattr(model, name, wrapper)

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


WAYS: dict[str, Callable[..., Callable[[], None]]] = {
    "instrument": instrument,
    "register": register,
    "wrap": wrap,
}
if getattr(sys, "_is_gil_enabled", lambda: True)():
    WAYS["keep_class"] = functools.partial(instrument, keep_class="**")


def quantize(model: Any, flow: str) -> nn.Module:
    """Quantises a model in place."""
    kind = "qat" if flow == "qat" else "static"
    config = {
        "static": quantization.get_default_qconfig,
        "qat": quantization.get_default_qat_qconfig,
    }
    model.qconfig = config[kind]("x86")
    model.out.qconfig = None
    if flow == "dynamic":
        return quantization.quantize_dynamic(model, {nn.Linear, nn.GRUCell}, inplace=True)  # type: ignore[no-any-return]
    if flow == "qat":
        quantization.prepare_qat(model.train(), inplace=True)
        torch.manual_seed(3)
        model(X)
        model.eval()
    else:
        quantization.prepare(model, inplace=True)
    model(X)
    mapping = {} if flow == "nothing is replaced" else None
    return quantization.convert(model, inplace=True, mapping=mapping)  # type: ignore[no-any-return]


@pytest.mark.parametrize("flow", ["static", "nothing is replaced", "qat", "dynamic"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hooked_model_is_quantised_as_a_plain_one(way: str, flow: str) -> None:
    plain = quantize(Net().eval(), flow)
    expected = plain(X)
    model, seen = Net().eval(), []
    undo = WAYS[way](model, lambda module, _args, _output: seen.append(module.__class__))
    quantize(model, flow)
    seen.clear()
    assert torch.equal(model(X), expected)
    classes = {name: module.__class__ for name, module in plain.named_modules()}
    assert {name: module.__class__ for name, module in model.named_modules()} == classes
    # Hooks follow to the replacements, under the handles that they have.
    assert seen == [classes[name] for name in HOOKED]
    undo()
    assert torch.equal(model(X), expected)
    assert len(seen) == len(HOOKED)
    assert not instrumented(model)


def test_a_model_may_be_instrumented_between_prepare_and_convert() -> None:
    plain = quantize(Net().eval(), "static")
    model: Any = Net().eval()
    model.qconfig = quantization.get_default_qconfig("x86")
    model.out.qconfig = None
    quantization.prepare(model, inplace=True)
    with fh.instrument(model):
        model(X)
        quantization.convert(model, inplace=True)
        assert torch.equal(model(X), plain(X))
    assert not instrumented(model)


@pytest.mark.parametrize("way", ["instrument", "register", "wrap"])
def test_hooks_on_a_copy_follow_to_its_replacements(way: str) -> None:
    model, seen = Net().eval(), []
    WAYS[way](model, lambda *_: seen.append(1))
    quantized = quantization.quantize_dynamic(model, {nn.Linear})
    assert isinstance(quantized.inp, torch.ao.nn.quantized.dynamic.Linear)
    quantized(X)
    assert len(seen) == len(HOOKED)


def test_backward_hooks_follow_too() -> None:
    model, seen = Net().train(), []
    handles = fh.register(
        model, "inp", lambda module, *_: seen.append(module.__class__), phase="backward"
    )
    model.qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    quantization.prepare_qat(model, inplace=True)
    with handles:
        model(X).sum().backward()
    assert seen == [torch.ao.nn.qat.Linear]
    assert not instrumented(model)


@pytest.mark.parametrize("way", ["instrument", "register", "wrap"])
def test_hooks_on_modules_that_are_fused_away_are_reported(way: str) -> None:
    model = Net().eval()
    WAYS[way](model, lambda *_: None)
    fh.register(model, "bn", lambda *_: None)
    with pytest.warns(fh.errors.ReplacedWarning) as warned:
        quantization.fuse_modules(model, [["conv", "bn", "relu"]], inplace=True)
    assert [str(each.message).split(" (")[0] for each in warned] == [
        "quantisation removed 'conv'",
        "quantisation removed 'bn'",
    ]
    # The fused module has a copy of the convolution, hooks included.
    with pytest.warns(
        fh.errors.ReplacedWarning, match=r"removed '0' \(.*Conv2d\)* from ConvReLU2d"
    ):
        quantize(model, "static")


def test_a_fused_module_keeps_hooks_on_its_parts() -> None:
    model, seen = Net().train(), []
    fh.register(model, "bn", lambda *_: seen.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", fh.errors.ReplacedWarning)
        quantization.fuse_modules_qat(model, [["bn", "relu"]], inplace=True)
    model(X)
    assert seen == [1]


class Calling(nn.Identity):
    """A replacement that cannot be instrumented."""

    _call_impl = nn.Identity.forward  # type: ignore[assignment]

    @classmethod
    def from_float(cls, _module: nn.Module) -> Calling:
        return cls()


def test_a_replacement_that_cannot_have_hooks_is_reported() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model.qconfig = quantization.default_dynamic_qconfig
    quantization.propagate_qconfig_(model)
    fh.register(model, "0", lambda *_: None)
    with pytest.warns(
        fh.errors.ReplacedWarning, match="will not fire: its class overrides _call_impl"
    ):
        quantization.convert(model, {nn.Linear: Calling}, inplace=True)
    assert isinstance(model[0], Calling)
