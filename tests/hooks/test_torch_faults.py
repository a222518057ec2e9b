"""Faults of PyTorch's own hooks that are gone here.

Each test shows that ferrohook is right, then that plain PyTorch is not: its reason to exist. With a
later torch that is right, the second half is skipped with a message.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_global

import ferrohook as fh
from support.limits import LIMIT
from support.modules import Failing
from support.threads import repeating

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def of_the_user() -> ValueError:
    return ValueError("the user's error")


def raised_by(act: Callable[[], object]) -> BaseException | None:
    """Exception that `act` raises, or None; warnings are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            act()
        except BaseException as error:  # noqa: BLE001 (returned)
            return error
    return None


def expect_fault(shown: object, fault: str) -> None:
    """Skips the rest of the test if torch no longer has the fault."""
    if not shown:
        pytest.skip(f"ours is right; torch {torch.__version__} no longer has the fault: {fault}")


# A removed hook


def call_with_first_hook_removing_the_second(
    module: nn.Module, phase: str, **options: Any
) -> tuple[list[Any], BaseException | None]:
    """Arguments of each invocation of the second hook, and the exception of the call."""
    seen: list[Any] = []
    register: Any = getattr(module, f"register_{phase}_hook")
    register(lambda *_: second.remove())
    second: Any = register(lambda *given: seen.append(given[1:]), **options)
    return seen, raised_by(lambda: module(1, scale=2))


@pytest.mark.parametrize("phase", ["forward_pre", "forward"])
def test_a_hook_removed_by_an_earlier_one_does_not_fire(phase: str) -> None:
    ours = call_with_first_hook_removing_the_second(fh.HookedModule(Failing()), phase)
    assert ours == ([], None)
    seen, _ = call_with_first_hook_removing_the_second(Failing(), phase)
    expect_fault(seen, "a removed hook still fires after remove() returned")


@pytest.mark.parametrize("phase", ["forward_pre", "forward"])
def test_removing_a_later_with_kwargs_hook_is_no_type_error(phase: str) -> None:
    def strict(_module: nn.Module, args: Any, kwargs: dict[str, Any], *output: Any) -> None:
        assert isinstance(kwargs, dict)
        assert len(output) == (phase == "forward")

    def call(module: nn.Module) -> BaseException | None:
        register: Any = getattr(module, f"register_{phase}_hook")
        register(lambda *_: second.remove())
        second: Any = register(strict, with_kwargs=True)
        return raised_by(lambda: module(1, scale=2))

    assert call(fh.HookedModule(Failing())) is None
    shown = call(Failing())
    expect_fault(shown, "a with_kwargs hook that was removed is called without its kwargs")
    assert isinstance(shown, TypeError | AssertionError)


@contextmanager
def inside_first_hook(module: nn.Module, phase: str) -> Iterator[None]:
    """Runs the block while another thread's call is inside a first, blocking hook."""
    entered, release = threading.Event(), threading.Event()

    def block(*_: Any) -> None:
        entered.set()
        assert release.wait(LIMIT)

    getattr(module, f"register_{phase}_hook")(block, prepend=True)
    failed: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: failed.append(raised_by(lambda: module(1, scale=2))))
    thread.start()
    assert entered.wait(LIMIT)
    try:
        yield
    finally:
        release.set()
        thread.join(LIMIT)
    assert len(failed) == 1
    assert not isinstance(failed[0], AssertionError)


