"""Instrumented modules keep what is promised for hooked ones, and are given back as they were."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import sysconfig
import threading
import warnings
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pytest
import torch
from threaded import in_threads
from torch import Tensor, nn
from torch.nn.modules import module as torch_global
from torch.nn.utils import parametrizations, parametrize, prune

import ferrohook as fh
from ferrohook.classes import plain_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")
Log = list[Any]


def x() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(2, 3, 4)


def small() -> nn.Sequential:
    return nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.ReLU()))


def logging(log: Log, name: str) -> Callable[..., None]:
    return lambda *_: log.append(name)


def instrumented(module: nn.Module) -> bool:
    return type(module) is not plain_class(type(module))


def state_of(module: nn.Module) -> list[Any]:
    """What `restore` gives back: for each module its class, its attributes in order, its hooks."""
    return [
        (name, type(each), list(vars(each).items()), {k: list(v) for k, v in hook_dicts(each)})
        for name, each in module.named_modules(remove_duplicate=False)
    ]


def hook_dicts(module: nn.Module) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in vars(module).items() if "hooks" in key and value]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "Linear": (lambda: nn.Linear(4, 4), lambda: (x(),)),
    "Sequential": (small, lambda: (x(),)),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        lambda: (x(), x(), x()),
    ),
    "LSTM": (lambda: nn.LSTM(4, 4, batch_first=True), lambda: (x(),)),
    "BatchNorm": (lambda: nn.BatchNorm1d(3), lambda: (x(),)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), lambda: (x(),)),
    "ModuleDict": (lambda: nn.ModuleDict({"a": nn.ReLU()}), lambda: ()),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Any, ...]]:
    make, arguments = CASES[request.param]
    return make(), arguments()


Case = tuple[nn.Module, tuple[Any, ...]]


def call(module: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    if not arguments:
        return []
    torch.manual_seed(1)
    output = module(*arguments)
    flat, _ = torch.utils._pytree.tree_flatten(output)
    return flat


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


# Transparency


def test_an_instrumented_model_looks_like_the_plain_one(case: Case) -> None:
    model, arguments = case
    plain = copy.deepcopy(model)
    expected = call(plain, arguments)
    attributes = {name: list(vars(each)) for name, each in model.named_modules()}
    with fh.instrument(model):
        assert all(instrumented(each) for each in model.modules())
        assert same(call(model, arguments), expected)
        for (name, ours), (same_name, theirs) in zip(
            model.named_modules(), plain.named_modules(), strict=True
        ):
            assert name == same_name
            assert isinstance(ours, type(theirs))
            assert ours.__class__ is type(theirs)
            for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(type(ours), attribute) == getattr(type(theirs), attribute)
            assert [key for key in vars(ours) if "ferrohook" not in key] == attributes[name]
        assert repr(model) == repr(plain)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert model.state_dict()._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert model.double() is model
        assert all(p.dtype == torch.float64 for p in model.parameters())
        assert model.float().eval() is model
        assert not any(each.training for each in model.modules())


def test_without_hooks_the_result_is_the_module_s_own_object() -> None:
    with fh.instrument(identity := nn.Identity()):
        result = object()
        assert identity(result) is result


def test_restore_gives_back_class_attributes_and_torch_s_hooks(case: Case) -> None:
    model, arguments = case
    for each in model.modules():
        each.register_forward_hook(lambda *_: None)
        each.register_full_backward_pre_hook(lambda *_: None)
    before = state_of(model)
    fh.instrument(model)
    for each in model.modules():
        each.register_forward_hook(lambda *_: None)
        each.register_forward_pre_hook(lambda *_: None)
    call(model, arguments)
    fh.restore(model)
    assert state_of(model) == before


def test_attributes_of_the_time_in_between_stay_in_their_order() -> None:
    linear = nn.Linear(4, 4)
    before = list(vars(linear))
    linear.old = 1
    with fh.instrument(linear):
        linear.new = 2
        behind = nn.Module.register_forward_hook(linear, log := lambda *_: None)
        del linear.old
    assert list(vars(linear)) == [*before, "new"]
    assert list(linear._forward_hooks.values()) == [log]
    behind.remove()
    assert not linear._forward_hooks


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_saves_the_plain_class(protocol: int) -> None:
    with fh.instrument(model := small()):
        model.register_forward_hook(lambda *_: None)  # itself not picklable
        model.handle = model[0].register_forward_hook(lambda *_: None)
        loaded = pickle.loads(pickle.dumps(model, protocol))
        assert type(loaded) is nn.Sequential
        assert type(loaded[0]) is nn.Linear
        assert list(vars(loaded[0])) == list(vars(nn.Linear(4, 4)))
        assert loaded.handle.removed
        assert torch.equal(loaded(x()), model(x()))


def test_what_was_saved_loads_where_there_is_no_ferrohook(tmp_path: Path) -> None:
    with fh.instrument(model := small()):
        model.register_forward_hook(lambda *_: None)
        (tmp_path / "pickled").write_bytes(pickle.dumps(model))
        (tmp_path / "attributes").write_bytes(pickle.dumps(vars(model)))
        torch.save(model, tmp_path / "saved")
    program = """
import pickle, sys, torch
sys.modules["ferrohook"] = None
folder = sys.argv[1]
vars_ = pickle.load(open(folder + "/attributes", "rb"))
assert vars_["_modules"]["first"].weight.shape == (4, 4)
for model in (
    pickle.load(open(folder + "/pickled", "rb")),
    torch.load(folder + "/saved", weights_only=False),
):
    assert type(model) is torch.nn.Sequential and type(model[0]) is torch.nn.Linear
    assert model(torch.ones(4)).shape == (4,)
    assert not any("ferrohook" in key for each in model.modules() for key in vars(each))
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


class StateInAList(nn.Linear):
    """Saves its `__dict__` in a form of its own."""

    def __getstate__(self) -> Any:
        return [self.__dict__.copy()]

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state[0])


class Rebuilt(nn.Linear):
    """Is saved as what it was made from, and the parameters."""

    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features), {"_parameters": self._parameters}


