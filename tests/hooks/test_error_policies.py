"""`always_call` and `on_error`: hooks after a failure."""

from __future__ import annotations

import copy
import logging
import logging.handlers
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.hooks import TYPED, call, ignore, raising, register
from support.limits import LIMIT
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.modules import Failing


# always_call


@pytest.fixture(params=["pre-hook", "module", "forward hook"])
def failing(
    request: pytest.FixtureRequest, hooked: fh.HookedModule[Failing], error: BaseException
) -> fh.HookedModule[Failing]:
    """A module in which one of the three raises `error`."""
    if request.param == "pre-hook":
        hooked.register_forward_pre_hook(raising(error))
    elif request.param == "module":
        hooked.error = error
    else:
        hooked.register_forward_hook(raising(error))
    return hooked


def test_always_call_hooks_run_for_every_exception(
    failing: fh.HookedModule[Failing], error: BaseException
) -> None:
    fired: list[str] = []
    for name in "abc":
        failing.register_forward_hook(
            lambda *_, name=name: fired.append(name), always_call=name != "b"
        )
    failing.register_forward_hook(
        fh.ForwardHook[Any, Any](lambda *_: fired.append("typed")), always_call=True
    )
    with pytest.raises(type(error)) as caught:
        failing(1)
    assert caught.value is error
    assert fired == ["a", "c", "typed"]


def test_an_always_call_hook_never_replaces_the_exception(
    failing: fh.HookedModule[Failing], error: BaseException
) -> None:
    fired: list[str] = []
    failing.register_forward_hook(raising(RuntimeError("worse")), always_call=True)
    failing.register_forward_hook(raising(KeyboardInterrupt("worst")), always_call=True)
    failing.register_forward_hook(lambda *_: fired.append("last"), always_call=True)
    with (
        pytest.warns(UserWarning, match="silenced") as warned,
        pytest.raises(type(error)) as caught,
    ):
        failing(1)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert fired == ["last"]
    texts = [str(each.message) for each in warned]
    assert len(texts) == 2
    assert "the forward hook `raising.<locals>.raising_hook` of" in texts[0]
    assert "RuntimeError('worse')" in texts[0]
    assert "KeyboardInterrupt('worst')" in texts[1]