@pytest.mark.parametrize("phase", ["forward_pre", "forward"])
def test_a_with_kwargs_hook_removed_by_another_thread_never_gets_wrong_arguments(
    phase: str,
) -> None:
    def call(module: nn.Module) -> list[int]:
        counts: list[int] = []
        handle = getattr(module, f"register_{phase}_hook")(
            lambda *given: counts.append(len(given)), with_kwargs=True
        )
        with inside_first_hook(module, phase):
            handle.remove()
        return counts

    assert call(fh.HookedModule(Failing())) == []
    shown = call(Failing())
    expect_fault(shown, "a with_kwargs hook removed by another thread gets wrong arguments")
    right = {"forward_pre": 3, "forward": 4}[phase]
    assert shown == [right - 1]


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("phase", ["forward_pre", "forward"])
def test_with_kwargs_hooks_get_consistent_arguments_during_registering_and_removing(
    phase: str,
) -> None:
    # PyTorch fails here only by chance, so only ferrohook is run.
    module = fh.HookedModule(Failing())
    register: Any = getattr(module, f"register_{phase}_hook")
    right = {"forward_pre": 3, "forward": 4}[phase]
    wrong: list[int] = []
    fired = removed = 0

    def hook(*given: Any) -> None:
        nonlocal fired
        fired += 1
        if len(given) != right:
            wrong.append(len(given))

    def churn() -> None:
        nonlocal removed
        handles = [register(hook, with_kwargs=True) for _ in range(3)]
        for handle in handles:
            handle.remove()
            removed += 1

    with repeating(churn, threads=2):
        while min(fired, removed) < 200_000:
            module(1, scale=2)
    assert wrong == []
    assert list(module.hooks(phase)) == []


@pytest.mark.parametrize("phase", ["forward_pre", "forward"])
def test_a_hook_removed_by_another_thread_does_not_fire_after_remove_returned(phase: str) -> None:
    def call(module: nn.Module) -> list[str]:
        fired: list[str] = []
        handle = getattr(module, f"register_{phase}_hook")(lambda *_: fired.append("removed"))
        with inside_first_hook(module, phase):
            handle.remove()
        return fired

    assert call(fh.HookedModule(Failing())) == []
    expect_fault(call(Failing()), "a removed hook still fires after remove() returned")


@pytest.mark.parametrize("phase", ["full_backward_pre", "full_backward"])
def test_a_backward_hook_removed_after_the_forward_does_not_fire(phase: str) -> None:
    def call(module: nn.Module) -> list[str]:
        fired: list[str] = []
        handle = getattr(module, f"register_{phase}_hook")(lambda *_: fired.append("removed"))
        out = module(torch.ones(2, requires_grad=True))
        handle.remove()
        out.sum().backward()
        return fired

    assert call(fh.HookedModule(Failing())) == []
    expect_fault(call(Failing()), "a backward hook removed after the forward still fires")


# always_call


def fail_with(module: Any, change: Callable[[Any, Any], None]) -> tuple[Any, list[str]]:
    """Exception of a failing call whose first `always_call` hook changes the hooks."""
    fired: list[str] = []
    module.error = of_the_user()

    def hook(*_: Any) -> None:
        fired.append("first")
        change(module, first)

    first = module.register_forward_hook(hook, always_call=True)
    module.register_forward_hook(lambda *_: fired.append("second"), always_call=True)
    return raised_by(lambda: module(1)), fired


@pytest.mark.parametrize(
    "change",
    [
        lambda module, first: first.remove(),
        lambda module, first: module.register_forward_hook(lambda *_: None) and None,
    ],
    ids=["removes itself", "registers another"],
)
def test_an_always_call_hook_that_changes_the_hooks_leaves_the_users_error(change: Any) -> None:
    error, fired = fail_with(fh.HookedModule(Failing()), change)
    assert str(error) == "the user's error"
    assert fired == ["first", "second"]
    error, fired = fail_with(Failing(), change)
    expect_fault(
        not isinstance(error, ValueError), "'OrderedDict mutated' in place of the user's error"
    )
    assert isinstance(error, RuntimeError)
    assert "mutated during iteration" in str(error)
    assert fired == ["first"]


def test_hooks_changed_by_another_thread_leave_the_users_error() -> None:
    def call(module: Any) -> tuple[Any, list[str]]:
        fired: list[str] = []
        module.error = of_the_user()
        entered, release = threading.Event(), threading.Event()
        failed: list[Any] = []

        def block(*_: Any) -> None:
            entered.set()
            assert release.wait(LIMIT)

        module.register_forward_hook(block, always_call=True)
        module.register_forward_hook(lambda *_: fired.append("always"), always_call=True)
        handle = module.register_forward_hook(lambda *_: fired.append("never"))
        thread = threading.Thread(target=lambda: failed.append(raised_by(lambda: module(1))))
        thread.start()
        assert entered.wait(LIMIT)
        handle.remove()
        release.set()
        thread.join(LIMIT)
        return failed[0], fired

    error, fired = call(fh.HookedModule(Failing()))
    assert str(error) == "the user's error"
    assert fired == ["always"]
    error, _ = call(Failing())
    expect_fault(
        not isinstance(error, ValueError), "'OrderedDict mutated' in place of the user's error"
    )
    assert "mutated during iteration" in str(error)