@pytest.mark.parametrize("cls", [StateInAList, Rebuilt])
def test_own_ways_of_saving_and_copying_are_kept(cls: type[nn.Linear]) -> None:
    with fh.instrument(model := cls(4, 4)):
        handle = model.register_forward_hook(lambda _module, _args, output: output + 1)
        loaded = pickle.loads(pickle.dumps(model))
        assert type(loaded) is cls
        assert torch.equal(loaded(x()) + 1, model(x()))
        duplicate = copy.deepcopy(model)
        assert torch.equal(duplicate(x()), model(x()))
        handle.remove()
        assert torch.equal(duplicate(x()), model(x()) + 1)
        fh.restore(duplicate)
        assert type(duplicate) is cls
    # With the dispatcher left out of what it saved there is nothing to give back.
    with fh.instrument(loaded):
        assert torch.equal(loaded(x()), model(x()))
    assert "_ferrohook_dispatcher" not in vars(loaded)


# Copies


def test_deepcopy_copies_the_hooks_and_handles_act_on_the_original_alone() -> None:
    model = small()
    fired: Log = []
    with fh.instrument(model):
        handle = model.first.register_forward_hook(lambda module, *_: fired.append(module))
        model.first.register_forward_hook(lambda *_: fired.append("off")).disable()
        duplicate = copy.deepcopy(model)
        assert isinstance(duplicate, nn.Sequential)
        assert duplicate.first.weight is not model.first.weight
        assert torch.equal(duplicate(x()), model(x()))
        assert fired == [duplicate.first, model.first]
        assert handle.calls == 1
        handle.remove()
        duplicate(x())
        model(x())
        assert fired[2:] == [duplicate.first]
    duplicate(x())
    assert fired[3:] == [duplicate.first]


def test_a_deep_copy_is_restored_by_itself() -> None:
    model = small()
    with fh.instrument(model, "first"):
        duplicate = copy.deepcopy(model)
        again = copy.deepcopy(duplicate)
        duplicate.first.register_forward_hook(lambda _module, _args, output: output + 1)
        fh.restore(duplicate)
        assert type(duplicate.first) is nn.Linear
        assert list(vars(duplicate.first)) == list(vars(nn.Linear(4, 4)))
        assert torch.equal(duplicate(x()), model(x()))
        with pytest.raises(fh.HookError, match="not instrumented"):
            fh.restore(duplicate)
        assert instrumented(model.first)
        assert instrumented(again.first)
    fh.restore(again)
    assert not instrumented(again.first)


def test_a_deep_copy_counts_for_itself() -> None:
    model = small()
    fh.instrument(model)
    fh.instrument(model)
    duplicate = copy.deepcopy(model)
    fh.restore(duplicate)
    assert not instrumented(duplicate)
    fh.restore(model)
    assert instrumented(model)
    fh.restore(model)
    assert not instrumented(model)


class Counting(nn.Module):
    count = 0

    def forward(self, value: Tensor) -> Tensor:
        return value

    def hook(self, *_: Any) -> None:
        self.count += 1


def test_hooks_that_are_methods_of_the_module_follow_the_copy() -> None:
    with fh.instrument(counting := Counting()):
        counting.register_forward_hook(counting.hook)
        duplicate = copy.deepcopy(counting)
        duplicate(x())
        assert (counting.count, duplicate.count) == (0, 1)


def test_a_shallow_copy_shares_hooks_and_is_restored_by_itself() -> None:
    linear = nn.Linear(4, 4)
    with fh.instrument(linear):
        handle = linear.register_forward_hook(lambda *_: None)
        duplicate = copy.copy(linear)
        assert duplicate.weight is linear.weight
        duplicate(x())
        assert handle.calls == 1
        duplicate.register_forward_hook(logging(log := [], "shared"))
        linear(x())
        assert log == ["shared"]
        fh.restore(duplicate)
        assert type(duplicate) is nn.Linear
        assert list(vars(duplicate)) == list(vars(nn.Linear(4, 4)))
        duplicate(x())
        linear(x())
        assert len(log) == 2
        assert handle.calls == 3
    assert type(linear) is nn.Linear


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_made_during_a_capture_is_plain(duplicate: Callable[[Any], Any]) -> None:
    model = small()
    with fh.capture(model, "first"):
        other = duplicate(model.first)
        model(x())
    assert type(other) is nn.Linear
    assert list(vars(other)) == list(vars(nn.Linear(4, 4)))
    model = small()
    with fh.register(model, "first", lambda _module, _args, output: output * 0):
        other = duplicate(model.first)
        model(x())
        assert not other(x()).any()
    fh.restore(other)
    assert type(other) is nn.Linear


def test_slots_are_copied_as_pytorch_copies_them() -> None:
    for duplicate in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        plain, ours = Slotted(4, 4), Slotted(4, 4)
        with fh.instrument(ours):
            kept = [hasattr(duplicate(each), "gain") for each in (plain, ours)]
        assert kept[0] == kept[1]


