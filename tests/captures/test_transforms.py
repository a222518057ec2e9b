"""Captures and hooks of modules that transforms of `torch.func` call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import ferrohook as fh

# Of torch's own, at the first derivative in forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def net(*, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.ReLU(inplace=True) if inplace else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 3), middle, nn.Linear(3, 1)).requires_grad_(False)


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f: vmap(f)(X),
    "vmap of the last dimension": lambda f: vmap(f, in_dims=1)(X.T),
    "grad": lambda f: vmap(grad(lambda z: f(z).sum()))(X),
    "jacrev": lambda f: vmap(jacrev(f))(X),
    "jacfwd": lambda f: jacfwd(f)(X[0]),
    "hessian": lambda f: hessian(lambda z: f(z).sum())(X[0]),
    "jvp": lambda f: jvp(f, (X,), (X,)),
}
VALUES = {"jacfwd": X[0], "hessian": X[0]}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("copy", ["checked", "clone", "ref"])
def test_a_capture_is_read_after_the_transform(name: str, copy: Any) -> None:
    model = net()
    with fh.capture(model, "0", copy=copy) as acts:
        TRANSFORMS[name](model)
    expected = model[0](VALUES.get(name, X))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(acts["0"])
    # Matrices multiply with others under a transform.
    assert torch.allclose(acts["0"], expected, atol=1e-6)
    assert str(tuple(expected.shape)) in str(acts)


def test_nested_transforms_come_in_their_order() -> None:
    model, x = net(), torch.randn(2, 5, 4)
    with fh.capture(model, "0") as acts:
        vmap(vmap(model), in_dims=1)(x)
    assert torch.allclose(acts["0"], model[0](x).transpose(0, 1), atol=1e-6)


def test_a_slice_is_that_of_each_sample() -> None:
    model = net()
    with fh.capture(model, "0", slice=(slice(0, 2),), dtype=torch.float64) as acts:
        vmap(model)(X)
    assert torch.allclose(acts["0"], model[0](X)[:, :2].double(), atol=1e-6)


def test_a_capture_is_read_inside_the_transform() -> None:
    model = net()
    with fh.capture(model, "0", detach=False) as acts:

        def both(x: Tensor) -> Tensor:
            model(x)
            assert acts["0"].shape == (3,)
            return acts["0"].sum()

        assert torch.allclose(vmap(both)(X), model[0](X).sum(-1), atol=1e-6)
        expected = model[0].weight.sum(0)
        assert torch.allclose(grad(both)(X[0]), expected, atol=1e-6)


@pytest.mark.parametrize("copy", ["checked", "ref", "clone"])
@pytest.mark.parametrize("detach", [True, False])
def test_values_of_vmap_are_detached_unless_asked_otherwise(copy: Any, detach: bool) -> None:
    model = net().requires_grad_()
    with fh.capture(model, "0", copy=copy, detach=detach) as acts:
        vmap(model)(X)
    assert acts["0"].requires_grad is not detach


@pytest.mark.parametrize("name", ["vmap", "grad", "jacrev"])
def test_a_write_in_place_is_found(name: str) -> None:
    model = net(inplace=True)
    with fh.capture(model, "0") as acts:
        TRANSFORMS[name](model)
    with pytest.raises(fh.StaleActivationError):
        acts["0"]


def test_gradients_under_a_transform() -> None:
    model = net()
    with fh.capture(model, "0", grads=True) as acts:
        grad(lambda z: model(z).sum())(X[0])
    slope = 1 - torch.tanh(model[0](X[0])) ** 2
    assert torch.allclose(acts.grads["0"], slope * model[2].weight[0], atol=1e-6)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(acts.grads["0"])


def test_gradients_of_a_batched_backward() -> None:
    model, x = net(), X[0].clone().requires_grad_()
    for kept in (slice(None), slice(1, None)):
        with fh.capture(model, "0", grads=True, slice=kept) as acts:
            torch.autograd.grad(model(x), x, torch.eye(1).expand(2, 1), is_grads_batched=True)
        slope = 1 - torch.tanh(model[0](x)) ** 2
        assert torch.allclose(acts.grads["0"], (slope * model[2].weight).expand(2, 3)[:, kept])


def test_bytes_are_those_of_all_samples() -> None:
    model = net()
    with (
        fh.capture(model, "0", max_bytes=5 * 3 * 4 - 1),
        pytest.raises(fh.errors.CaptureBudgetError),
    ):
        vmap(model)(X)


@pytest.mark.parametrize("name", ["grad", "jacrev"])
@pytest.mark.parametrize("trained", [False, True])
def test_backward_hooks_fire(name: str, trained: bool) -> None:
    model, fired = net().requires_grad_(trained), []
    expected = TRANSFORMS[name](model)
    with fh.register(model, "0", lambda _m, gi, go: fired.append((gi, go)), phase="backward"):
        assert torch.allclose(TRANSFORMS[name](model), expected, atol=1e-6)
    assert fired


@pytest.mark.parametrize("name", ["jacfwd", "jvp", "hessian"])
def test_backward_hooks_let_forward_mode_pass(name: str) -> None:
    model = net().requires_grad_(True)
    expected = TRANSFORMS[name](model)
    fh.register(model, "0", lambda *_: None, phase="backward")
    for ours, wanted in zip(TRANSFORMS[name](model), expected, strict=True):
        assert torch.allclose(ours, wanted, atol=1e-6)
