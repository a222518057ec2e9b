"""A wrapper shows the names, state and attributes of the module inside."""

from __future__ import annotations

import copy
import gc
import inspect
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.compiling import compiled
from support.wrapping import Case, same, x

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def test_outputs_are_bit_for_bit_the_same(case: Case) -> None:
    module, arguments = case
    module(*arguments)  # the lazy module creates its parameters in the first call
    plain = copy.deepcopy(module)
    hooked = fh.HookedModule(module)
    hooked.register_forward_pre_hook(lambda _module, _args: None)
    hooked.register_forward_hook(lambda _module, _args, _output: None)
    assert same(hooked(*arguments), plain(*arguments))
    assert same(hooked.forward(*arguments), plain.forward(*arguments))


class Answering(nn.Module):
    """Answers for its own attributes."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs

    def __getattribute__(self, name: str) -> Any:
        return torch.neg if name == "forward" else super().__getattribute__(name)


def test_a_class_that_answers_for_its_attributes_chooses_its_forward() -> None:
    model = nn.Sequential(Answering())
    expected = model(x())
    assert torch.equal(expected, -x())
    hooked = fh.HookedModule(Answering())
    for _ in range(2):
        assert torch.equal(hooked(x()), expected)
    hooked.register_forward_hook(lambda _module, _args, output: output * 2)
    assert torch.equal(hooked(x()), expected * 2)
    with fh.register(model, "0", lambda _module, _args, output: output * 2):
        assert torch.equal(model(x()), expected * 2)


def test_a_lazy_module_is_initialised_under_the_wrapper() -> None:
    hooked = fh.HookedModule(nn.LazyLinear(4))
    fired = hooked.register_forward_hook(lambda *_: None)
    first = hooked(x())
    assert type(hooked.inner) is nn.Linear
    assert torch.equal(hooked(x()), first)
    assert fired.calls == 2


def test_names_and_state_equal_those_of_the_module_inside(case: Case) -> None:
    module, arguments = case
    module(*arguments)
    hooked = fh.HookedModule(module)
    assert list(hooked.state_dict()) == list(module.state_dict())
    assert hooked.state_dict()._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
    for listing in ("named_parameters", "named_buffers", "named_children", "named_modules"):
        ours, theirs = (dict(getattr(m, listing)()) for m in (hooked, module))
        assert list(ours) == list(theirs)
        assert all(ours[name] is theirs[name] for name in theirs if name)
    parent = nn.ModuleDict({"part": hooked})
    assert list(parent.state_dict()) == [f"part.{name}" for name in module.state_dict()]
    assert dict(parent.named_modules())["part"] is hooked
    assert parent.get_submodule("part") is hooked
    torch.optim.SGD(hooked.parameters(), lr=0.1)


def test_load_state_dict_goes_both_ways(case: Case) -> None:
    module, arguments = case
    module(*arguments)
    hooked = fh.HookedModule(module)
    zeros = {name: torch.zeros_like(value) for name, value in hooked.state_dict().items()}
    assert not hooked.load_state_dict(zeros).missing_keys
    assert all(not value.any() for value in module.state_dict().values())
    nn.ModuleDict({"part": hooked}).load_state_dict(
        {f"part.{name}": torch.ones_like(value) for name, value in zeros.items()}
    )
    assert all(value.all() for value in module.state_dict().values())


def test_conversions_modes_and_gradients_apply_to_the_module_and_return_the_wrapper(
    case: Case,
) -> None:
    module, arguments = case
    module(*arguments)
    hooked = fh.HookedModule(module)
    assert hooked.double() is hooked
    assert all(p.dtype == torch.float64 for p in module.parameters())
    assert hooked.half() is hooked
    assert hooked.to(torch.float32) is hooked
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert same(hooked(*arguments), module(*arguments))
    assert hooked.eval() is hooked
    assert not module.training
    assert not any(child.training for child in module.modules())
    assert hooked.train() is hooked
    assert module.training
    module.train(False)
    assert not hooked.training
    assert hooked.requires_grad_(False) is hooked
    assert not any(p.requires_grad for p in module.parameters())
    hooked.requires_grad_(True)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    hooked.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    visited: list[nn.Module] = []
    assert hooked.apply(visited.append) is hooked
    assert list(map(id, visited)) == [id(m) for m in reversed_modules(module)]
    nn.ModuleList([hooked]).apply(visited.append)
    assert any(m is module for m in visited[len(visited) // 2 :])


def reversed_modules(module: nn.Module) -> list[nn.Module]:
    seen: list[nn.Module] = []
    module.apply(seen.append)
    return seen


def test_attributes_are_read_and_written_through_either() -> None:
    linear = nn.Linear(4, 2)
    hooked = fh.HookedModule(linear)
    assert hooked.weight is linear.weight
    hooked.bias = nn.Parameter(torch.ones(2))
    assert torch.equal(linear.bias, torch.ones(2))
    assert dict(hooked.named_parameters())["bias"] is linear.bias
    hooked.note = "read by the module"
    assert linear.note == "read by the module"
    linear.other = 3
    assert hooked.other == 3
    hooked.extra = nn.Linear(1, 1)
    assert dict(linear.named_children())["extra"] is hooked.extra
    hooked.register_buffer("steps", torch.zeros(1))
    assert "steps" in linear.state_dict()
    del hooked.extra, hooked.note
    assert not hasattr(linear, "extra")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'missing'"):
        _ = hooked.missing
    assert {"in_features", "weight", "inner", "quiesce"} <= set(dir(hooked))
    assert isinstance(hooked, nn.Linear)
    assert isinstance(hooked, fh.HookedModule)


def test_properties_methods_and_overrides_of_the_module_s_class_work() -> None:
    class Odd(nn.Linear):
        _gain = 1.0

        @property
        def gain(self) -> float:
            return self._gain

        @gain.setter
        def gain(self, value: float) -> None:
            self._gain = value

        def train(self, mode: bool = True) -> Odd:
            self.trained = mode
            return super().train(mode)

        def halve(self) -> Odd:
            self._gain /= 2
            return self

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * self.gain

    odd = Odd(4, 2)
    hooked = fh.HookedModule(odd)
    hooked.gain = 4.0
    assert odd.gain == 4.0
    assert hooked.halve() is hooked
    assert odd.gain == 2.0
    hooked.eval()
    assert odd.trained is False
    assert torch.equal(hooked(x()), nn.functional.linear(x(), odd.weight, odd.bias) * 2)


def test_methods_of_the_module_s_class_call_the_wrapper() -> None:
    class Generator(nn.Linear):
        def generate(self, x: Tensor, steps: int) -> Tensor:
            for _ in range(steps):
                x = self(x)
            return x

    hooked = fh.HookedModule(Generator(4, 4))
    handle = hooked.register_forward_hook(lambda _module, _args, output: output + 1)
    assert not torch.equal(hooked.generate(x(), 3), hooked.inner.generate(x(), 3))
    assert handle.calls == 3


def test_a_class_that_cannot_be_subclassed_can_be_wrapped() -> None:
    class Slotted(nn.Linear):
        __slots__ = ("gain",)

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * self.gain

    class Sealed(nn.Linear):
        def __init_subclass__(cls, **_: Any) -> None:
            msg = "sealed"
            raise TypeError(msg)

    slotted = Slotted(4, 2)
    hooked = fh.HookedModule(slotted)
    hooked.gain = 2.0
    hooked.register_forward_hook(lambda _module, _args, output: output + 1)
    assert torch.equal(hooked(x()), slotted(x()) + 1)
    sealed = fh.HookedModule(Sealed(4, 2))
    assert isinstance(sealed, Sealed)
    assert sealed(x()).shape == (2, 3, 2)
    assert copy.deepcopy(sealed).hooks() == []


def test_containers_are_indexed_and_iterated() -> None:
    sequential = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooked = fh.HookedModule(sequential)
    assert len(hooked) == 2
    assert hooked[0] is sequential[0]
    assert list(hooked) == list(sequential)
    assert sequential[1] in hooked
    by_name = fh.HookedModule(nn.ModuleDict({"a": nn.ReLU()}))
    assert "a" in by_name
    assert list(by_name.items()) == list(by_name.inner.items())
    assert fh.HookedModule(nn.ReLU())
    assert not fh.HookedModule(nn.Sequential())
    assert not hasattr(fh.HookedModule(nn.ReLU()), "__len__")


def test_torch_s_own_hooks_on_the_module_fire_inside_ours() -> None:
    linear = nn.Linear(4, 2)
    hooked = fh.HookedModule(linear)
    order: list[str] = []
    hooked.register_forward_pre_hook(lambda *_: order.append("our pre"))
    hooked.register_forward_hook(lambda *_: order.append("our post"))
    handles = [
        linear.register_forward_pre_hook(lambda *_: order.append("torch pre")),
        linear.register_forward_hook(lambda *_: order.append("torch post")),
        nn.Module.register_forward_hook(hooked, lambda *_: order.append("behind our back")),
    ]
    hooked(x())
    assert order == ["our pre", "torch pre", "torch post", "behind our back", "our post"]
    order.clear()
    linear(x())
    assert order == ["torch pre", "torch post", "behind our back"]
    for handle in handles:
        handle.remove()
    order.clear()
    hooked(x())
    assert order == ["our pre", "our post"]
    grads: list[int] = []
    linear.register_full_backward_hook(lambda *_: grads.append(1))
    hooked(x().requires_grad_()).sum().backward()
    assert grads == [1]


def test_torch_s_global_hooks_fire() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 2))
    hooked(x())
    fired: list[str] = []
    module = nn.modules.module
    handles = [
        module.register_module_forward_pre_hook(lambda m, *_: fired.append(f"pre {m is hooked}")),
        module.register_module_forward_hook(lambda m, *_: fired.append(f"post {m is hooked}")),
        module.register_module_full_backward_hook(lambda m, *_: fired.append("backward")),
    ]
    try:
        hooked(x().requires_grad_()).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    assert fired == ["pre False", "post False", "backward"]
    hooked(x())
    assert len(fired) == 3


def test_a_replaced_forward_is_honoured_at_the_next_call() -> None:
    linear = nn.Linear(4, 2)
    hooked = fh.HookedModule(linear)
    before = hooked(x())
    linear.forward = lambda input: input + 1  # type: ignore[method-assign]
    assert torch.equal(hooked(x()), x() + 1)
    assert torch.equal(hooked.forward(x()), x() + 1)
    hooked.forward = lambda input: input + 2  # type: ignore[method-assign]
    assert torch.equal(linear(x()), x() + 2)
    del linear.forward
    assert torch.equal(hooked(x()), before)


def plus_one(*given: Any) -> Any:
    """Works as a forward hook, a forward and a call of an identity module."""
    return given[-1] + 1


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a hook": lambda module: module._forward_hooks.__setitem__(0, plus_one),
    "another dict of hooks": lambda module: setattr(module, "_forward_hooks", {0: plus_one}),
    "in vars": lambda module: vars(module).__setitem__("_forward_hooks", {0: plus_one}),
    "by update": lambda module: vars(module).update(_forward_hooks={0: plus_one}),
    "another __dict__": lambda module: setattr(
        module, "__dict__", {**vars(module), "_forward_hooks": {0: plus_one}}
    ),
    "past nn.Module": lambda module: object.__setattr__(module, "_forward_hooks", {0: plus_one}),
    "forward": lambda module: setattr(module, "forward", plus_one),
    "forward in vars": lambda module: vars(module).setdefault("forward", plus_one),
    "_call_impl": lambda module: setattr(module, "_call_impl", plus_one),
    "compiled": lambda module: setattr(module, "_compiled_call_impl", plus_one),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["wrapped", "instrumented"])
def test_any_change_of_a_module_s_attributes_takes_effect(form: str, change: str) -> None:
    module = nn.Identity()
    called = module
    if form == "wrapped":
        called = fh.HookedModule(module)
    else:
        fh.instrument(module)
    before = dict(vars(module))
    for _ in range(3):  # later calls hit the cache
        assert torch.equal(called(x()), x())
        CHANGES[change](module)
        assert torch.equal(called(x()), x() + 1)
        module._forward_hooks.clear()
        for name in vars(module).keys() - before.keys():
            del vars(module)[name]
        vars(module).update(before)
        assert torch.equal(called(x()), x())


def test_a_changed_class_is_honoured_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.Linear):
        pass

    mine = Mine(4, 2)
    hooked = fh.HookedModule(mine)
    before = hooked(x())
    monkeypatch.setattr(Mine, "forward", lambda self, input: input * 2)
    assert torch.equal(hooked(x()), x() * 2)
    monkeypatch.setattr(Mine, "__call__", lambda self, input: input * 3)
    assert torch.equal(hooked(x()), x() * 3)
    monkeypatch.undo()
    assert torch.equal(hooked(x()), before)
    calls: list[nn.Module] = []
    original = nn.Module.__call__

    def spy(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", spy)
    assert torch.equal(hooked(x()), before)
    assert calls == [mine]


def test_a_module_with_its_own_call_keeps_it() -> None:
    class Custom(nn.Module):
        def __call__(self, value: int) -> int:
            return value + 1

    hooked = fh.HookedModule(Custom())
    hooked.register_forward_hook(lambda _module, _args, output: output * 10)
    assert hooked(1) == 20


def test_forward_is_bound_by_the_descriptor_of_the_class() -> None:
    class Static(nn.Module):
        @staticmethod
        def forward(value: Tensor) -> Tensor:
            return value + 1

    class Bound:
        def __get__(self, instance: Any, owner: type) -> Any:
            return (lambda value: value * 2) if instance is not None else Static.forward

    class Described(nn.Module):
        forward = Bound()  # type: ignore[assignment]

    assert torch.equal(fh.HookedModule(Static())(x()), x() + 1)
    assert torch.equal(fh.HookedModule(Described())(x()), x() * 2)


@pytest.mark.parametrize("where", ["subclass", "nn.Module", "instance"])
def test_a_replaced_call_impl_is_honoured(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.Identity):
        pass

    def call_impl(*args: Any) -> Tensor:
        return args[-1] * 100

    mine = Mine()
    hooked = fh.HookedModule(mine)
    assert torch.equal(hooked(x()), x())
    target = {"subclass": Mine, "nn.Module": nn.Module, "instance": mine}[where]
    monkeypatch.setattr(target, "_call_impl", call_impl, raising=False)
    assert torch.equal(hooked(x()), x() * 100)
    monkeypatch.undo()
    assert torch.equal(hooked(x()), x())


def test_a_module_with_the_wrapper_s_names_keeps_its_methods() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)
            self.hooks = [1]

        def encode(self, value: Tensor) -> Tensor:
            return self.inner(value)

        def forward(self, value: Tensor) -> Tensor:
            return self.encode(value).sum()

    model = Model()
    hooked = fh.HookedModule(model)
    handle = hooked.register_forward_hook(lambda *_: None)
    assert torch.equal(hooked.encode(x()), model.encode(x()))
    assert torch.equal(hooked(x()), model(x()))
    assert handle.calls == 1
    assert hooked.inner is model
    assert "forward=1" in repr(hooked)
    assert hooked.into_inner() is model


def test_wrapping_does_not_run_init_subclass() -> None:
    known: list[str] = []

    class Registered(nn.Module):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            if cls.__name__ in known:
                msg = f"duplicate {cls.__name__}"
                raise ValueError(msg)
            known.append(cls.__name__)

    class First(Registered):
        pass

    class Second(Registered):
        pass

    assert isinstance(fh.HookedModule(First()), First)
    assert isinstance(fh.HookedModule(Second()), Second)
    assert known == ["First", "Second"]


def test_a_generic_module_is_wrapped_as_an_instance_of_its_class() -> None:
    class Typed(Generic[T], nn.Module):  # noqa: PYI059 (an order in use)
        def forward(self, value: Tensor) -> Tensor:
            return value

        def run(self, value: Tensor) -> Tensor:
            return self(value)

    hooked = fh.HookedModule(Typed[int]())
    handle = hooked.register_forward_hook(lambda *_: None)
    hooked.run(x())
    assert handle.calls == 1
    linear = nn.Linear(4, 2)
    fh.HookedModule[nn.Linear](linear).into_inner()
    assert "__orig_class__" not in vars(linear)


def test_forward_has_the_signature_of_the_module_inside() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    assert inspect.signature(hooked.forward) == inspect.signature(hooked.inner.forward)


def test_the_signature_is_that_of_the_module_inside() -> None:
    class Named(nn.Module):
        def __call__(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return x * scale

    class Refused(nn.Module):  # no combined class can be made
        __slots__ = ("value",)

    for module in nn.ReLU(), nn.Sequential(nn.ReLU()), Named(), Refused():
        expected = inspect.signature(module)
        assert inspect.signature(fh.HookedModule(module)) == expected
        assert inspect.signature(fh.HookedModule(fh.HookedModule(module))) == expected
    assert "module" in inspect.signature(fh.HookedModule).parameters


class Predicting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def predict(self, x: Tensor) -> Any:
        return super().__call__(x)


def test_the_call_of_nn_module_runs_the_wrapper_s_hooks() -> None:
    hooked = fh.HookedModule(Predicting())
    hooked.register_forward_hook(lambda _m, _a, output: output * 5)
    x = torch.ones(2)
    for call in (hooked.predict, hooked._call_impl, lambda x: nn.Module.__call__(hooked, x)):
        assert torch.equal(call(x), x * 10)


@compiled
def test_the_call_of_nn_module_runs_the_hooks_around_the_compiled_module() -> None:
    hooked = fh.HookedModule(Predicting())
    hooked.register_forward_hook(lambda _m, _a, output: output * 5)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    hooked.compile(backend=backend)
    x = torch.ones(2)
    for call in (hooked.predict, hooked._call_impl, lambda x: nn.Module.__call__(hooked, x)):
        assert torch.equal(call(x), x * 10)
    assert len(graphs) == 1


def test_the_finaliser_of_a_module_runs_when_the_module_goes() -> None:
    closed = []

    class Owner(nn.Module):
        def __del__(self) -> None:
            closed.append(1)

    module = Owner()
    wrapper = fh.HookedModule(module)
    del wrapper
    gc.collect()
    assert not closed
    fh.HookedModule(Owner()).into_inner()
    gc.collect()
    assert closed == [1]