class Slotted(nn.Linear):
    __slots__ = ("gain",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.gain


def test_data_parallel_replicas_share_the_hooks() -> None:
    model = small()
    fh.instrument(model)
    handle = model.register_forward_hook(lambda _module, _args, output: output * 2)
    inner = model.first.register_forward_hook(lambda _module, _args, output: output + 1)
    # What torch.nn.parallel.replicate does, which itself needs a GPU.
    replica: Any = model._replicate_for_data_parallel()
    child = model.first._replicate_for_data_parallel()
    for name, parameter in model.first.named_parameters():
        setattr(child, name, parameter.detach().clone())
    replica.first = child
    assert model.first is not child
    assert torch.equal(replica(x()), model(x()))
    assert (handle.calls, inner.calls) == (2, 2)
    inner.remove()
    handle.remove()
    fh.restore(model)
    assert torch.equal(replica(x()), model(x()))


# The same as PyTorch, side by side


def side_by_side(act: Callable[[nn.Module, Log], Any], make: Callable[[], Any] = small) -> Log:
    """What `act` logs of a module that is instrumented is what it logs of a plain one."""
    logs: list[Log] = []
    for ours in (False, True):
        torch.manual_seed(0)
        log: Log = []
        model = make()
        if ours:
            with fh.instrument(model):
                act(model, log)
        else:
            act(model, log)
        logs.append(log)
    assert flat(logs[0]) == flat(logs[1])
    return logs[1]


def flat(log: Log) -> str:
    with_tensors = torch._tensor_str.printoptions(precision=8)
    with with_tensors:
        return repr(log)


def test_hooks_fire_as_in_pytorch() -> None:
    def act(model: nn.Module, log: Log) -> None:
        for name in ("a", "b"):
            model.register_forward_pre_hook(logging(log, f"pre {name}"))
            model.register_forward_hook(logging(log, f"post {name}"))
            model.register_full_backward_hook(logging(log, f"back {name}"))
            model.register_full_backward_pre_hook(logging(log, f"back pre {name}"))
        model.register_forward_pre_hook(logging(log, "pre first"), prepend=True)
        model.register_forward_hook(logging(log, "post first"), prepend=True)
        model.register_full_backward_hook(logging(log, "back first"), True)
        model.register_full_backward_pre_hook(logging(log, "back pre first"), prepend=True)
        model(x().requires_grad_()).sum().backward()

    assert len(side_by_side(act)) == 12


def test_hooks_see_and_change_what_pytorch_s_do() -> None:
    def act(model: nn.Module, log: Log) -> None:
        def pre(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            log.append((args, kwargs))
            return (), {"input": (args or (kwargs["input"],))[0] * 2}

        def post(_module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            log.append((args, kwargs, output))
            return output + 1

        first = model.first
        first.register_forward_pre_hook(pre, with_kwargs=True)
        first.register_forward_pre_hook(lambda _module, args: log.append(args))
        first.register_forward_hook(post, with_kwargs=True)
        first.register_forward_hook(lambda _module, args, output: log.append((args, output)))
        log.append(first(x()))
        log.append(first(input=x()))
        log.append(model(x()))

    side_by_side(act)


def test_gradients_are_seen_and_changed_as_in_pytorch() -> None:
    def act(model: nn.Module, log: Log) -> None:
        first = model.first
        first.register_full_backward_pre_hook(lambda _module, grad: (grad[0] * 2,))
        first.register_full_backward_hook(lambda _module, *grads: log.append(grads))
        first.register_full_backward_hook(lambda _module, grad_in, _out: (grad_in[0] + 1,))
        value = x().requires_grad_()
        model(value).sum().backward()
        log.append((value.grad, first.weight.grad, first.bias.grad))
        with torch.no_grad():
            model(value)
        assert len(log) == 2

    side_by_side(act)


REGISTER: dict[str, Callable[[nn.Module, Any], Any]] = {
    "method": lambda m, hook: m.register_forward_hook(hook),
    "behind our back": nn.Module.register_forward_hook,
    "global": lambda _, hook: torch_global.register_module_forward_hook(hook),
}


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("where", REGISTER)
@pytest.mark.parametrize("failing", ["forward_pre", "module", "forward", "nothing"])
def test_what_runs_after_an_exception_is_what_pytorch_runs(
    failing: str, where: str, always: bool
) -> None:
    class Model(nn.Module):
        def forward(self, value: int) -> int:
            if failing == "module":
                msg = failing
                raise ValueError(msg)
            return value

    def fail(*_: Any) -> None:
        raise ValueError(failing)

    def act(model: nn.Module, log: Log) -> None:
        with contextlib.ExitStack() as stack:
            keep = stack.callback
            if failing == "forward_pre":
                model.register_forward_pre_hook(fail)
            post = torch_global.register_module_forward_hook
            register = (
                post if where == "global" else getattr(model, "register_forward_hook")  # noqa: B009
            )
            if where == "behind our back":
                register = nn.Module.register_forward_hook.__get__(model)
            keep(register(lambda _m, a, o: log.append(("first", a, o)), always_call=always).remove)
            if failing == "forward":
                keep(register(fail).remove)
            keep(register(lambda _m, a, o: log.append(("last", a, o)), always_call=always).remove)
            keep(register(lambda _m, a, o: log.append(("plain", a, o))).remove)
            try:
                log.append(model(1))
            except ValueError as error:
                log.append(str(error))

    side_by_side(act, Model)


PHASES = ["forward_pre", "forward", "backward_pre", "backward"]


def test_torch_s_hooks_of_a_phase_go_first_the_global_ones_ahead() -> None:
    model = nn.Linear(4, 4)
    log: Log = []
    nn.Module.register_forward_hook(model, logging(log, "torch before"))
    nn.Module.register_forward_pre_hook(model, logging(log, "torch before, pre"))
    nn.Module.register_full_backward_hook(model, logging(log, "torch before, back"))
    nn.Module.register_full_backward_pre_hook(model, logging(log, "torch before, back pre"))
    fh.instrument(model)
    model.register_forward_hook(logging(log, "ours"), priority=9)
    model.register_forward_pre_hook(logging(log, "ours, pre"), prepend=True)
    model.register_full_backward_hook(logging(log, "ours, back"))
    model.register_full_backward_pre_hook(logging(log, "ours, back pre"))
    nn.Module.register_forward_hook(model, logging(log, "torch after"))
    handles = [
        torch_global.register_module_forward_hook(logging(log, "global")),
        torch_global.register_module_forward_pre_hook(logging(log, "global, pre")),
        torch_global.register_module_full_backward_hook(logging(log, "global, back")),
        torch_global.register_module_full_backward_pre_hook(logging(log, "global, back pre")),
    ]
    try:
        model(x().requires_grad_()).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    pre, post = ["torch before, pre", "ours, pre"], ["torch before", "torch after", "ours"]
    back_pre = ["torch before, back pre", "ours, back pre"]
    back = ["torch before, back", "ours, back"]
    expected = [
        *("global, pre", *pre, "global", *post),
        *("global, back pre", *back_pre, "global, back", *back),
    ]
    assert log == expected
    log.clear()
    model(x().requires_grad_()).sum().backward()
    assert log == [*pre, *post, *back_pre, *back]
    fh.restore(model)
    log.clear()
    model(x())
    assert log == ["torch before, pre", "torch before", "torch after"]


@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_torch_hook_that_changes_during_the_forward_counts_in_its_phase(change: str) -> None:
    def act(model: nn.Module, log: Log) -> None:
        late = nn.Module.register_forward_hook(model, logging(log, "removed too late"))

        def pre(*_: Any) -> None:
            if change == "remove":
                late.remove()
            else:
                nn.Module.register_forward_hook(model, logging(log, "added in time"))

        nn.Module.register_forward_pre_hook(model, pre)
        model(x())

    side_by_side(act)


def test_deprecated_backward_hooks_of_torch_s_go_on_working() -> None:
    def act(model: nn.Module, log: Log) -> None:
        nn.Module.register_backward_hook(
            model.first, lambda _module, grad_in, grad_out: log.append((grad_in, grad_out))
        )
        nn.Module.register_forward_pre_hook(model.first, logging(log, "pre"))
        nn.Module.register_forward_hook(model.first, logging(log, "post"))
        with warnings.catch_warnings(action="ignore"):
            model(x()).sum().backward()

    log = side_by_side(act)
    assert [each for each in log if isinstance(each, str)] == ["pre", "post"]
    assert len(log) == 3


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_torch_s_pre_hooks_go_first_beside_a_deprecated_backward_hook() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        log: Log = []
        linear.register_forward_pre_hook(logging(log, "ours"))
        nn.Module.register_forward_pre_hook(linear, logging(log, "torch"))
        nn.Module.register_backward_hook(linear, lambda *_: None)
        linear(x())
        assert log == ["torch", "ours"]


def test_register_backward_hook_is_the_full_one() -> None:
    with fh.instrument(linear := nn.Linear(4, 2)):
        shapes: Log = []
        linear.register_backward_hook(lambda _m, gi, go: shapes.append((gi[0].shape, go[0].shape)))
        linear(x().requires_grad_()).sum().backward()
        assert shapes == [((2, 3, 4), (2, 3, 2))]


# What stands in the way of a call


def test_a_replaced_forward_is_honoured_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.Linear):
        pass

    with fh.instrument(mine := Mine(4, 4)):
        before = mine(x())
        mine.forward = lambda input: input + 1  # type: ignore[method-assign]
        assert torch.equal(mine(x()), x() + 1)
        handle = mine.register_forward_hook(lambda _module, _args, output: output * 2)
        assert torch.equal(mine(x()), (x() + 1) * 2)
        del mine.forward
        handle.remove()
        assert torch.equal(mine(x()), before)
        monkeypatch.setattr(Mine, "forward", lambda self, input: input * 3)
        assert torch.equal(mine(x()), x() * 3)
        monkeypatch.undo()
        assert torch.equal(mine(x()), before)
        mine._call_impl = lambda input: input + 5  # type: ignore[assignment, method-assign, misc]
        assert torch.equal(mine(x()), x() + 5)


@pytest.mark.parametrize("where", ["class", "nn.Module"])
@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_replaced_class_call_is_honoured_at_the_next_call(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(nn.Linear):
        pass

    original = getattr(nn.Module, name)
    with fh.instrument(mine := Mine(4, 4)):
        handle = mine.register_forward_hook(lambda *_: None)
        mine(x())
        target = {"class": Mine, "nn.Module": nn.Module}[where]
        monkeypatch.setattr(target, name, lambda self, *args: original(self, *args) * 2)
        assert torch.equal(mine(x()), mine.forward(x()) * 2)
        if name == "__call__":
            assert handle.calls == 2
        monkeypatch.undo()
        assert torch.equal(mine(x()), mine.forward(x()))


def test_a_class_may_change_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.Linear):
        pass

    with fh.instrument(mine := Mine(4, 4)):
        handle = mine.register_forward_hook(lambda *_: None)
        for factor in range(10):
            monkeypatch.setattr(Mine, "forward", lambda _self, input, by=factor: input * by)
            for _ in range(3):
                assert torch.equal(mine(x()), x() * factor)
        assert handle.calls == 30


def test_restoring_removes_the_hooks_of_scopes_too() -> None:
    linear = nn.Linear(4, 4)
    with fh.scope() as s:
        fh.instrument(linear)
        handle = linear.register_forward_hook(lambda *_: None, scope=s)  # type: ignore[call-arg]
        fh.restore(linear)
        assert handle.removed  # type: ignore[attr-defined]


def test_fx_traces_the_same_graph() -> None:
    plain, ours = small(), small()
    with fh.instrument(ours):
        graphs = [torch.fx.symbolic_trace(model).graph for model in (plain, ours)]
    assert str(graphs[0]) == str(graphs[1])


def test_an_own_call_keeps_its_place_around_the_hooks() -> None:
    class Doubling(nn.Linear):
        def __call__(self, value: Tensor) -> Tensor:
            return super().__call__(value + 1) * 2

    class Elsewhere(nn.Linear):
        def __call__(self, value: Tensor) -> Tensor:
            return value

    def act(model: nn.Module, log: Log) -> None:
        model.register_forward_pre_hook(lambda _module, args: log.append(args))
        model.register_forward_hook(lambda _module, _args, output: output + 100)
        log.append(model(x()))

    assert len(side_by_side(act, lambda: Doubling(4, 4))) == 2
    assert len(side_by_side(act, lambda: Elsewhere(4, 4))) == 1


def test_every_way_of_calling_reaches_the_hooks() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        handle = linear.register_forward_hook(lambda *_: None)
        for way in (
            linear,
            linear.__call__,
            type(linear).__call__.__get__(linear),
            nn.Module.__call__.__get__(linear),
            linear._call_impl,
            linear._wrapped_call_impl,
        ):
            before = handle.calls
            way(x())
            assert handle.calls == before + 1
        linear.forward(x())
        assert handle.calls == 6


def test_a_class_that_overrides_call_impl_is_refused_and_left_as_it_was() -> None:
    class Own(nn.Linear):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return super()._call_impl(*args, **kwargs)

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4))
    before = state_of(model)
    with pytest.raises(fh.HookError, match=r"1 \(Own\): its class overrides _call_impl"):
        fh.instrument(model, ["0", "1"])
    assert state_of(model) == before
    with pytest.warns(fh.NotInstrumentedWarning, match=r"left as they are: 1 \(Own\)") as caught:
        undo = fh.instrument(model)
    assert caught[0].filename == __file__
    with undo:
        assert instrumented(model[0])
        assert type(model[1]) is Own
    assert state_of(model) == before
    with fh.instrument(model[0]):
        with pytest.raises(fh.HookError, match="overrides _call_impl"):
            model[0].__class__ = Own
        assert model[0].__class__ is nn.Linear


