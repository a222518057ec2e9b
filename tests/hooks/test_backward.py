"""Backward hooks: PyTorch's arguments and order, for any inputs and outputs."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.threads import in_threads


class Shaped(nn.Module):
    """Two linear layers with inputs and output of a chosen structure."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.output = output

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Any:
        a, b = self.first(x) * scale, self.second(x)
        shapes: dict[str, Any] = {
            "tensor": a + b,
            "tuple": (a, b),
            "mixed": (a, "text", b),
            "list": [a, b],
            "dict": {"a": a, "text": 1, "b": b},
            "ordered": OrderedDict(a=a, b=b),
            "user": UserDict(a=a, b=b),
            "nested": (a, (b, b)),
        }
        return shapes[self.output]


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict | UserDict) else output
    return [value for value in values if isinstance(value, Tensor)]


Log = list[tuple[str, Any]]


def observe(module: Any, log: Log) -> None:
    """Registers one observing hook for each backward phase."""

    def backward_pre(_module: nn.Module, grad_output: Any) -> None:
        log.append(("backward_pre", copy.deepcopy(grad_output)))

    def backward(_module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        log.append(("backward", copy.deepcopy((grad_input, grad_output))))

    module.register_full_backward_hook(backward)
    module.register_full_backward_pre_hook(backward_pre)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def run(module: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    outputs = tensors(module(*args, **kwargs))
    sum(output.pow(2).sum() for output in outputs).backward()  # type: ignore[union-attr]
    return outputs


@pytest.mark.parametrize("output", ["tensor", "tuple", "mixed", "nested"])
@pytest.mark.parametrize("call", ["positional", "mixed", "no input wants a gradient"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_pytorch_s_arguments_and_order(output: str, call: str) -> None:
    plain = Shaped(output)
    hooked = fh.HookedModule(copy.deepcopy(plain))
    logs: tuple[Log, Log] = [], []
    grads: list[list[Tensor | None]] = []
    for module, log in zip((plain, hooked), logs, strict=True):
        observe(module, log)
        torch.manual_seed(1)
        x = torch.randn(3, 4, requires_grad=call != "no input wants a gradient")
        if call == "mixed":
            run(module, x, scale=torch.ones(1, requires_grad=True))
        else:
            run(module, x)
        grads.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    assert [name for name, _ in logs[0]] == ["backward_pre", "backward"]
    assert equal(tuple(logs[0]), tuple(logs[1]))
    assert equal(tuple(grads[0]), tuple(grads[1]))


@pytest.mark.parametrize("output", ["list", "dict", "ordered", "user"])
def test_lists_and_dicts_reach_hooks_as_the_tuple_of_their_values(output: str) -> None:
    hooked = fh.HookedModule(Shaped(output))
    as_tuple = fh.HookedModule(copy.deepcopy(hooked.inner))
    as_tuple.output = "mixed" if output == "dict" else "tuple"
    logs: tuple[Log, Log] = [], []
    x = torch.randn(3, 4)
    for module, log in zip((hooked, as_tuple), logs, strict=True):
        observe(module, log)
        run(module, x.clone().requires_grad_())
    assert equal(tuple(logs[0]), tuple(logs[1]))
    result = hooked(x.requires_grad_())
    assert type(result) is type(hooked.inner(x))
    if isinstance(result, dict | UserDict):
        assert list(result) == list(hooked.inner(x))


def test_a_model_output_of_transformers_keeps_its_class_and_attributes() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            hidden = self.linear(x)
            return outputs.BaseModelOutputWithPooling(
                last_hidden_state=hidden, pooler_output=hidden.sum(0)
            )

    hooked = fh.HookedModule(Model())
    log: Log = []
    observe(hooked, log)
    result = hooked(torch.randn(3, 4, requires_grad=True))
    assert isinstance(result, outputs.BaseModelOutputWithPooling)
    assert result.last_hidden_state is result["last_hidden_state"]
    result.pooler_output.sum().backward()
    ((_, (none, pooled)), (_, (grad_input, _))) = log
    assert none is None or not none.any()
    assert torch.equal(pooled, torch.ones(4))
    assert grad_input[0].shape == (3, 4)


def test_keyword_inputs_alone_are_listed_in_the_order_of_the_call() -> None:
    hooked = fh.HookedModule(Shaped("tensor"))
    log: Log = []
    observe(hooked, log)
    x, scale = torch.randn(3, 4, requires_grad=True), torch.ones(1, requires_grad=True)
    run(hooked, scale=scale, x=x)
    _, (grad_input, _) = log[1]
    assert equal(grad_input, (scale.grad, x.grad))


@pytest.mark.parametrize("call", ["positional", "nested", "keywords"])
def test_a_module_writes_to_the_caller_s_list(call: str) -> None:
    class Stack(nn.Module):
        def forward(self, x: Tensor, states: Any) -> Tensor:
            (states[0] if isinstance(states, tuple) else states).append(x)
            return x * 2

    hooked = fh.HookedModule(Stack())
    hooked.register_full_backward_hook(lambda *_: None)
    x, states = torch.ones(2, requires_grad=True), [torch.zeros(1)]
    if call == "keywords":
        hooked(x=x, states=states)
    else:
        hooked(x, (states, {"a": x}) if call == "nested" else states)
    assert len(states) == 2


def test_hooks_replace_gradients_and_chain() -> None:
    plain = nn.Linear(4, 4)
    hooked = fh.HookedModule(copy.deepcopy(plain))
    results = []
    for module in (plain, hooked):
        module.register_full_backward_pre_hook(lambda _, go: (go[0] * 2,))
        module.register_full_backward_pre_hook(lambda _, go: (go[0] + 1,))
        module.register_full_backward_hook(lambda _, gi, go: (gi[0] * go[0].sum(),))
        module.register_full_backward_hook(lambda _, gi, go: (gi[0] - 1,))
        torch.manual_seed(1)
        x = torch.randn(3, 4, requires_grad=True)
        run(module, x)
        results.append(x.grad)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("phase", ["backward_pre", "backward"])
def test_a_wrong_number_of_gradients_is_pytorch_s_error(phase: str) -> None:
    errors = []
    for module in (nn.Linear(4, 4), fh.HookedModule(nn.Linear(4, 4))):
        if phase == "backward":
            module.register_full_backward_hook(lambda _, gi, go: (gi[0], gi[0]))
        else:
            module.register_full_backward_pre_hook(lambda _, go: (go[0], go[0]))
        with pytest.raises(RuntimeError) as caught:
            run(module, torch.randn(3, 4, requires_grad=True))
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert phase in errors[1].__notes__[0]


def test_a_typed_hook_observes_and_may_not_return_a_value() -> None:
    seen: list[tuple[int, int]] = []

    @fh.BackwardHook
    def watch(
        grad_input: tuple[Tensor | None, ...], grad_output: tuple[Tensor | None, ...]
    ) -> None:
        seen.append((len(grad_input), len(grad_output)))

    hooked = fh.HookedModule(Shaped("tuple"))
    hooked.register_backward_hook(watch)
    run(hooked, torch.randn(3, 4, requires_grad=True))
    assert seen == [(1, 2)]

    def meddle(grad_input: Any, grad_output: Any) -> Any:
        return grad_input

    hooked.register_full_backward_hook(fh.BackwardHook(meddle))
    with pytest.raises(fh.HookTypeError, match=r"backward hook `.*meddle` of HookedModule"):
        run(hooked, torch.randn(3, 4, requires_grad=True))


def test_calls_without_gradients_add_no_autograd_nodes() -> None:
    hooked = fh.HookedModule(nn.Identity())
    hooked.register_full_backward_hook(lambda *_: pytest.fail("fired"))
    hooked.register_full_backward_pre_hook(lambda *_: pytest.fail("fired"))
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert hooked(x) is x
    with torch.inference_mode():
        assert hooked(x) is x
    constant = torch.randn(3)
    assert hooked(constant) is constant


def test_a_hook_removed_between_forward_and_backward_does_not_fire() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    fired: list[str] = []
    early = hooked.register_full_backward_hook(lambda *_: fired.append("early"))
    hooked.register_full_backward_hook(lambda *_: fired.append("kept"))
    output = hooked(torch.randn(3, 4, requires_grad=True))
    early.remove()
    late = hooked.register_full_backward_hook(lambda *_: fired.append("late"))
    output.sum().backward()
    # The phase begins when autograd reaches it, so its snapshot includes the late hook.
    assert fired == ["kept", "late"]
    assert late.calls == 1


def test_errors_propagate_through_autograd_with_a_note() -> None:
    class BoomError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise BoomError

    hooked = fh.HookedModule(nn.Linear(4, 4))
    fired: list[int] = []
    handle = hooked.register_full_backward_hook(fail)
    hooked.register_full_backward_hook(lambda *_: fired.append(1))
    with pytest.raises(BoomError) as caught:
        run(hooked, torch.randn(3, 4, requires_grad=True))
    assert (
        f"backward hook `{fail.__qualname__}` of HookedModule(Linear)" in caught.value.__notes__[0]
    )
    assert not fired
    handle.remove()
    run(hooked, torch.randn(3, 4, requires_grad=True))
    assert fired == [1]


def test_double_backward_and_checkpointing() -> None:
    plain, log = nn.Linear(4, 4), []
    hooked = fh.HookedModule(copy.deepcopy(plain))
    hooked.register_full_backward_hook(lambda *_: log.append(1))
    x = torch.randn(3, 4, requires_grad=True)
    results = []
    for module in (plain, hooked):
        (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    assert torch.equal(*results)
    fired = len(log)
    again = torch.utils.checkpoint.checkpoint(hooked, x, use_reentrant=False)
    again.sum().backward()
    assert len(log) > fired


def test_hooks_get_the_gradients_of_their_thread_s_backward() -> None:
    hooked = fh.HookedModule(nn.Identity())
    wrong: list[float] = []
    local = threading.local()

    def check(_module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        wrong.extend(
            float(grad[0]) for grad in (grad_input[0], grad_output[0]) if grad[0] != local.value
        )

    handle = hooked.register_full_backward_hook(check)

    def work(number: int) -> None:
        local.value = number + 1.0
        for _ in range(200):
            x = torch.zeros(2, requires_grad=True)
            (hooked(x) * local.value).sum().backward()

    in_threads(4, work)
    assert handle.calls == 800
    assert not wrong
