"""Interventions on gradients, against PyTorch's own backward hooks that compute the formula."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.effects.typed import Phase

WIDTH = 4
V = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
UNIT = V / V.norm()


def along(x: Tensor, high: float = torch.inf) -> Tensor:
    return (x @ UNIT).clamp(max=high)[..., None] * UNIT


KINDS: dict[str, tuple[fh.Intervention, Callable[[Tensor], Tensor]]] = {
    "Add": (fh.Add(V, scale=2.0), lambda x: x + 2 * V),
    "Scale": (fh.Scale(-0.5), lambda x: x * -0.5),
    "Ablate": (fh.Ablate(V), lambda x: x - along(x)),
    "Clamp": (fh.Clamp(V, high=0.1), lambda x: x - along(x) + along(x, high=0.1)),
    "Replace": (fh.Replace(V), V.expand_as),
    "Zero": (fh.Zero(), torch.zeros_like),
}
PHASES: tuple[Phase, ...] = ("backward_pre", "backward")
METHODS = {
    "backward_pre": "register_full_backward_pre_hook",
    "backward": "register_full_backward_hook",
}
phases = pytest.mark.parametrize("phase", PHASES)


class Pair(nn.Module):
    """Takes and returns two tensors, in a structure of this kind."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, one: Tensor, other: Tensor) -> Any:
        both = (one * other, one + other.detach())
        return dict(zip("ab", both, strict=True)) if self.kind is dict else self.kind(both)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def gradients(net: nn.Module, call: Any = None) -> list[Tensor]:
    """Gradients of the input and the parameters."""
    x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH).double().requires_grad_()
    net.zero_grad()
    ((call or net)(x) ** 2).sum().backward()
    found = [x, *net.parameters()]
    return [each.grad.clone() for each in found if each.grad is not None]


def by_hand(phase: Phase, formula: Callable[[Tensor], Tensor]) -> list[Tensor]:
    net = model()
    if phase == "backward_pre":
        net[1].register_full_backward_pre_hook(lambda _module, grads: (formula(grads[0]),))
    else:
        net[1].register_full_backward_hook(lambda _module, grads, _outputs: (formula(grads[0]),))
    return gradients(net)


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@phases
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_and_a_plan_change_gradients(kind: str, phase: Phase) -> None:
    hook, formula = KINDS[kind]
    net, expected = model(), by_hand(phase, formula)
    with fh.register(net, "1", hook, phase=phase) as group:
        assert_equal(gradients(net), expected)
        assert group.calls == 1
    plan = fh.Plan.from_json(fh.Plan(fh.on("1", hook, phase=phase)).to_json())
    with plan.open(net):
        assert_equal(gradients(net), expected)
    wrapped = fh.HookedModule(net[1])
    getattr(wrapped, METHODS[phase])(hook)
    assert_equal(gradients(nn.Sequential(net[0], wrapped, net[2])), expected)


@phases
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_has_its_gradients_changed(phase: Phase, reentrant: bool) -> None:
    hook, formula = KINDS["Ablate"]
    net = model()
    with fh.register(net, "1", hook, phase=phase):
        call = functools.partial(checkpoint, net, use_reentrant=reentrant)
        assert_equal(gradients(net, call), by_hand(phase, formula))


@phases
def test_compiled_autograd_traces_them(phase: Phase) -> None:
    net, x = model(), torch.rand(3, WIDTH, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (net(x) ** 2).sum().backward()
        assert x.grad is not None
        return x.grad

    torch._dynamo.reset()
    with fh.register(net, "1", fh.Ablate(V), phase=phase):
        expected = step(x)
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.testing.assert_close(torch.compile(step, backend="aot_eager")(x), expected)


@pytest.mark.parametrize("kind", [tuple, list, dict])
@phases
def test_a_part_of_several_gradients_is_named(phase: Phase, kind: type) -> None:
    net = Pair(kind)
    values = [torch.rand(2, WIDTH, requires_grad=True) for _ in range(2)]

    def run() -> list[Tensor]:
        output = net(*values)
        one, other = output.values() if kind is dict else output
        return [*torch.autograd.grad(one.sum() + 2 * other.sum(), values)]

    plain = run()
    with fh.register(net, "", fh.Zero(output_index=1), phase=phase):
        changed = run()
    if phase == "backward_pre":  # without the second output
        assert_equal(changed, [values[1].detach(), values[0].detach()])
    else:
        assert_equal(changed, [plain[0], torch.zeros(2, WIDTH)])
    with (
        fh.register(net, "", fh.Zero(), phase=phase),
        pytest.raises(fh.HookTypeError, match="choose a tensor in it with output_index=0"),
    ):
        run()


@phases
def test_a_gradient_that_is_not_computed_stays_so(phase: Phase) -> None:
    net = Pair(tuple)
    one, other = torch.rand(WIDTH, requires_grad=True), torch.rand(WIDTH)
    with fh.register(net, "", fh.Scale(3.0, output_index=1), phase=phase):
        result, _ = net(one, other)  # the second output and the second input have no gradient
        (gradient,) = torch.autograd.grad(result.sum(), [one])
    assert torch.equal(gradient, other)


def test_they_run_in_the_order_of_hooks() -> None:
    def double(_module: nn.Module, grads: Any) -> Any:
        return (grads[0] * 2,)

    net = model()
    first = fh.register(net, "1", double, phase="backward_pre")
    with first, fh.register(net, "1", fh.Add(V), phase="backward_pre"):
        assert_equal(gradients(net), by_hand("backward_pre", lambda g: g * 2 + V))
    add = fh.register(net, "1", fh.Add(V), phase="backward_pre")
    with add, fh.register(net, "1", double, phase="backward_pre"):
        assert_equal(gradients(net), by_hand("backward_pre", lambda g: (g + V) * 2))


@phases
def test_what_has_no_gradient_is_refused(phase: Phase) -> None:
    net = model()
    with pytest.raises(fh.HookTypeError, match="does not work in phase"):
        fh.register(net, "1", fh.Scale(2.0, output_index="sum"), phase=phase)
    with pytest.raises(fh.HookTypeError, match="in a forward phase"):
        fh.on("1", fh.Scale(2.0), phase=phase, at=1)
    with (
        fh.register(net, "1", fh.Add(torch.ones(3)), phase=phase),
        pytest.raises(fh.HookTypeError, match="a width of 3"),
    ):
        gradients(net)
    request = fh.Plan(fh.on("1", fh.Zero(), phase=phase)).prepare(net).open()
    with pytest.raises(fh.errors.RowsError, match="gradients"), fh.batch({request: 0}):
        pass
