"""Parity with PyTorch's hooks, and replaced `forward`, `__call__` and classes."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_global

import ferrohook as fh
from support.instrumentation import Log, logging, small, state_of, torch_script, x
from support.internals import is_instrumented

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Side by side with PyTorch


def side_by_side(act: Callable[[nn.Module, Log], Any], make: Callable[[], Any] = small) -> Log:
    """Log of `act` on an instrumented module, asserted equal to the log on a plain one."""
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


def test_hooks_observe_and_change_values_as_in_pytorch() -> None:
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


def test_hooks_observe_and_change_gradients_as_in_pytorch() -> None:
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
def test_hooks_after_an_exception_run_as_in_pytorch(failing: str, where: str, always: bool) -> None:
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


def register_prepended(model: nn.Module, log: Log) -> Iterator[Any]:
    """Registers torch's hooks of all phases, global ones included, and yields their handles."""
    for name in ("a", "b"):
        yield model.register_forward_pre_hook(logging(log, f"pre {name}"), prepend=True)
        yield model.register_forward_hook(logging(log, f"post {name}"), prepend=True)
        yield model.register_full_backward_hook(logging(log, f"back {name}"), prepend=True)
        yield model.register_full_backward_pre_hook(logging(log, f"back pre {name}"), prepend=True)
        for kind in ("forward_pre", "forward", "full_backward", "full_backward_pre"):
            register = getattr(torch_global, f"register_module_{kind}_hook")
            handle = register(logging(log, f"global {kind} {name}"))
            handle.hooks_dict_ref().move_to_end(handle.id, last=False)
            yield handle


@pytest.mark.parametrize("by", ["instrument", "register", "capture"])
def test_torch_s_prepended_hooks_keep_their_order(by: str) -> None:
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "instrument": fh.instrument,
        "register": lambda model: fh.register(model, "*", lambda *_: None),
        "capture": lambda model: fh.capture(model, "*", grads=True),
    }
    logs: list[Log] = []
    for way in (contextlib.nullcontext, ways[by]):
        log: Log = []
        model = nn.Sequential(nn.Linear(4, 4))
        with contextlib.ExitStack() as stack:
            for handle in (*register_prepended(model[0], log), *register_prepended(model, log)):
                stack.callback(handle.remove)
            stack.enter_context(way(model))
            model(x().requires_grad_()).sum().backward()
        logs.append(log)
    assert logs[0] == logs[1]
    assert logs[0].index("pre b") < logs[0].index("pre a")


@pytest.mark.parametrize("name", ["forward_pre", "forward", "backward_pre", "backward"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_global_hook_dicts_that_are_replaced_are_read_anew(wrapped: bool, name: str) -> None:
    log: Log = []
    model = nn.Linear(4, 4)
    called = fh.HookedModule(model) if wrapped else model
    restored = contextlib.nullcontext() if wrapped else fh.instrument(model)

    def run() -> Log:
        log.clear()
        called(x().requires_grad_()).sum().backward()
        return log.copy()

    kind = name.replace("backward", "full_backward")
    with restored:
        assert run() == []
        old = getattr(torch_global, f"register_module_{kind}_hook")(logging(log, "old"))
        try:
            assert run() == ["old"]
            new = OrderedDict(new=logging(log, "new"))
            with mock.patch.object(torch_global, f"_global_{name}_hooks", new):
                assert run() == ["new"]
                new.clear()
                assert run() == []
            assert run() == ["old"]
        finally:
            old.remove()
        with mock.patch.object(torch_global, f"_global_{name}_hooks", new):
            assert run() == []
            new["new"] = logging(log, "new")
            assert run() == ["new"]


PHASES = ["forward_pre", "forward", "backward_pre", "backward"]


def test_in_each_phase_torch_s_global_hooks_then_its_module_hooks_run_first() -> None:
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
def test_a_torch_hook_changed_during_the_forward_takes_effect_in_its_phase(change: str) -> None:
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


@pytest.mark.parametrize("fails", [False, True])
def test_torch_s_hooks_that_a_pre_hook_adds_fire_in_the_same_call(fails: bool) -> None:
    def act(model: nn.Module, log: Log) -> None:
        def pre(*_: Any) -> None:
            hook = logging(log, "added in time")
            handles.append(nn.Module.register_forward_hook(model, hook, always_call=fails))
            handles.append(torch_global.register_module_forward_hook(logging(log, "of all")))

        handles: list[Any] = []
        model.register_forward_pre_hook(pre)
        with contextlib.suppress(RuntimeError):
            model(torch.ones(1, 99) if fails else x())
        for handle in handles:
            handle.remove()

    assert "added in time" in flat(side_by_side(act))


@pytest.mark.parametrize("before", [False, True])
def test_a_scope_that_a_pre_hook_enters_is_in_the_next_phase(before: bool) -> None:
    model, fired = small(), []
    with fh.instrument(model):
        scope = fh.Scope()
        if before:
            fh.register(model, "", lambda *_: None, phase="forward_pre", scope=scope)
        fh.register(model, "", lambda *_: fired.append("fired"), scope=scope)
        model.register_forward_pre_hook(lambda *_: scope.__enter__() and None)
        model(x())
        scope.__exit__(None, None, None)
    assert fired == ["fired"]


def test_a_forward_that_a_pre_hook_replaces_runs_in_the_next_call() -> None:
    def act(model: nn.Module, log: Log) -> None:
        def replace(*_: Any) -> None:
            model.forward = lambda input: log.append("new") or input  # type: ignore[assignment, func-returns-value]

        nn.Module.register_forward_pre_hook(model, replace)
        model(x())
        log.append("next call")
        model(x())

    assert side_by_side(act)[-2:] == ["next call", "new"]


def test_torch_s_deprecated_backward_hooks_still_work() -> None:
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
def test_torch_s_pre_hooks_run_first_beside_a_deprecated_backward_hook() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        log: Log = []
        linear.register_forward_pre_hook(logging(log, "ours"))
        nn.Module.register_forward_pre_hook(linear, logging(log, "torch"))
        nn.Module.register_backward_hook(linear, lambda *_: None)
        linear(x())
        assert log == ["torch", "ours"]


# Replaced `forward`, `__call__` and classes


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


def test_restoring_removes_hooks_of_scopes() -> None:
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


def test_a_class_s_own_call_runs_around_the_hooks() -> None:
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


def test_hooks_fire_on_every_way_of_calling() -> None:
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


def test_a_class_that_overrides_call_impl_is_refused_and_unchanged() -> None:
    class Own(nn.Linear):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return super()._call_impl(*args, **kwargs)

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4))
    before = state_of(model)
    with pytest.raises(fh.HookError, match=r"1 \(Own\): its class overrides _call_impl"):
        fh.instrument(model, ["0", "1"])
    assert state_of(model) == before
    with pytest.warns(
        fh.errors.NotInstrumentedWarning, match=r"not instrumented: 1 \(Own\)"
    ) as caught:
        undo = fh.instrument(model)
    assert caught[0].filename == __file__
    with undo:
        assert is_instrumented(model[0])
        assert type(model[1]) is Own
    assert state_of(model) == before
    with fh.instrument(model[0]):
        with pytest.raises(fh.HookError, match="overrides _call_impl"):
            model[0].__class__ = Own
        assert model[0].__class__ is nn.Linear


def test_a_warning_raised_as_an_error_leaves_nothing_instrumented() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch_script(nn.ReLU()))
    with pytest.raises(fh.errors.NotInstrumentedWarning):
        fh.instrument(model)
    assert not any(is_instrumented(each) for each in model[:1].modules())
    assert not is_instrumented(model)