def test_a_warning_that_is_an_error_leaves_nothing_instrumented() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch_script(nn.ReLU()))
    with pytest.raises(fh.NotInstrumentedWarning):
        fh.instrument(model)
    assert not any(instrumented(each) for each in model[:1].modules())
    assert not instrumented(model)


# Classes


def test_a_custom_getattr_is_kept() -> None:
    class Anything(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            return f"made up {name}" if name[0] != "_" else super().__getattr__(name)

    class Model(Anything):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def forward(self, value: Tensor) -> Tensor:
            return value

    model = Model()
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda *_: None)
        assert model.anything == "made up anything"
        copy.deepcopy(model)(x())
        copy.copy(model)(x())
        assert handle.calls == 1
    assert type(model) is Model


def test_slots_are_kept() -> None:
    model = Slotted(4, 4)
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda *_: None)
        model.gain = 3.0
        model(x())
        assert handle.calls == 1
    assert type(model) is Slotted
    assert model.gain == 3.0


def test_neither_init_subclass_nor_a_metaclass_hears_of_it() -> None:
    known: Log = []

    class Meta(type):
        def __new__(cls, name: str, bases: Any, namespace: Any, **kwargs: Any) -> Any:
            known.append(f"new {name}")
            return super().__new__(cls, name, bases, namespace)

        def __init__(cls, name: str, bases: Any, namespace: Any, **kwargs: Any) -> None:
            known.append(f"init {name}")
            super().__init__(name, bases, namespace)

    class Mine(nn.Linear, metaclass=Meta):
        def __init_subclass__(cls, **_: Any) -> None:
            msg = f"{cls.__name__} is sealed"
            raise ValueError(msg)

    model = Mine(4, 4)
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda *_: None)
        model(x())
        assert handle.calls == 1
        assert type(type(model)) is Meta
    assert known == ["new Mine", "init Mine"]


