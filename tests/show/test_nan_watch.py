"""`nan_watch`: step, batch and module of the first NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

# Torch 2.13 warns of modules whose input needs no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


class Faulty(nn.Module):
    """Adds the value of its attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.added = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added


class Root(nn.Module):
    """Square root, whose gradient at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt() + x


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), Faulty(), nn.Linear(3, 2))


X = torch.ones(4, 3)


def test_batch_and_module_are_named(model: nn.Sequential) -> None:
    with fh.nan_watch(model) as watch:
        for number in range(6):
            model[1].added = math.nan if number in {2, 3} else math.inf if number == 5 else 0.0
            model(X)
    assert [(it.batch, it.module, it.phase, it.step) for it in watch.found] == [
        (number, "1", "forward", 0) for number in (2, 3, 5)
    ]
    assert watch.first == watch.found[0]
    # The outputs of later modules and of the model count too.
    assert (watch.found[0].nan, watch.found[0].inf) == (12 + 8 + 8, 0)
    assert watch.found[2].inf >= 12
    text = "28 NaN and 0 infinities in step 0, batch 2, first in the output of '1'"
    assert str(watch.first) == text
    assert text in repr(watch)
    model(X)
    assert watch.batches == 6


def test_a_stopping_watch_raises_in_that_call(model: nn.Sequential) -> None:
    model[1].added = math.nan
    with fh.nan_watch(model, stop=True) as watch:
        for _ in range(2):
            with pytest.raises(fh.errors.NonFiniteError, match="first in the output of '1'"):
                model(X)
        with pytest.raises(FloatingPointError):
            model(X)
    assert [each.batch for each in watch.found] == [0, 1, 2]


def test_a_reset_forgets_all(model: nn.Sequential) -> None:
    with fh.nan_watch(model, gradients=True) as watch:
        model[1].added = math.nan
        model(X).sum().backward()
        assert watch.first is not None
        watch.step = 3
        watch.reset()
        assert (watch.found, watch.batches, watch.step) == ([], 0, 0)
        model[1].added = 0.0
        model(X)
        assert repr(watch) == "<NanWatch of 4 modules, 1 batches: all finite>"
        model[1].added = math.nan
        model(X)
    assert [(each.batch, each.module) for each in watch.found] == [(1, "1")]


def test_gradients_are_named_with_their_step(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[1] = Root()
    with fh.nan_watch(model, optimizer=optimizer, gradients=True) as watch:
        for step in range(3):
            for _ in range(2):  # gradients are accumulated
                output = model(X)
                (output if step == 1 else output * 0 + model[0](X).sum()).sum().backward()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0, 0, 0)
            optimizer.step()
            optimizer.zero_grad()
    assert watch.step == 3
    assert {(each.step, each.batch, each.module, each.phase) for each in watch.found} >= {
        (1, 2, "0", "backward"),
        (1, 3, "0", "backward"),
    }
    assert all(each.phase == "backward" and each.module == "0" for each in watch.found)
    optimizer.step()
    assert watch.step == 3  # its hooks on the optimizer are gone


def test_no_step_is_made_on_gradients_that_stop(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[1] = Root()
    before = model[2].weight.detach().clone()
    with fh.nan_watch(model, optimizer=optimizer, gradients=True, stop=True) as watch:
        model(X).sum().backward()
        with pytest.raises(
            fh.errors.NonFiniteError, match="batch 0, first in the gradient of the output of '0'"
        ):
            optimizer.step()
    assert torch.equal(model[2].weight, before)
    assert watch.step == 0
    with fh.nan_watch(model, gradients=True, stop=True) as watch:
        model(X).sum().backward()
        with pytest.raises(fh.errors.NonFiniteError):
            watch.check()
        model(X).sum().backward()
        with pytest.raises(fh.errors.NonFiniteError, match="batch 1"):
            model(X)
    with fh.nan_watch(model, gradients=True) as watch:
        model(X).sum().backward()
    assert [each.batch for each in watch.found] == [0]  # found as it was left


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_step_is_made_on_gradients_of_parameters_that_are_not_finite(
    model: nn.Sequential, gradients: bool, bad: float
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [each.detach().clone() for each in model.parameters()]
    options: Any = {"optimizer": optimizer, "gradients": gradients, "stop": True}
    with fh.nan_watch(model, **options) as watch:
        model(X).sum().backward()
        assert isinstance(model[2].weight.grad, torch.Tensor)
        model[2].weight.grad[0, 0] = bad
        told = r"batch 0, first in the gradient of '2\.weight'"
        with pytest.raises(fh.errors.NonFiniteError, match=told):
            optimizer.step()
        assert watch.step == 0
        assert all(map(torch.equal, model.parameters(), before))
        model[2].weight.grad.zero_()
        optimizer.step()
    assert watch.step == 1
    assert [(each.module, each.phase) for each in watch.found] == [("2.weight", "parameter")]


def test_each_parameter_of_the_optimizer_is_looked_at(model: nn.Sequential) -> None:
    """Parameters outside of the model have no names."""
    bad, fine = (nn.Parameter(torch.ones(2)) for _ in range(2))
    bad.grad, fine.grad = torch.tensor([math.nan, 1.0]), torch.ones(2)
    optimizer = torch.optim.SGD([bad, fine], 0.1)
    with (
        fh.nan_watch(model, optimizer=optimizer, stop=True),
        pytest.raises(fh.errors.NonFiniteError, match=r"1 NaN .*gradient of 'a parameter'"),
    ):
        optimizer.step()
    assert torch.equal(bad, torch.ones(2))


def test_calls_that_raise_are_looked_at_and_keep_their_error(model: nn.Sequential) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    model[1].added = math.nan
    with fh.nan_watch(model, stop=True) as watch:
        with fh.register(model, "2", fail), pytest.raises(ZeroDivisionError):
            model(X)
        assert watch.batches == 1
        with pytest.raises(fh.errors.NonFiniteError, match="batch 0, first in the output of '1'"):
            watch.check()
    with (
        fh.nan_watch(model, stop=True) as watch,
        fh.register(model, "2", fail),
        pytest.raises(ZeroDivisionError),
    ):
        model(X)
    assert [(each.batch, each.module) for each in watch.found] == [(0, "1")]


def test_modules_may_be_left_out_and_bad_arguments_are_refused(model: nn.Sequential) -> None:
    model[1].added = math.nan
    classes = [id(type(module)) for module in model.modules()]
    with fh.nan_watch(model, ["0", "2"]) as watch:
        model(X)
    assert watch.found[0].module == "2"
    assert [id(type(module)) for module in model.modules()] == classes
    with pytest.raises(fh.HookTypeError, match="optimizer must be a torch"):
        fh.nan_watch(model, optimizer=1)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="nan_watch needs an instance of nn"):
        fh.nan_watch(1)  # type: ignore[arg-type]
    with pytest.raises(fh.SelectionError, match="nope"):
        fh.nan_watch(model, "nope")
