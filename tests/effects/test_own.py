"""A kind of intervention that a user defines, wherever the built-in kinds work."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import ferrohook as fh
from ferrohook.errors import HookTypeError
from support.modules import Echo

WIDTH = 6


class Damp(fh.Intervention):
    """Scales the component along a direction."""

    vector_field = "direction"
    number_fields = ("factor",)

    @staticmethod
    def prepare(direction: Tensor) -> Tensor:
        unit: Tensor = direction / direction.norm()
        return unit

    @staticmethod
    def formula(x: Tensor, direction: Tensor, factor: Any) -> Tensor:
        return x + (factor - 1) * (x * direction).sum(-1, keepdim=True) * direction


class Inside(fh.Intervention):
    """Projects onto a subspace, and scales the result."""

    vector_field = "basis"
    number_fields = ("factor",)
    broadcasts = False
    homogeneous = True

    @staticmethod
    def prepare(basis: Tensor) -> Tensor:
        orthonormal: Tensor = torch.linalg.qr(basis.T).Q.T
        return orthonormal

    @staticmethod
    def formula(x: Tensor, basis: Tensor, factor: Any) -> Tensor:
        return (x @ basis.T @ basis) * factor


def by_hand(hook: Any, x: Tensor) -> Tensor:
    """The formulas as matrices."""
    given, factor = hook.values
    rows = given.reshape(-1, x.shape[-1])
    projector = (torch.linalg.pinv(rows) @ rows).to(x.dtype)
    if isinstance(hook, Inside):
        return factor * x @ projector
    return x + (factor - 1) * x @ projector


def model_of(*modules: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *modules)


HOOKS = {
    "damp": lambda width=WIDTH: Damp(torch.randn(width), 0.25),
    "inside": lambda width=WIDTH: Inside(torch.randn(2, width), factor=-1.5),
}
kinds = pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)


@kinds
def test_as_a_hook_with_gradients(make: Any) -> None:
    hook, model, x = make(), model_of(), torch.randn(4, 3, WIDTH, requires_grad=True)
    expected = by_hand(hook, model(x))
    with fh.register(model, "0", hook):
        changed = model(x)
    torch.testing.assert_close(changed, expected)
    grads = [torch.autograd.grad(it.square().sum(), x)[0] for it in (changed, expected)]
    torch.testing.assert_close(*grads)


@kinds
def test_as_data(make: Any) -> None:
    hook = make()
    plan = fh.Plan(fh.on("0", hook, at=1))
    assert fh.Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(hook)) == hook == copy.deepcopy(hook)
    assert repr(hook).startswith(type(hook).__name__)
    with pytest.raises(AttributeError, match="immutable"):
        hook.values = ()


@kinds
def test_on_gradients(make: Any) -> None:
    hook, model, x = make(), model_of(nn.Tanh()), torch.randn(4, WIDTH, requires_grad=True)
    with fh.register(model, "1", hook, phase="backward_pre"):
        (changed,) = torch.autograd.grad(model(x).sum(), x)
    inner = model[0](x)
    (slope,) = torch.autograd.grad(inner.tanh().sum(), inner, retain_graph=True)
    (expected,) = torch.autograd.grad(inner, x, slope * by_hand(hook, torch.ones_like(inner)))
    torch.testing.assert_close(changed, expected)


def test_at_sites() -> None:
    model, x = model_of(), torch.randn(5, WIDTH)
    hooks = [Damp(torch.randn(WIDTH), factor) for factor in (0.25, 3.0)]
    plain = model(x)
    with fh.rows.sites(model, "0", max_requests=2, max_rows=8, kinds=(Damp,)), torch.no_grad():
        requests = [fh.Plan(fh.on("0", hook)).prepare(model).open() for hook in hooks]
        with fh.batch({requests[0]: slice(0, 2), requests[1]: slice(2, 4)}, size=5):
            changed = model(x)
    torch.testing.assert_close(changed[:2], by_hand(hooks[0], plain[:2]))
    torch.testing.assert_close(changed[2:4], by_hand(hooks[1], plain[2:4]))
    assert torch.equal(changed[4:], plain[4:])


@kinds
def test_in_a_batch_beside_others(make: Any) -> None:
    model, x = model_of(), torch.randn(9, WIDTH)
    hooks = [make(), fh.Add(torch.randn(WIDTH)), make(), fh.Scale(2.0), make()]
    rows = [slice(0, 2), slice(2, 4), slice(4, 7), slice(7, 8), slice(8, 9)]
    plain = model(x)
    requests = [fh.Plan(fh.on("0", hook)).prepare(model).open() for hook in hooks]
    with fh.batch(dict(zip(requests, rows, strict=True))):
        changed = model(x)
    for hook, own in zip(hooks, rows, strict=True):
        own_kind = isinstance(hook, Damp | Inside)
        expected = by_hand(hook, plain[own]) if own_kind else hook.apply(plain[own])
        torch.testing.assert_close(changed[own], expected)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_members_of_a_batch_share_a_formula(make: Any, dtype: torch.dtype) -> None:
    model, x = model_of().to(dtype), torch.randn(64, WIDTH, dtype=dtype)
    requests = [fh.Plan(fh.on("0", make())).prepare(model).open() for _ in range(64)]
    with fh.batch({request: row for row, request in enumerate(requests)}):
        together = model(x)
    for row, request in enumerate(requests):
        hook: Any = request.prepared.entries[0].hook  # type: ignore[attr-defined]
        plain = model(x)[row]
        alone = hook.apply(plain)
        # The formula's operations round once each, and its sum once for each product.
        rounding = (WIDTH + 3) * torch.finfo(dtype).eps * float(plain.detach().abs().max())
        torch.testing.assert_close(together[row], alone, atol=rounding, rtol=0)


@kinds
def test_in_a_graph(make: Any) -> None:
    model, x = model_of(nn.Tanh()), torch.randn(3, WIDTH)
    plain = copy.deepcopy(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):  # another one of the kind needs no new trace
        hook = make()
        with fh.register(model, "0", hook):
            torch.testing.assert_close(compiled(x), plain[1](by_hand(hook, plain[0](x))))  # type: ignore[index]
    assert counter.frame_count == 1


@kinds
def test_native_code_runs_the_formula_beside_dynamo(make: Any) -> None:
    """The native call runs after a break of the graph, where Dynamo would compile the formula."""
    hook, model, x = make(), model_of(), torch.randn(3, WIDTH)
    expected = by_hand(hook, model(x))
    compiled = torch.compile(model, backend="eager")
    with fh.register(model, "0", hook, always_call=True), torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)


@kinds
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_of_a_sum_and_of_a_nested_tensor(make: Any) -> None:
    hook, model = make(), nn.Sequential(Echo())
    hidden, residual = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    summed = type(hook)(*hook.values, output_index="sum")
    with fh.register(model, "0", summed):
        changed, same = model((hidden, residual))
    assert same is residual
    torch.testing.assert_close(changed + residual, by_hand(hook, hidden + residual))
    dense = [torch.randn(length, WIDTH) for length in (2, 3)]
    with fh.register(model, "0", hook):
        nested = model(torch.nested.nested_tensor(dense))
    for one, before in zip(nested.unbind(), dense, strict=True):
        torch.testing.assert_close(one, by_hand(hook, before))


@kinds
def test_in_continuous_batching(make: Any) -> None:
    pytest.importorskip("transformers")
    from ferrohook.engines import transformers  # noqa: PLC0415 (needs the package)
    from support.engines import batching, greedy, tiny_llama  # noqa: PLC0415 (as above)

    model = tiny_llama()
    prompt, new = list(range(3, 30)), 6
    hook = make(model.config.hidden_size)
    needs_rows = isinstance(hook, Inside)
    plan = fh.Plan(fh.on("model.layers.1", hook))
    with (
        model.continuous_batching_context_manager(
            greedy(new), continuous_batching_config=batching()
        ) as manager,
        transformers.attach(manager) as attached,
    ):
        attached.add_request(prompt, "steered", plan=plan)
        attached.add_request(prompt, "plain")
        outputs = [attached.get_result(timeout=60) for _ in range(2)]
    tokens = {each.request_id: each.generated_tokens for each in outputs}
    assert not needs_rows or tokens["steered"] != tokens["plain"]
    for name, opened in (("steered", plan), ("plain", fh.Plan())):
        with opened.prepare(model).open():
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=new,
                do_sample=False,
            )
        assert expected[0, len(prompt) :].tolist() == tokens[name]


def test_wrong_arguments() -> None:
    for arguments, words in (
        ((), "Damp needs direction, factor, got none"),
        ((torch.ones(3),), "got direction"),
        ((torch.ones(3), 1.0, 2.0), "needs direction, factor"),
        ((3.0, 1.0), "direction of Damp must be a tensor"),
        ((torch.ones(3), None), "factor of Damp must be a number"),
    ):
        with pytest.raises(HookTypeError, match=words):
            Damp(*arguments)
    with pytest.raises(HookTypeError, match="needs direction, factor, got direction, strength"):
        Damp(torch.ones(3), strength=1.0)
    with pytest.raises(HookTypeError, match="abstract"):
        fh.Intervention()


def test_a_name_that_is_taken() -> None:
    with pytest.raises(HookTypeError, match="called Scale is already defined in ferrohook"):
        type("Scale", (fh.Intervention,), {"formula": staticmethod(lambda x: x)})
    for _ in range(2):  # the cell of a notebook that is run again
        again = type("Again", (fh.Intervention,), {"formula": staticmethod(lambda x: -x)})
    x = torch.randn(2)
    assert torch.equal(again().apply(x), -x)