def test_abstract_and_generic_and_data_classes() -> None:
    class Abstract(nn.Module, abc.ABC):
        @abc.abstractmethod
        def forward(self, value: Tensor) -> Tensor: ...

    class Concrete(Abstract):
        def forward(self, value: Tensor) -> Tensor:
            return value

    class Typed(Generic[T], nn.Module):  # noqa: PYI059 (the order that some have)
        def forward(self, value: Tensor) -> Tensor:
            return value

    @dataclasses.dataclass(eq=True)  # and so without a hash
    class Data(nn.Module):
        size: int

        def __post_init__(self) -> None:
            super().__init__()

        def forward(self, value: Tensor) -> Tensor:
            return value

    class AbstractFirst(abc.ABC, nn.Linear):
        pass

    class SlottedToo(Generic[T], Slotted):  # noqa: PYI059
        __slots__ = ("more",)

    for model in (Concrete(), Typed[int](), Data(3), AbstractFirst(4, 4), SlottedToo[int](4, 4)):
        plain = type(model)
        with fh.instrument(model):
            handle = model.register_forward_hook(lambda *_: None)
            model(x())
            assert handle.calls == 1
            assert isinstance(model, plain)
            assert isinstance(model, type(model))
            assert not isinstance(nn.Linear(4, 4), type(model))
        assert type(model) is plain


def test_instances_made_of_the_class_of_an_instrumented_module_are_plain_to_use() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        other = type(linear)(4, 4)
        assert isinstance(other, nn.Linear)
        other.register_forward_hook(logging(log := [], "torch"))
        other(x())
        assert log == ["torch"]
        assert type(pickle.loads(pickle.dumps(linear))) is nn.Linear
    with fh.instrument(other):
        other(x())
    assert type(other) is nn.Linear


def test_register_methods_of_the_class_s_own_are_kept() -> None:
    class Own(nn.Linear):
        def register_forward_hook(self, hook: Any, **options: Any) -> Any:  # type: ignore[override]
            self.own = hook
            return super().register_forward_hook(hook, **options)

    with fh.instrument(own := Own(4, 4)):
        own.register_forward_hook(hook := logging(log := [], "fired"))
        own(x())
    assert own.own is hook
    own(x())
    assert log == ["fired", "fired"]


def test_a_shared_module_has_one_registry() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleList([shared, nn.Sequential(shared, shared)])
    with fh.instrument(model):
        handle = shared.register_forward_hook(lambda *_: None)
        model[1](x())
        model[0](x())
        assert handle.calls == 3
        assert len({id(each) for each in (shared, model[0], model[1][0])}) == 1
    assert type(shared) is nn.Linear


def test_a_module_that_contains_itself() -> None:
    class Recursive(nn.Linear):
        def forward(self, value: Tensor, depth: int = 3) -> Tensor:
            return self(value, depth - 1) if depth else super().forward(value)

    recursive = Recursive(4, 4)
    recursive.own = recursive
    with fh.instrument(recursive):
        handle = recursive.register_forward_hook(lambda *_: None)
        recursive(x())
        assert handle.calls == 4
        duplicate = copy.deepcopy(recursive)
        assert duplicate.own is duplicate
        duplicate(x())
        assert handle.calls == 4
        fh.restore(duplicate)
        with pytest.raises(RecursionError):
            recursive(x(), 100_000)
    assert type(recursive) is type(duplicate) is Recursive


# torch's own machinery


