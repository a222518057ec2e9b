"""`register` on many modules."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.hooks import add, ignore
from support.internals import instrumented
from support.limits import LIMIT
from support.threads import run_together

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_plain_model_is_instrumented_while_a_hook_is_registered(
    model: nn.Sequential, x: Tensor
) -> None:
    expected = model(x)
    group = fh.register(model, "1", add(1))
    assert instrumented(model) == ["1"]
    assert torch.equal(model(x), expected + 1)
    group.remove()
    assert instrumented(model) == []
    assert type(model[1]) is nn.Sequential
    assert torch.equal(model(x), expected)


def test_an_instrumented_model_stays_instrumented(model: nn.Sequential, x: Tensor) -> None:
    with fh.instrument(model):
        first, second = (fh.register(model, nn.Linear, ignore) for _ in range(2))
        first.remove()
        first.remove()
        model(x)
        assert (first.calls, second.calls) == (0, 2)
        second.remove()
        assert instrumented(model) == ["", "0", "1", "1.0", "1.1"]
    assert instrumented(model) == []


@pytest.mark.parametrize("phase", ["forward_pre", "forward", "backward_pre", "backward"])
def test_hooks_of_each_phase(model: nn.Sequential, phase: str) -> None:
    with fh.register(model, ["0", "1.0"], ignore, phase=phase) as group:
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert [(handle.phase, handle.calls) for handle in group] == [(phase, 1)] * 2


def test_the_phase_defaults_to_that_of_a_typed_hook_or_to_forward(
    model: nn.Sequential,
) -> None:
    typed = {
        "forward_pre": fh.ForwardPreHook(lambda x: x),
        "forward": fh.ForwardHook(ignore),
        "backward": fh.BackwardHook(ignore),
    }
    for phase, hook in [*typed.items(), ("forward", ignore)]:
        (handle,) = fh.register(model, "0", hook)
        assert handle.phase == phase
        handle.remove()
    with pytest.raises(fh.HookTypeError):
        fh.register(model, "0", typed["forward"], phase="forward_pre")


def test_the_options_work_as_in_the_register_methods(model: nn.Sequential, x: Tensor) -> None:
    order: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *it: order.append(f"{name}{len(it)}")

    fh.register(model, "0", note("plain"))
    fh.register(model, "0", note("kwargs"), with_kwargs=True, prepend=True)
    fh.register(model, "0", note("first"), priority=1)
    fh.register(model, "0", lambda *_: 1 / 0, on_error="ignore", priority=2)
    model(x)
    assert order == ["first3", "kwargs4", "plain3"]
    fh.register(model, "0", note("always"), always_call=True, priority=-1)
    fh.register(model, "0", lambda *_: 1 / 0)
    order.clear()
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert order == ["first3", "kwargs4", "plain3", "always3"]


def test_the_hook_is_registered_on_a_wrapper_inside_the_model(x: Tensor) -> None:
    wrapper = fh.HookedModule(nn.Linear(3, 3))
    model = nn.Sequential(wrapper)
    with fh.register(model, "0", ignore) as group:
        model(x)
        assert [row.id for row in wrapper.hooks()] == [group["0"].id]
        assert instrumented(model) == []
    assert wrapper.hooks() == []


def test_the_hook_is_registered_once_on_a_shared_module(x: Tensor) -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, shared)
    with fh.register(model, nn.Linear, ignore) as group:
        model(x)
    assert (group.names, group.calls) == (["0"], 2)


def test_the_hook_is_registered_once_on_a_module_selected_by_two_paths(x: Tensor) -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    paths = ["0", "2"]
    with fh.register(model, paths, ignore) as group:
        model(x)
    assert (group.names, group.calls) == (["0"], 2)
    one = fh.Add(torch.ones(3))

    def change(*entries: Any) -> float:
        plain, changed = (
            fh.run(model, x, plan=fh.Plan(*each, fh.keep(paths, calls="all"))).acts
            for each in ((), entries)
        )
        assert list(plain) == list(changed) == paths
        return (changed["2"][0] - plain["2"][0]).mean().item()

    assert change(fh.on(paths, one)) == pytest.approx(1)
    assert change(fh.on("0", one), fh.on("2", one)) == pytest.approx(2)  # two hooks
    with fh.capture(model, paths, calls="all") as acts:
        model(x)
    assert [len(acts[name]) for name in paths] == [2, 2]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hook": 3}, fh.HookTypeError),
        ({"hook": None}, fh.HookTypeError),
        ({"phase": "sideways"}, ValueError),
        ({"phase": 3}, fh.HookTypeError),
        ({"on_error": "explode"}, ValueError),
        ({"priority": "high"}, fh.HookTypeError),
        ({"prepend": 1}, TypeError),
        ({"scope": "s"}, fh.HookTypeError),
        ({"what": "nope"}, fh.SelectionError),
        ({"what": []}, fh.SelectionError),
        ({"what": 3}, fh.HookTypeError),
        ({"model": "model"}, fh.HookTypeError),
        ({"unknown": 1}, TypeError),
    ],
)
def test_bad_input_is_refused_and_registers_nothing(
    model: nn.Sequential, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        fh.register(**{"model": model, "what": None, "hook": ignore, **options})
    assert instrumented(model) == []


def test_a_module_that_cannot_be_instrumented_leaves_the_others_unchanged() -> None:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.ReLU()))
    with pytest.raises(fh.HookError, match="TorchScript"):
        fh.register(model, None, ignore)
    assert instrumented(model) == []


# With a scope


def test_leaving_the_scope_restores_the_modules(model: nn.Sequential, x: Tensor) -> None:
    expected = model(x)
    with fh.scope() as s:
        fh.register(model, "0", ignore, scope=s)  # the group is dropped
        group = fh.register(model, "1", add(1), scope=s)
        assert torch.equal(model(x), expected + 1)
    assert instrumented(model) == []
    assert group.removed
    group.remove()
    with fh.instrument(model):
        group.remove()
        assert instrumented(model) == ["", "0", "1", "1.0", "1.1"]


def test_removing_and_then_leaving_restores_once(model: nn.Sequential) -> None:
    with fh.instrument(model):
        with fh.scope() as s:
            for _ in range(3):
                fh.register(model, "0", ignore, scope=s).remove()
        assert instrumented(model) == ["", "0", "1", "1.0", "1.1"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_model_that_keeps_its_groups_is_copied_and_saved(
    model: nn.Sequential, duplicate: Callable[[Any], Any]
) -> None:
    model.group = fh.register(model, "0", ignore)
    model.instrumented = fh.instrument(model, "1")
    copied = duplicate(model)
    assert copied.group.removed
    assert copied.group.names == ["0"]
    copied.group.remove()
    copied.instrumented.restore()
    assert instrumented(model) == ["0", "1"]
    assert not model.group.removed


def test_a_left_scope_is_refused(model: nn.Sequential) -> None:
    with fh.scope() as s:
        pass
    with pytest.raises(fh.HookError, match="this scope was left"):
        fh.register(model, None, ignore, scope=s)
    assert instrumented(model) == []


def test_a_scope_does_not_keep_the_model_alive() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    freed = weakref.ref(model)
    with fh.scope() as s:
        fh.register(model, None, ignore, scope=s)
        del model
        gc.collect()
        assert freed() is None


# The group


def test_a_group_is_a_collection_of_its_handles(model: nn.Sequential, x: Tensor) -> None:
    group = fh.register(model, nn.Linear, ignore)
    model(x)
    assert (len(group), group.names, group.calls) == (2, ["0", "1.0"], 2)
    assert [group[name] for name in group.names] == list(group)
    assert not group.removed
    assert repr(group) == "<HandleGroup of 2 hooks, registered, calls=2>"
    group["0"].remove()
    assert not group.removed
    group.remove()
    assert group.removed
    assert repr(group) == "<HandleGroup of 2 hooks, removed, calls=2>"
    with pytest.raises(fh.SelectionError, match=r"'nope' has no hook .* only '0', '1.0'"):
        group["nope"]


def test_disable_and_enable(model: nn.Sequential, x: Tensor) -> None:
    group = fh.register(model, nn.Linear, ignore)
    group.disable()
    model(x)
    assert [(handle.enabled, handle.calls) for handle in group] == [(False, 0)] * 2
    group.enable()
    model(x)
    assert [(handle.enabled, handle.calls) for handle in group] == [(True, 1)] * 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_with_removes_on_an_exception_too(model: nn.Sequential, error: type[BaseException]) -> None:
    group = fh.register(model, None, ignore)
    with pytest.raises(error), group:
        raise error
    assert group.removed
    assert instrumented(model) == []


def test_a_hook_may_remove_its_group(model: nn.Sequential, x: Tensor) -> None:
    def remove(*_: Any) -> None:
        group.remove()

    group = fh.register(model, nn.Linear, remove)
    expected = model(x)
    assert torch.equal(model(x), expected)
    assert (group.calls, instrumented(model)) == (1, [])


def test_waiting_from_inside_raises_and_all_are_removed(model: nn.Sequential, x: Tensor) -> None:
    def remove(*_: Any) -> None:
        group.remove(wait=True)

    group = fh.register(model, nn.Linear, remove)
    with pytest.raises(fh.HookError, match="inside"):
        model(x)
    assert group.removed
    assert instrumented(model) == []


def test_remove_waits_for_threads_inside(model: nn.Sequential, x: Tensor) -> None:
    inside, go_on, left = threading.Event(), threading.Event(), threading.Event()

    def block(*_: Any) -> None:
        inside.set()
        assert go_on.wait(LIMIT)
        left.set()

    group = fh.register(model, ["0", "1"], block)
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    assert inside.wait(LIMIT)
    with pytest.raises(TimeoutError):
        group.remove(wait=True, timeout=0.01)
    assert group.removed
    assert instrumented(model) == []
    threading.Timer(0.05, go_on.set).start()
    group.remove(wait=True, timeout=LIMIT)
    assert left.is_set()
    thread.join(LIMIT)
    assert group.calls == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"wait": True, "timeout": -1}, ValueError),
        ({"timeout": 1}, ValueError),
        ({"wait": True, "timeout": "1"}, fh.HookTypeError),
        ({"wait": "yes"}, TypeError),
    ],
)
def test_wrong_options_of_remove_remove_nothing(
    model: nn.Sequential, options: dict[str, Any], error: type[Exception]
) -> None:
    group = fh.register(model, nn.Linear, ignore)
    with pytest.raises(error):
        group.remove(**options)
    assert [(handle.removed, handle.enabled) for handle in group] == [(False, True)] * 2
    assert instrumented(model) == ["0", "1.0"]


@pytest.mark.usefixtures("switch_often")
def test_concurrent_removals_restore_the_modules_once(model: nn.Sequential) -> None:
    with fh.instrument(model):
        for _ in range(50):
            group = fh.register(model, None, ignore)
            run_together(*[group.remove] * 4)
        assert instrumented(model) == ["", "0", "1", "1.0", "1.1"]
    assert instrumented(model) == []


def test_dropping_a_group_leaves_its_hooks_registered(model: nn.Sequential, x: Tensor) -> None:
    expected = model(x)
    fh.register(model, "", add(1))
    gc.collect()
    assert torch.equal(model(x), expected + 1)
    fh.instrument(model).restore()
    assert torch.equal(model(x), expected + 1)


def test_groups_leave_nothing_behind(model: nn.Sequential, x: Tensor) -> None:
    freed = []
    for _ in range(100):
        hook = add(0)
        freed.append(weakref.ref(hook))
        with (
            fh.scope() as s,
            fh.register(model, None, hook),
            fh.register(model, "0", hook, scope=s),
        ):
            model(x)
    del hook
    assert sum(each() is not None for each in freed) == 0


# Hooks that never fired


def test_modules_that_never_ran_warn_at_exit(model: nn.Sequential, x: Tensor) -> None:
    with (
        pytest.warns(
            fh.errors.NeverFiredWarning, match=r"^'1', '1\.1' were selected and never"
        ) as told,
        fh.register(model, ["1", "1.1", "0"], ignore),
    ):
        model[0](x)
    assert told[0].filename == __file__


def test_the_warning_raised_as_an_error_still_removes_the_hooks(model: nn.Sequential) -> None:
    with pytest.raises(fh.errors.NeverFiredWarning), fh.register(model, None, ignore) as group:
        pass
    assert group.removed
    assert instrumented(model) == []


def test_disabled_and_removed_hooks_do_not_warn(model: nn.Sequential, x: Tensor) -> None:
    with fh.register(model, nn.Linear, ignore) as group:
        group["0"].disable()
        group["1.0"].remove()
        model(x)
    assert group.calls == 0


def test_a_group_without_with_does_not_warn(model: nn.Sequential) -> None:
    fh.register(model, nn.Linear, ignore).remove()


def test_backward_hooks_that_never_fired_warn_with_the_reason(
    model: nn.Sequential, x: Tensor
) -> None:
    with (
        pytest.warns(fh.errors.NeverFiredWarning, match="no gradient reached '0' in this context"),
        fh.register(model, "0", ignore, phase="backward"),
    ):
        model(x)


@pytest.mark.parametrize(
    ("phase", "hook"),
    [
        ("forward", lambda _output: None),
        ("forward", lambda _module, _args: None),
        ("forward_pre", lambda _module, _args, _output: None),
        ("backward", lambda _module, _gradient: None),
        ("backward_pre", lambda _module, _taken, _given: None),
        ("forward", lambda *, output: None),
        ("forward", functools.partial(lambda _module, _args, _output: None, 1)),
    ],
)
def test_a_callable_that_cannot_be_called_is_refused(phase: Any, hook: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(fh.HookTypeError, match=rf"^a {phase} hook is called as hook\(module, "):
        fh.register(model, "0", hook, phase=phase)
    assert type(model[0]) is nn.Linear


def test_a_group_has_the_priority_of_its_hooks() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    first = fh.register(model, "*", lambda *_: seen.append("first"))
    second = fh.register(model, "*", lambda *_: seen.append("second"), priority=3)
    assert (first.priority, second.priority) == (0, 3)
    first.priority = 5
    assert [handle.priority for handle in first] == [5, 5]
    model(torch.ones(2))
    assert seen == ["first", "second"] * 2
    first["0"].priority = 1
    assert first.priority is None
    with pytest.raises(fh.HookTypeError):
        first.priority = "high"  # type: ignore[assignment]
    assert [handle.priority for handle in first] == [1, 5]
    first.remove()
    second.remove()


def test_callables_of_any_kind_are_taken() -> None:
    class Hook:
        def method(self, _module: Any, _args: Any, _output: Any) -> None: ...

        def __call__(self, _module: Any, _args: Any, *rest: Any) -> None: ...

    @functools.wraps(lambda _one: None)
    def wraps(_module: Any, _args: Any, _output: Any) -> None: ...

    model = nn.Sequential(nn.Linear(2, 2))
    for hook in (
        wraps,
        Hook(),
        Hook().method,
        print,
        lambda *_call: None,
        mock.Mock(return_value=None),
    ):
        with fh.register(model, "0", hook):
            model(torch.ones(2))
    kept: dict[str, Any] = {}

    def with_kwargs(_module: Any, _args: Any, kwargs: Any, _output: Any) -> None:
        kept.update(kwargs)

    with fh.register(model, "0", with_kwargs, with_kwargs=True):
        model(torch.ones(2))
    with pytest.raises(fh.HookTypeError, match="but this one takes"):
        fh.register(model, "0", with_kwargs)