@pytest.mark.parametrize("where", ["pre-hook", "module", "hook"])
def test_always_call_hooks_run_on_a_keyboard_interrupt(where: str) -> None:
    def call(module: Any) -> list[str]:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        fired: list[str] = []
        if where == "module":
            module.error = KeyboardInterrupt()
        elif where == "hook":
            module.register_forward_hook(interrupt)
        else:
            module.register_forward_pre_hook(interrupt)
        module.register_forward_hook(lambda *_: fired.append("always"), always_call=True)
        assert isinstance(raised_by(lambda: module(1)), KeyboardInterrupt)
        return fired

    assert call(fh.HookedModule(Failing())) == ["always"]
    expect_fault(call(Failing()) == [], "always_call hooks do not run on a KeyboardInterrupt")


def test_a_keyboard_interrupt_in_an_always_call_hook_leaves_the_users_error() -> None:
    def call(module: Any) -> tuple[Any, list[str]]:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        fired: list[str] = []
        module.error = of_the_user()
        module.register_forward_hook(interrupt, always_call=True)
        module.register_forward_hook(lambda *_: fired.append("always"), always_call=True)
        return raised_by(lambda: module(1)), fired

    error, fired = call(fh.HookedModule(Failing()))
    assert str(error) == "the user's error"
    assert fired == ["always"]
    error, fired = call(Failing())
    expect_fault(
        not isinstance(error, ValueError), "a KeyboardInterrupt in place of the user's error"
    )
    assert isinstance(error, KeyboardInterrupt)
    assert fired == []


def test_where_warnings_are_errors_an_always_call_hook_leaves_the_users_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)

    def call(module: Any) -> BaseException:
        def broken(*_: Any) -> None:
            msg = "the hook's error"
            raise RuntimeError(msg)

        module.error = of_the_user()
        module.register_forward_hook(broken, always_call=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                module(1)
            except Exception as error:  # noqa: BLE001 (returned)
                return error
        pytest.fail("nothing was raised")

    assert str(call(fh.HookedModule(Failing()))) == "the user's error"
    assert len(unraisable) == 1
    error = call(Failing())
    expect_fault(not isinstance(error, ValueError), "a warning in place of the user's error")
    assert isinstance(error, UserWarning)


def test_with_kwargs_and_always_call_combine_on_an_error() -> None:
    seen: list[Any] = []

    def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append((args, kwargs, output))

    hooked = fh.HookedModule(Failing())
    hooked.error = of_the_user()
    hooked.register_forward_hook(hook, with_kwargs=True, always_call=True)
    assert str(raised_by(lambda: hooked(1, scale=2))) == "the user's error"
    assert seen == [((1,), {"scale": 2}, None)]
    # PyTorch drops the keywords of its global hooks, and the resulting TypeError.
    seen.clear()
    module = Failing()
    module.error = of_the_user()
    handle = torch_global.register_module_forward_hook(hook, with_kwargs=True, always_call=True)
    try:
        raised_by(lambda: module(1, scale=2))
    finally:
        handle.remove()
        torch_global._global_forward_hooks_with_kwargs.clear()  # PyTorch never clears it
    expect_fault(seen == [], "a global hook with keywords and always_call never fires on an error")


# Registering


@pytest.mark.parametrize("phase", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_non_callable_is_refused_at_registration(phase: str) -> None:
    def register(module: nn.Module) -> BaseException | None:
        return raised_by(lambda: getattr(module, f"register_{phase}_hook")(None))

    hooked = fh.HookedModule(Failing())
    assert isinstance(register(hooked), fh.HookTypeError)
    assert hooked(3) == 3
    expect_fault(register(Failing()) is None, "None is registered and fails the next call")