class Zero(nn.Module):
    """A parametrization."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 0


@pytest.mark.parametrize("removed", ["during", "after", "never"])
@pytest.mark.parametrize("registered", ["before", "during"])
def test_parametrize(registered: str, removed: str) -> None:
    linear = nn.Linear(4, 2)
    if registered == "before":
        parametrize.register_parametrization(linear, "weight", Zero())
    parametrized = type(linear)
    with fh.instrument(linear):
        handle = linear.register_forward_hook(lambda *_: None)
        if registered == "during":
            parametrize.register_parametrization(linear, "weight", Zero())
            parametrized = linear.__class__
        assert torch.equal(linear(x()), linear.bias.expand(2, 3, 2))
        assert type(linear).__name__ == "ParametrizedLinear"
        duplicate = copy.deepcopy(linear)
        assert torch.equal(duplicate(x()), linear(x()))
        assert handle.calls == 2
        fh.restore(duplicate)
        assert type(duplicate) is parametrized
        if removed == "during":
            parametrize.remove_parametrizations(linear, "weight")
            assert linear.__class__ is nn.Linear
            linear(x())
            assert handle.calls == 3
    if removed == "after":
        assert type(linear) is parametrized
        parametrize.remove_parametrizations(linear, "weight")
    assert type(linear) is (parametrized if removed == "never" else nn.Linear)
    assert torch.equal(linear(x()), linear.bias.expand(2, 3, 2))
    assert not any("ferrohook" in key for key in vars(linear))


def test_prune_and_the_norms() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        linear.register_forward_pre_hook(lambda *_: None)
        prune.l1_unstructured(linear, "weight", 2)
        prune.l1_unstructured(linear, "weight", 2)
        linear(x())
        assert prune.is_pruned(linear)
        assert (linear.weight == 0).sum() == 4
        prune.remove(linear, "weight")
        with warnings.catch_warnings(action="ignore"):  # torch deprecates what it still ships
            nn.utils.spectral_norm(linear)
            linear(x())
            nn.utils.remove_spectral_norm(linear)
            nn.utils.weight_norm(linear)
            linear(x())
        parametrizations.orthogonal(linear, "weight_v")
    linear(x())
    with warnings.catch_warnings(action="ignore"):
        parametrize.remove_parametrizations(linear, "weight_v")
        nn.utils.remove_weight_norm(linear)
    assert type(linear) is nn.Linear
    assert not linear._forward_pre_hooks
    assert list(linear.state_dict()) == ["bias", "weight"]


def torch_script(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch deprecates what it still ships
        return torch.jit.script(module)


def test_torchscript_is_refused_with_the_reason() -> None:
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(nn.Linear(4, 4), x())
    for scripted in (torch_script(nn.Linear(4, 4)), traced):
        model = nn.Sequential(scripted, nn.ReLU())
        before = type(scripted)
        with pytest.raises(fh.HookError, match=r"0 \(.*\): TorchScript runs it outside of Python"):
            fh.instrument(model, "0")
        with pytest.raises(fh.HookError, match="the model itself"):
            fh.instrument(scripted)
        assert not instrumented(model[1])
        expected = model(x())
        with pytest.warns(fh.NotInstrumentedWarning, match="0 .*TorchScript"):
            fh.instrument(model)
        assert type(scripted) is before
        assert torch.equal(model(x()), expected)
        fh.restore(model)
        assert not instrumented(model)


@pytest.mark.filterwarnings("ignore")  # torch deprecates what it still ships
def test_script_compiles_a_model_without_hooks_and_refuses_hooks() -> None:
    with fh.instrument(model := small()):
        assert torch.equal(torch.jit.script(model)(x()), model(x()))
        model.first.register_forward_hook(lambda *_: None)
        with pytest.raises(fh.HookError, match="cannot compile hooks"):
            torch.jit.script(model)
        with pytest.raises(fh.HookError, match="cannot compile hooks"):
            torch.jit.script(nn.Sequential(model))
        model(x())
    assert type(model.first) is nn.Linear


@pytest.mark.filterwarnings("ignore")  # torch deprecates what it still ships
def test_jit_trace_records_the_hooks() -> None:
    with fh.instrument(model := small()):
        model.register_forward_hook(lambda _module, _args, output: output * 2)
        model.first.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
        nn.Module.register_forward_hook(model.first, lambda _module, _args, output: output + 3)
        traced = torch.jit.trace(model, x())
        assert torch.equal(traced(x()), model(x()))
        assert "first" in str(traced.graph)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_has_the_hooks_in_the_graph(strict: bool) -> None:
    with fh.instrument(model := small()):
        model.first.register_forward_hook(lambda _module, _args, output: output * 2)
        exported = torch.export.export(model, (x(),), strict=strict)
        expected = model(x())
    assert torch.equal(exported.module()(x()), expected)
    assert not torch.equal(model(x()), expected)


def test_a_graph_module() -> None:
    plain = torch.fx.symbolic_trace(small())
    model = copy.deepcopy(plain)
    cls = type(model)
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda _module, _args, output: output + 1)
        assert torch.equal(model(x()), plain(x()) + 1)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x()), plain(x()))
        for duplicate in (copy.deepcopy(model), copy.copy(model)):
            assert torch.equal(duplicate(x()), model(x()))
            fh.restore(duplicate)
            assert not instrumented(duplicate)
            assert torch.equal(duplicate(x()), plain(x()))
            assert torch.equal(copy.deepcopy(duplicate)(x()), plain(x()))
        relu = next(node for node in model.graph.nodes if node.target == "second")
        relu.replace_all_uses_with(relu.args[0])
        model.recompile()
        assert torch.equal(model(x()), plain.first(x()) + 1)
        calls = handle.calls
    assert type(model) is cls
    assert torch.equal(model(x()), plain.first(x()))
    assert handle.calls == calls


@pytest.mark.filterwarnings("ignore")  # torch deprecates what it still ships
def test_a_quantised_model() -> None:
    model = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), {nn.Linear, nn.LSTM}, dtype=torch.qint8
    )
    before = [type(each) for each in model]
    expected = call(model, (x(),))
    with fh.instrument(model):
        handles = [each.register_forward_hook(lambda *_: None) for each in model]
        assert same(call(model, (x(),)), expected)
        assert [handle.calls for handle in handles] == [1, 1]
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert same(call(duplicate, (x(),)), expected)
    assert [type(each) for each in model] == before


def test_a_lazy_module_becomes_what_it_is_while_instrumented() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with fh.instrument(model):
        handle = model[0].register_forward_hook(lambda *_: None)
        first = model(x())
        assert model[0].__class__ is nn.Linear
        assert repr(model[0]).startswith("Linear(")
        assert torch.equal(model(x()), first)
        assert handle.calls == 2
    assert [type(each) for each in model] == [nn.Linear, nn.BatchNorm1d]
    assert set(vars(model[0])) == set(vars(nn.Linear(4, 4)))


def test_functional_call() -> None:
    with fh.instrument(model := small()):
        model.first.register_forward_hook(lambda _module, _args, output: output + 1)
        state = {"first.weight": torch.zeros(4, 4), "first.bias": torch.ones(4)}
        output = torch.func.functional_call(model, state, (x(),))
        assert torch.equal(output, torch.full((2, 3, 4), 2.0))
        assert model.first.weight.any()


@pytest.mark.parametrize("select", ["layers.0.linear1", None])
def test_a_hook_keeps_transformer_layers_off_the_path_that_calls_no_submodules(
    select: str | None,
) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        fast = model(x())
        with fh.instrument(model, select):
            assert torch.equal(model(x()), fast)
            linear = model.layers[0].linear1
            handle = linear.register_forward_hook(lambda *_: None)
            model(x())
            assert handle.calls == 1
            behind = nn.Module.register_forward_hook(linear, logging(log := [], "torch"))
            handle.remove()
            model(x())
            behind.remove()
            model(x())
            assert log == ["torch"]
            linear._forward_hooks = OrderedDict()
            assert not linear._forward_hooks
        with fh.capture(model, "layers.1.linear1") as acts:
            model(x())
        assert acts["layers.1.linear1"].shape == (2, 3, 8)
        assert torch.equal(model(x()), fast)


def test_compiled_in_place_and_back() -> None:
    model = nn.Linear(4, 4)
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda _module, _args, output: output + 1)
        model.compile(backend="eager")
        expected = model.forward(x())
        assert torch.equal(model(x()), expected + 1)
        assert handle.calls == 1
    assert torch.equal(model(x()), expected)


# Counting


def test_nested_and_repeated_use_counts() -> None:
    model = small()
    before = state_of(model)
    with fh.instrument(model):
        outer = model.first.register_forward_hook(logging(log := [], "outer"))
        with fh.instrument(model, "first"), fh.instrument(model.first):
            model.first.register_forward_hook(logging(log, "inner"))
        model(x())
        assert log == ["outer", "inner"]
        again = fh.instrument(model, "second")
        again.restore()
        again.restore()
        assert instrumented(model.second)
    assert state_of(model) == before
    model(x())
    assert log == ["outer", "inner"]
    assert outer.removed
    fh.instrument(model, "first")
    fh.instrument(model, "second")
    fh.restore(model)
    assert [instrumented(each) for each in model.modules()] == [False, True, False]
    fh.restore(model)
    assert state_of(model) == before


def test_what_was_undone_is_not_undone_again() -> None:
    model = small()
    first, _second = fh.instrument(model), fh.instrument(model)
    first.restore()
    fh.restore(model)
    assert not instrumented(model)
    with pytest.raises(fh.HookError):
        fh.restore(model)
    with first:
        pass
    assert not instrumented(model)


@pytest.mark.parametrize("wrong", [small, lambda: 3, lambda: nn.Linear])
def test_restore_without_instrument_is_an_error(wrong: Callable[[], Any]) -> None:
    with pytest.raises(fh.HookError, match="was not instrumented"):
        fh.restore(wrong())


def test_restoring_a_part_of_what_was_instrumented_is_an_error() -> None:
    with fh.instrument(model := small()):
        with pytest.raises(fh.HookError, match="this Linear was not instrumented"):
            fh.restore(model.first)
        assert instrumented(model.first)


@pytest.mark.parametrize("wrong", [3, None, nn.Linear, "model"])
def test_only_modules_are_instrumented(wrong: Any) -> None:
    with pytest.raises(fh.HookTypeError, match=r"instance of nn\.Module"):
        fh.instrument(wrong)


def test_an_unknown_name_instruments_nothing() -> None:
    model = small()
    with pytest.raises(fh.SelectionError, match="first"):
        fh.instrument(model, ["second", "frist"])
    assert not any(instrumented(each) for each in model.modules())


def test_modules_come_and_go_while_instrumented() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with fh.instrument(model):
        model.append(added := nn.Linear(4, 4))
        taken, dropped = model[0], weakref.ref(model[1])
        del model[:2]
        gc.collect()
        assert dropped() is None
        assert [each is added for each in model] == [True]
        assert not instrumented(added)
        assert instrumented(taken)
    assert type(taken) is nn.Linear
    assert not any(instrumented(each) for each in model.modules())


def test_what_pytorch_s_methods_register_during_a_capture_outlasts_it() -> None:
    model = small()
    log: Log = []
    with fh.capture(model, "first"), fh.register(model, "first", lambda *_: None) as group:
        handle = model.first.register_forward_hook(logging(log, "theirs"))
        model(x())
        group.remove()
        model(x())
    model(x())
    assert log == ["theirs"] * 3
    handle.remove()
    model(x())
    assert log == ["theirs"] * 3
    with fh.capture(model, "first"):
        with fh.instrument(model):
            ours = model.first.register_forward_hook(lambda *_: None, priority=3)
            model(x())
        assert ours.calls == 1
    assert ours.removed


# Errors


def test_an_exception_tells_hook_phase_and_module() -> None:
    def my_hook(*_: Any) -> None:
        msg = "broken"
        raise ValueError(msg)

    with fh.instrument(model := small()):
        for name, phase in (("forward_pre", "forward_pre"), ("forward", "forward")):
            with getattr(model.first, f"register_{name}_hook")(my_hook) as handle:
                with pytest.raises(ValueError, match="broken") as caught:
                    model(x())
                (note,) = caught.value.__notes__
                for part in ("my_hook", phase, "Linear", f"id {handle.id}"):
                    assert part in note
        model(x())
        model.first.register_full_backward_hook(my_hook)
        with pytest.raises(ValueError, match="broken") as caught:
            model(x().requires_grad_()).sum().backward()
        assert "backward" in caught.value.__notes__[0]


def test_always_called_hooks_run_for_every_exception() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with fh.instrument(model := small()):
        log: Log = []
        model.register_forward_hook(logging(log, "outer"), always_call=True)
        model.first.register_forward_hook(interrupt)
        model.first.register_forward_hook(logging(log, "skipped"))
        model.first.register_forward_hook(logging(log, "inner"), always_call=True)
        with pytest.raises(KeyboardInterrupt):
            model(x())
        assert log == ["inner", "outer"]


def test_bad_hooks_are_refused_and_leave_nothing() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        for wrong in (3, None, "hook"):
            with pytest.raises(fh.HookTypeError):
                linear.register_forward_hook(wrong)  # type: ignore[arg-type]
        with pytest.raises(fh.HookTypeError):
            linear.register_forward_hook(fh.ForwardPreHook(lambda value: value))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="on_error"):
            linear.register_forward_hook(print, on_error="sometimes")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unexpected"):
            linear.register_forward_hook(print, sometimes=True)  # type: ignore[call-arg]
        value = x()
        assert torch.equal(linear(value), linear.forward(value))


def test_typed_hooks_and_the_options_of_ours() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        log: Log = []
        linear.register_forward_pre_hook(fh.ForwardPreHook(lambda value: value + 1))  # type: ignore[arg-type]
        linear.register_forward_hook(logging(log, "low"), priority=-1)  # type: ignore[call-arg]
        linear.register_forward_hook(logging(log, "high"), priority=1)  # type: ignore[call-arg]
        with fh.scope() as scope:
            linear.register_forward_hook(logging(log, "scoped"), scope=scope)  # type: ignore[call-arg]
            linear(x())
        linear(x())
        assert log == ["high", "scoped", "low", "high", "low"]


# Wrappers and instrumented modules


def test_a_wrapper_around_an_instrumented_module() -> None:
    linear = nn.Linear(4, 4)
    log: Log = []
    with fh.instrument(linear):
        linear.register_forward_hook(logging(log, "inside"))
        hooked = fh.HookedModule(linear)
        hooked.register_forward_hook(logging(log, "around"))
        hooked(x())
        assert log == ["inside", "around"]
        assert isinstance(hooked, nn.Linear)
        copy.deepcopy(hooked)(x())
        assert log == ["inside", "around"] * 2
        assert type(pickle.loads(pickle.dumps(hooked)).inner) is nn.Linear
        with fh.instrument(hooked):
            hooked(x())
    assert type(linear) is nn.Linear
    hooked(x())
    assert log == ["inside", "around"] * 3 + ["around"]


def test_a_wrapper_in_an_instrumented_model() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    model = nn.Sequential(hooked, nn.ReLU())
    kept = hooked.register_forward_hook(lambda *_: None)
    with fh.instrument(model):
        assert isinstance(model[0], fh.HookedModule)
        model.register_forward_hook(outer := logging([], "outer"))
        hooked.register_forward_hook(outer)
        model(x())
        assert kept.calls == 1
    assert [row.hook for row in hooked.hooks()] == [row.hook for row in hooked.hooks()][:2]
    model(x())
    assert kept.calls == 2
    assert not kept.removed
    assert type(model) is nn.Sequential


# Threads


def wrong_with_a_hook(model: Any, expected: Tensor) -> Iterator[str]:
    """Registers a hook, calls the model, removes the hook and calls again."""
    fired: Log = []
    thread = threading.get_ident()
    handle = model.first.register_forward_hook(
        lambda *_: fired.append(1) if threading.get_ident() == thread else None
    )
    theirs = None
    # Without a GIL PyTorch's own call, of a module that was just restored, fails where a hook is
    # registered while it iterates over its dict.
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        theirs = nn.Module.register_forward_hook(model.second, lambda *_: None)
    if not torch.equal(model(x()), expected):
        yield "output"
    if len(fired) != 1 or handle.removed:
        yield "hook"
    handle.remove()
    if theirs is not None:
        theirs.remove()
    model(x())
    if len(fired) != 1:
        yield "removal"


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("switch_often")
def test_threads_instrument_register_and_restore_one_model_while_others_call() -> None:
    model = small()
    before = state_of(model)
    expected = model(x())
    done = threading.Event()
    lost: Log = []

    def call_on() -> None:
        while not done.is_set():
            if not torch.equal(model(x()), expected):
                lost.append("output")

    def act(number: int) -> None:
        for step in range(150):
            select = (None, "first", ["second", "first"], nn.Linear)[(number + step) % 4]
            with fh.instrument(model, select):
                lost.extend(wrong_with_a_hook(model, expected))

    callers = [threading.Thread(target=call_on, daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        in_threads(4, act)
    finally:
        done.set()
        for caller in callers:
            caller.join(30)
    assert lost == []
    assert state_of(model) == before


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("switch_often")
def test_threads_undo_one_each() -> None:
    model = small()
    before = state_of(model)

    def act(_number: int) -> None:
        for _ in range(300):
            fh.instrument(model)
            fh.restore(model)

    in_threads(4, act)
    assert state_of(model) == before
    with pytest.raises(fh.HookError):
        fh.restore(model)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("switch_often")
def test_a_hook_of_pytorch_s_method_survives_captures_of_other_threads() -> None:
    model = small()
    expected = model(x())

    def act(number: int) -> None:
        for _ in range(150):
            if number:
                with fh.capture(model, "first") as acts:
                    model(x())
                assert acts["first"].shape == (2, 3, 4)
                assert type(pickle.loads(pickle.dumps(model.second))) is nn.ReLU
                assert torch.equal(copy.copy(model.second)(expected), expected)
                continue
            fired: Log = []
            handle = model.first.register_forward_hook(lambda *_, to=fired: to.append(1))
            model(x())
            assert fired
            handle.remove()
            count = len(fired)
            model.first(x())
            assert len(fired) <= count + 2 * 3  # those that were on their way

    in_threads(4, act)
    assert not any(instrumented(each) for each in model.modules())
    assert not any(hook_dicts(each) for each in model.modules())


# Lifetimes


@pytest.mark.frees_classes
def test_instrumenting_leaves_nothing_behind() -> None:
    class Mine(nn.Linear):  # torch.jit keeps the classes that it has seen
        pass

    model = nn.Sequential(OrderedDict(first=Mine(4, 4), second=nn.ReLU()))
    before = state_of(model)
    made: Log = []

    def cycle() -> None:
        with fh.instrument(model):
            made.append(weakref.ref(type(model.first)))
            model.first.register_forward_hook(lambda *_, me=model: me)
            copy.copy(model.first)
        if len(made) > 100:
            del made[:50]

    for _ in range(1000):
        cycle()
    gc.collect()
    count = len(gc.get_objects())
    for _ in range(9000):
        cycle()
    gc.collect()
    assert len(gc.get_objects()) < count + 200
    assert not any(cls() for cls in made)
    assert state_of(model) == before


@pytest.mark.frees_classes
def test_models_and_their_classes_are_collected() -> None:
    class Mine(nn.Linear):
        pass

    model, cls = Mine(4, 4), weakref.ref(Mine)
    del Mine
    hook = lambda *_, me=model: me  # noqa: E731 (a cycle through the hook)
    fh.instrument(model)
    model.register_forward_hook(hook)
    duplicate = copy.deepcopy(model)
    model(x())
    references = [weakref.ref(each) for each in (model, duplicate, hook, type(model))]
    del model, hook, duplicate
    gc.collect()
    assert not any(reference() for reference in references)
    assert cls() is None


def test_the_context_manager_does_not_keep_the_model() -> None:
    model = small()
    reference = weakref.ref(model)
    undo = fh.instrument(model)
    del model
    gc.collect()
    assert reference() is None
    undo.restore()
