"""Activation checkpointing: backward repeats the forward in its scopes, or raises."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ferrohook as fh
from ferrohook.detectors import NonFiniteDetector
from support.interpreters import run_fresh
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEFT = r"^backward\(\) repeats a checkpointed forward, but the scope .* was left"

Pass = tuple[Tensor, Tensor]
"""The input and the output of a forward."""


@pytest.fixture(params=[True, False], ids=["reentrant", "non-reentrant"])
def run(request: pytest.FixtureRequest) -> Callable[..., Pass]:
    def forward(model: nn.Module, x: Tensor | None = None) -> Pass:
        x = torch.ones(1, 3, requires_grad=True) if x is None else x
        return x, checkpoint(model, x, use_reentrant=request.param)

    return forward


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


@contextlib.contextmanager
def steered(model: nn.Module, what: str = "0") -> Iterator[fh.Scope]:
    # Saves no tensor for backward: PyTorch's comparison of saved tensors does not notice it.
    with fh.scope() as s:
        fh.register(model, what, lambda _module, _args, output: output + 5, scope=s)
        yield s


def expected(model: nn.Module) -> Tensor:
    x = torch.ones(1, 3, requires_grad=True)
    with steered(model):
        model(x).sum().backward()
    assert x.grad is not None
    return x.grad


def grad_of(x: Tensor, out: Tensor) -> Tensor:
    out.sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_backward_inside_the_scope_repeats_its_hooks(model: nn.Module, run: Any) -> None:
    with steered(model):
        x, out = run(model)
        grad = grad_of(x, out)
    assert torch.equal(grad, expected(model))


@pytest.mark.parametrize("phase", ["forward", "forward_pre", "typed"])
def test_a_backward_after_the_scope_raises(model: nn.Module, run: Any, phase: str) -> None:
    hooks: dict[str, Any] = {
        "forward": lambda _module, _args, output: output + 5,
        "forward_pre": lambda _module, args: (args[0] + 5,),
        "typed": fh.ForwardPreHook(lambda value: value + 5),
    }
    with fh.scope() as s:
        options = {"phase": phase} if phase != "typed" else {}
        fh.register(model, "0", hooks[phase], scope=s, **options)
        x, out = run(model)
    with pytest.raises(fh.HookError, match=LEFT):
        out.sum().backward()
    assert x.grad is None
    x, out = run(model)  # nothing is left behind
    grad_of(x, out)


def test_a_backward_on_another_thread_repeats_the_hooks(model: nn.Module, run: Any) -> None:
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(int).result(LIMIT)  # starts the thread outside of the scope
        with steered(model):
            x, out = run(model)
            grad = elsewhere.submit(grad_of, x, out).result(LIMIT)
        assert torch.equal(grad, expected(model))
        # Its context is as before.
        assert torch.equal(elsewhere.submit(model, x).result(LIMIT), model(x))


def test_captures_and_observers_may_be_left_before_backward(model: nn.Module, run: Any) -> None:
    x, out = run(model)
    plain = grad_of(x, out)
    seen: list[Any] = []
    with fh.scope() as s, fh.capture(model, "0") as acts:
        fh.register(model, "0", fh.ForwardHook(lambda *values: seen.append(values)), scope=s)
        fh.register(model, "0", NonFiniteDetector(), scope=s)
        x, out = run(model)
    assert torch.equal(grad_of(x, out), plain)
    assert len(acts) == len(seen) == 1


def test_hooks_outside_of_the_region_may_be_left_before_backward(
    model: nn.Sequential, run: Any
) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    with steered(model, "2"):
        _, inner = run(model[:2], x)
        out = model[2](inner)
    grad = grad_of(x, out)
    x, out = run(model)
    assert torch.allclose(grad, grad_of(x, out))


def test_only_the_scopes_whose_hooks_ran_matter(model: nn.Module, run: Any) -> None:
    with steered(model):
        with fh.scope():
            x, out = run(model)
        grad = grad_of(x, out)
    assert torch.equal(grad, expected(model))


@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
def test_a_request_that_its_hook_closes_starts_no_more_hooks(model: nn.Module, run: Any) -> None:
    started: list[str] = []

    def close(*_: Any) -> None:
        started.append("close")
        request.close()

    later = fh.on("*", lambda *_: started.append("later"))
    with fh.Plan(fh.on("0", close), later).prepare(model) as prepared:
        request = prepared.open()
        with request:
            run(model)
    assert started == ["close"]


def test_an_exception_of_the_region_passes(model: nn.Module, run: Any) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    with fh.scope() as s:
        fh.register(model, "1", fails, scope=s)
        with pytest.raises(ZeroDivisionError):
            run(model)
    x, out = run(model)
    grad_of(x, out)


class Tokens(nn.Module):
    """A model of tokens whose layer is checkpointed, or not (`reentrant` is None)."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

        x = self.embed(input_ids)
        if self.reentrant is None:
            return run(x)
        repeated: Tensor = checkpoint(run, x, use_reentrant=self.reentrant)
        return repeated


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_positions_are_those_of_the_forward_that_is_repeated(reentrant: bool, both: bool) -> None:
    """Another forward of the request, with other padding, came before backward."""
    ids, grads = torch.arange(5)[None], []
    plan = fh.Plan(fh.on("layer", fh.Scale(3.0), at=0))
    for model in (Tokens(reentrant=None), Tokens(reentrant=reentrant)):
        with plan.prepare(model) as prepared, prepared.open():
            padded = model(ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
            later = model(ids)
            (padded.sum() + later.sum() if both else padded.sum()).backward()
        grads.append(model.embed.weight.grad)
    torch.testing.assert_close(*grads)


def test_a_program_without_wrappers_repeats_the_scopes_of_the_forward() -> None:
    """A fresh interpreter: only instrumenting has torch's functions replaced."""
    done = run_fresh("""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import ferrohook as fh
model, x = nn.Sequential(nn.Tanh()), torch.ones(1, 3, requires_grad=True)
with fh.scope() as scope:
    fh.register(model, "0", lambda module, args, output: output * 3, scope=scope)
    y = checkpoint(model, x, use_reentrant=True)
    with fh.scope(), fh.capture(model, "0") as acts:
        y.sum().backward()
assert torch.allclose(x.grad, 3 / torch.cosh(torch.ones(1, 3)) ** 2), x.grad
assert not acts, acts
""")
    assert done.returncode == 0, done.stderr


def test_composable_checkpointing_imported_before_ferrohook_repeats_the_hooks() -> None:
    done = run_fresh("""
import importlib
import torch
from torch import nn
from torch.distributed._composable import checkpoint, checkpoint_activation
import ferrohook as fh
from ferrohook.attach import checkpointing
name = checkpointing._name
original = getattr(torch.utils.checkpoint, name).__wrapped__
setattr(torch.utils.checkpoint, name, original)
setattr(checkpoint_activation, name, original)
importlib.reload(checkpointing)
model = checkpoint(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
with fh.scope():
    fh.register(model, "0", lambda module, args, output: output + 5)
    y = model(torch.ones(1, 3, requires_grad=True))
try:
    y.sum().backward()
except fh.HookError as error:
    assert "was left" in str(error), error
else:
    raise AssertionError("backward repeated the forward without the hooks")
""")
    assert done.returncode == 0, done.stderr