def test_an_always_call_hook_never_replaces_the_exception_with_warnings_as_errors(
    failing: fh.HookedModule[Failing], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    failing.register_forward_hook(raising(RuntimeError("worse")), always_call=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(type(error)) as caught:
            failing(1)
    assert caught.value is error
    assert [each.exc_type for each in unraisable] == [UserWarning]


@pytest.mark.parametrize("removes", ["itself", "all", "registers"])
def test_an_always_call_hook_may_change_the_hooks(
    failing: fh.HookedModule[Failing], error: BaseException, removes: str
) -> None:
    fired: list[str] = []

    def change(module: Any, *_: Any) -> None:
        fired.append("change")
        if removes == "itself":
            handle.remove()
        elif removes == "all":
            module.clear_hooks()
        else:
            module.register_forward_hook(ignore, always_call=True)

    handle = failing.register_forward_hook(change, always_call=True)
    failing.register_forward_hook(lambda *_: fired.append("behind"), always_call=True)
    with pytest.raises(type(error)) as caught:
        failing(1)
    assert caught.value is error
    assert fired == (["change"] if removes == "all" else ["change", "behind"])


def test_always_call_hooks_get_none_as_the_output_of_a_failed_module(
    hooked: fh.HookedModule[Failing],
) -> None:
    seen: list[Any] = []
    hooked.register_forward_pre_hook(lambda _, args: args[0] + 1)
    hooked.register_forward_hook(lambda _, *given: seen.append(given), always_call=True)
    hooked.register_forward_hook(
        lambda _, *given: seen.append(given), always_call=True, with_kwargs=True
    )
    hooked.error = ValueError("no output")
    with pytest.raises(ValueError, match="no output"):
        hooked(1)
    assert seen == [((2,), None), ((2,), {}, None)]


def test_always_call_hooks_get_the_latest_output_and_pass_theirs_on(
    hooked: fh.HookedModule[Failing],
) -> None:
    seen: list[Any] = []

    def add_one(_module: nn.Module, _args: Any, output: int) -> int:
        seen.append(output)
        return output + 1

    hooked.register_forward_hook(add_one)
    hooked.register_forward_hook(raising(ValueError("failed")))
    hooked.register_forward_hook(add_one, always_call=True)
    hooked.register_forward_hook(add_one, always_call=True)
    with pytest.raises(ValueError, match="failed"):
        hooked(1)
    assert seen == [1, 2, 3]


def test_an_always_call_hook_fires_once_in_a_call(hooked: fh.HookedModule[Failing]) -> None:
    counted = [hooked.register_forward_hook(ignore, always_call=True)]
    failing = hooked.register_forward_hook(raising(ValueError("own")), always_call=True)
    counted.append(hooked.register_forward_hook(ignore, always_call=True))
    with pytest.raises(ValueError, match="own"):
        hooked(1)
    assert [handle.calls for handle in counted] == [1, 1]
    assert failing.calls == 1
    failing.remove()
    assert hooked(1) == 1
    assert [handle.calls for handle in counted] == [2, 2]


# on_error


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Log records of the package's logger."""
    handler = logging.handlers.BufferingHandler(capacity=1_000)
    logger = logging.getLogger("ferrohook")
    logger.addHandler(handler)
    yield handler.buffer
    logger.removeHandler(handler)


def test_raise_is_the_default(hooked: fh.HookedModule[Failing], phase: str) -> None:
    register(hooked, phase, raising(ValueError("default")))
    register(hooked, phase, raising(ValueError("explicit")), on_error="raise", prepend=True)
    with pytest.raises(ValueError, match="explicit"):
        call(hooked)


def test_disable_logs_once_disables_the_hook_and_continues_the_call(
    hooked: fh.HookedModule[Failing], phase: str, records: list[logging.LogRecord]
) -> None:
    error = ValueError("mine")
    handle = register(hooked, phase, raising(error), on_error="disable")
    behind = register(hooked, phase, ignore)
    for _ in range(3):
        call(hooked)
    assert (handle.enabled, handle.removed, handle.calls) == (False, False, 1)
    assert (behind.enabled, behind.calls) == (True, 3)
    (record,) = records
    assert record.name == "ferrohook"
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    message = record.getMessage()
    assert message.startswith(
        f"disabled the {phase} hook `raising.<locals>.raising_hook` of HookedModule(Failing), "
        "registered at "
    )
    assert message.endswith(": it raised")


def test_a_hook_disabled_by_its_error_can_be_enabled_again(
    hooked: fh.HookedModule[Failing], records: list[logging.LogRecord]
) -> None:
    handle = hooked.register_forward_hook(raising(ValueError("again")), on_error="disable")
    for times in (1, 2):
        hooked(1)
        hooked(1)
        assert (handle.enabled, handle.calls, len(records)) == (False, times, times)
        handle.enable()


def test_a_hook_that_its_error_disabled_says_so_wherever_it_is_shown() -> None:
    def bad(*_: object) -> None:
        msg = "boom\nwith more lines"
        raise ValueError(msg)

    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())
    group = fh.register(model, ["0", "1"], bad, on_error="disable")
    first, second = group
    model[0](torch.ones(1))
    why = "disabled by on_error after ValueError: boom"
    copied = copy.deepcopy(model)
    assert (first.failure, second.failure) == ("ValueError: boom", None)
    assert repr(first) == f"<HookHandle id={first.id} phase=forward {why}, calls=1>"
    assert repr(group) == f"<HandleGroup of 2 hooks, registered, 1 {why}, calls=1>"
    for hooked in (model, copied):
        listed = fh.hooks(hooked)
        assert [why in line for line in repr(listed).splitlines()] == [False, True, False]
        assert [why in repr(each) for each in listed] == [True, False]
        assert why in listed._repr_html_()
        assert str(fh.summary(hooked)).count(why) == 1
    wrapped: Any = fh.HookedModule(torch.nn.ReLU())
    wrapped.register_forward_hook(bad, on_error="disable")
    wrapped(torch.ones(1))
    assert [info.failure for info in wrapped.hooks()] == ["ValueError: boom"]
    assert why in repr(wrapped.hooks())
    assert (group.enabled, group.last_error) == (False, "ValueError: boom")
    second.disable()
    head, *lines = repr(fh.hooks(model)).splitlines()
    states = [line[head.index("state") :] for line in lines]
    assert states[0].startswith(f"{why}  ")
    assert states[1].startswith("disabled by hand  ")
    second.enable()
    # `disable` keeps the reason of a hook that is disabled already; `enable` forgets it.
    group.disable()
    assert (first.failure, second.failure) == ("ValueError: boom", None)
    assert "2 disabled by on_error after ValueError: boom" in repr(group)
    group.enable()
    assert (first.failure, why in repr(group)) == (None, False)
    assert (group.enabled, group.last_error) == (True, None)
    first.disable()
    assert repr(first).endswith("forward disabled, calls=1>")


def test_ignore_continues_silently_and_calls_the_hook_again(
    hooked: fh.HookedModule[Failing], phase: str, records: list[logging.LogRecord]
) -> None:
    handle = register(hooked, phase, raising(ValueError("ignored")), on_error="ignore")
    behind = register(hooked, phase, ignore)
    for _ in range(3):
        call(hooked)
    assert (handle.enabled, handle.calls, behind.calls) == (True, 3, 3)
    assert records == []


@pytest.mark.parametrize("on_error", ["disable", "ignore"])
def test_a_failed_hook_changes_nothing(hooked: fh.HookedModule[Failing], on_error: str) -> None:
    hooked.register_forward_pre_hook(lambda _, args: args[0] + 1)
    hooked.register_forward_hook(lambda _m, _a, output: output * 10)
    for phase in ("forward_pre", "forward"):
        register(hooked, phase, raising(ValueError("x")), on_error=on_error)
    hooked.register_forward_pre_hook(lambda _, args: args[0] + 1)
    hooked.register_forward_hook(lambda _m, _a, output: output + 4)
    assert hooked(1) == 34


@pytest.mark.parametrize("on_error", ["disable", "ignore"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_and_exits_reach_the_caller_under_any_policy(
    hooked: fh.HookedModule[Failing],
    phase: str,
    on_error: str,
    error: type[BaseException],
    records: list[logging.LogRecord],
) -> None:
    handle = register(hooked, phase, raising(error()), on_error=on_error)
    with pytest.raises(error):
        call(hooked)
    assert handle.enabled
    assert records == []


@pytest.mark.parametrize("phase", TYPED)
def test_on_error_applies_to_a_typed_hook_that_breaks_its_type(
    hooked: fh.HookedModule[Failing], phase: str, records: list[logging.LogRecord]
) -> None:
    handle = register(hooked, phase, TYPED[phase](lambda *_: "wrong"), on_error="disable")
    assert torch.equal(call(hooked), torch.ones(1, 2))
    assert not handle.enabled
    (record,) = records
    assert record.exc_info is not None
    assert record.exc_info[0] is fh.HookTypeError


def test_an_always_call_hook_is_disabled_by_its_error_during_another_exception(
    hooked: fh.HookedModule[Failing], records: list[logging.LogRecord]
) -> None:
    handle = hooked.register_forward_hook(
        raising(RuntimeError("later")), always_call=True, on_error="disable"
    )
    hooked.error = ValueError("the original")
    with pytest.raises(ValueError, match="the original"):
        hooked(1)
    assert not handle.enabled
    assert len(records) == 1


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("attempt", range(20))
def test_concurrent_failures_of_a_hook_are_logged_once(
    hooked: fh.HookedModule[Failing], attempt: int, records: list[logging.LogRecord]
) -> None:
    count = 8
    inside = threading.Barrier(count, timeout=LIMIT)

    def fail(*_: Any) -> None:
        inside.wait()
        raise ValueError(attempt)

    handle = hooked.register_forward_hook(fail, on_error="disable")
    assert in_threads(count, lambda _number: hooked(attempt)) == [attempt] * count
    assert (handle.enabled, handle.calls) == (False, count)
    assert len(records) == 1


def test_a_broken_logger_does_not_break_the_call(
    hooked: fh.HookedModule[Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def full(*_: Any, **_options: Any) -> None:
        raise OSError

    monkeypatch.setattr(logging.getLogger("ferrohook"), "error", full)
    handle = hooked.register_forward_hook(raising(ValueError("x")), on_error="disable")
    assert hooked(1) == 1
    assert not handle.enabled
    assert [each.exc_type for each in unraisable] == [OSError]
