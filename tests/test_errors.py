"""What goes wrong: bad input, hooks that raise, and what must still hold afterwards."""

from __future__ import annotations

import gc
import logging
import logging.handlers
import subprocess
import sys
import textwrap
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PHASES = {
    "forward_pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "backward_pre": "register_full_backward_pre_hook",
    "backward": "register_full_backward_hook",
}
TYPED: dict[str, Any] = {
    "forward_pre": fh.ForwardPreHook,
    "forward": fh.ForwardHook,
    "backward": fh.BackwardHook,
}
LIMIT = 30.0
"""Seconds that a test waits at most for another thread."""


class Failing(nn.Module):
    """Returns its input; raises what it is told to."""

    error: BaseException | None = None

    def forward(self, x: Any) -> Any:
        if self.error is not None:
            raise self.error
        return x


@pytest.fixture
def hooked() -> fh.HookedModule[Failing]:
    return fh.HookedModule(Failing())


@pytest.fixture(params=PHASES)
def phase(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def register(module: fh.HookedModule[Any], phase: str, hook: Any, **options: Any) -> fh.HookHandle:
    handle = getattr(module, PHASES[phase])(hook, **options)
    assert isinstance(handle, fh.HookHandle)
    return handle


def call(module: nn.Module) -> Any:
    """Runs all phases."""
    out = module(torch.ones(2, requires_grad=True))
    out.sum().backward()
    return out


def raising(error: BaseException) -> Callable[..., Any]:
    def raising_hook(*_: Any) -> None:
        raise error

    return raising_hook


def ignore(*_: Any) -> None:
    """A hook that does nothing."""


# Registering


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (None, "NoneType"),
        (5, "int"),
        ("relu", "str"),
        (object(), "object"),
        (torch.ones(1), "Tensor"),
        ([ignore], "list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hook_that_cannot_be_called_is_refused(
    hooked: fh.HookedModule[Failing], phase: str, wrong: Any, kind: str
) -> None:
    with pytest.raises(fh.HookTypeError, match=f"a {phase} hook is a callable, got {kind}"):
        register(hooked, phase, wrong)
    assert hooked.hooks() == []


@pytest.mark.parametrize("kind", TYPED)
def test_a_typed_hook_for_another_phase_is_refused(
    hooked: fh.HookedModule[Failing], phase: str, kind: str
) -> None:
    hook = TYPED[kind](lambda *given: given[0])
    if kind == phase:
        assert register(hooked, phase, hook).phase == phase
        return
    text = f"{type(hook).__name__} is a hook for the phase {kind}, .* registered for {phase}"
    with pytest.raises(fh.HookTypeError, match=text):
        register(hooked, phase, hook)
    assert hooked.hooks() == []


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_a_typed_hook_fixes_its_arguments(hooked: fh.HookedModule[Failing], kind: str) -> None:
    with pytest.raises(fh.HookTypeError, match="with_kwargs is for plain callables"):
        register(hooked, kind, TYPED[kind](ignore), with_kwargs=True)
    assert hooked.hooks() == []


@pytest.mark.parametrize("kind", TYPED)
def test_a_typed_hook_wraps_a_callable(kind: str) -> None:
    for wrong, name in ((None, "NoneType"), (3, "int"), ("f", "str")):
        with pytest.raises(fh.HookTypeError, match=f"typed {kind} hook .* callable, got {name}"):
            TYPED[kind](wrong)
    with pytest.raises(TypeError):
        TYPED[kind]()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"priority": 1.5}, fh.HookTypeError, "priority is an int, got float"),
        ({"priority": "1"}, fh.HookTypeError, "priority is an int, got str"),
        ({"priority": None}, fh.HookTypeError, "priority is an int, got NoneType"),
        ({"priority": True}, fh.HookTypeError, "priority is an int, got bool"),
        ({"priority": 2**63}, ValueError, f"priority lies between .*, got {2**63}"),
        ({"priority": -(2**63) - 1}, ValueError, "priority lies between"),
        ({"on_error": "explode"}, ValueError, '"explode": expected one of raise, disable, ignore'),
        ({"on_error": ""}, ValueError, "expected one of raise, disable, ignore"),
        ({"on_error": None}, fh.HookTypeError, "on_error is a str, got NoneType"),
        ({"on_error": 3}, fh.HookTypeError, "on_error is a str, got int"),
        ({"prepend": "yes"}, TypeError, "'prepend': 'str' .* 'bool'"),
        ({"unknown": 1}, TypeError, "unexpected keyword argument 'unknown'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_with_what_was_expected(
    hooked: fh.HookedModule[Failing],
    phase: str,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        register(hooked, phase, ignore, **options)
    assert hooked.hooks() == []
    assert call(hooked) is not None


def test_options_of_another_phase_are_refused(hooked: fh.HookedModule[Failing]) -> None:
    for phase, option in (
        ("forward_pre", "always_call"),
        ("backward", "with_kwargs"),
        ("backward_pre", "always_call"),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            register(hooked, phase, ignore, **{option: True})
    assert hooked.hooks() == []


def test_a_refused_hook_is_not_kept_alive(hooked: fh.HookedModule[Failing]) -> None:
    before = sys.getrefcount(ignore)
    for _ in range(100):
        with pytest.raises(fh.HookTypeError):
            register(hooked, "forward", ignore, priority="1")
    assert sys.getrefcount(ignore) <= before + 1


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (None, "NoneType"),
        (5, "int"),
        (ignore, "function"),
        (nn.Linear, "the class Linear"),
        ([nn.Identity()], "list"),
        (torch.ones(1), "Tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_module_is_not_wrapped(wrong: Any, got: str) -> None:
    with pytest.raises(fh.HookTypeError, match=f"wraps an instance of nn.Module, got {got}$"):
        fh.HookedModule(wrong)


def test_a_wrapper_that_was_never_initialised_says_so() -> None:
    hooked: fh.HookedModule[Any] = fh.HookedModule.__new__(fh.HookedModule)
    acts: list[Callable[[], object]] = [
        lambda: hooked(1),
        lambda: hooked.inner,
        lambda: hooked.register_forward_hook(ignore),
    ]
    for act in acts:
        with pytest.raises(fh.HookError, match="__init__ was not called"):
            act()


def test_the_errors_are_caught_as_what_they_are() -> None:
    assert issubclass(fh.HookTypeError, TypeError)
    assert issubclass(fh.HookTypeError, fh.HookError)
    assert not issubclass(fh.HookError, TypeError)


# A hook that raises


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_a_hooks_exception_reaches_the_caller_as_it_is(
    hooked: fh.HookedModule[Failing], phase: str, position: str, error: type[BaseException]
) -> None:
    raised = error("x")
    fired: list[str] = []
    for name in ("first", "middle", "last"):
        if name == position:
            handle = register(hooked, phase, raising(raised))
        else:
            register(hooked, phase, lambda *_, name=name: fired.append(name))
    with pytest.raises(error) as caught:
        call(hooked)
    assert caught.value is raised
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    names = ["first", "middle", "last"]
    assert fired == names[: names.index(position)]
    (note,) = raised.__notes__
    assert note == (
        "ferrohook: raised by the "
        f"{phase} hook raising.<locals>.raising_hook (id {handle.id}) of HookedModule(Failing)"
    )
    assert "raising_hook" in {
        frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
    }


def test_the_note_names_hooks_that_are_objects(hooked: fh.HookedModule[Failing]) -> None:
    class Broken:
        def __call__(self, *_: Any) -> None:
            msg = "broken"
            raise ValueError(msg)

    hooked.register_forward_hook(Broken())
    with pytest.raises(ValueError, match="broken") as caught:
        hooked(1)
    assert "hook an instance of Broken (id" in caught.value.__notes__[0]


def test_an_exception_that_takes_no_notes_still_arrives(hooked: fh.HookedModule[Failing]) -> None:
    class NoNotes(Exception):  # noqa: N818 (not the point)
        def add_note(self, _note: str) -> None:
            raise RuntimeError

    hooked.register_forward_hook(raising(NoNotes()))
    with pytest.raises(NoNotes):
        hooked(1)


def test_through_nested_modules_each_hook_leaves_its_own_note() -> None:
    inner = fh.HookedModule(Failing())
    outer = fh.HookedModule(nn.Sequential(inner))
    inner.register_forward_hook(raising(ValueError("deep")))
    with pytest.raises(ValueError, match="deep") as caught:
        outer(1)
    # No hook of the outer module was involved.
    assert [note.split(" of ")[1] for note in caught.value.__notes__] == ["HookedModule(Failing)"]


def test_an_exception_of_the_module_is_not_ours_to_note(hooked: fh.HookedModule[Failing]) -> None:
    hooked.register_forward_hook(ignore, always_call=True)
    hooked.error = ValueError("the module's")
    with pytest.raises(ValueError, match="the module's") as caught:
        hooked(1)
    assert not hasattr(caught.value, "__notes__")


def test_after_a_failed_pre_hook_neither_module_nor_forward_hooks_run(
    hooked: fh.HookedModule[Failing],
) -> None:
    hooked.error = AssertionError("the module ran")
    hooked.register_forward_pre_hook(raising(ValueError("first")))
    hooked.register_forward_pre_hook(raising(AssertionError("a hook behind ran")))
    hooked.register_forward_hook(raising(AssertionError("a forward hook ran")))
    with pytest.raises(ValueError, match="first"):
        hooked(1)


def test_a_failed_call_loses_no_hook(hooked: fh.HookedModule[Failing], phase: str) -> None:
    fired: list[str] = []
    fail_once = [ValueError("once")]

    def sometimes(*_: Any) -> None:
        fired.append("sometimes")
        if fail_once:
            raise fail_once.pop()

    for each in PHASES:
        register(hooked, each, lambda *_, each=each: fired.append(each))
    register(hooked, phase, sometimes, prepend=True)
    before = [row.id for row in hooked.hooks()]
    with pytest.raises(ValueError, match="once"):
        call(hooked)
    assert [row.id for row in hooked.hooks()] == before
    assert all(row.enabled for row in hooked.hooks())
    fired.clear()
    call(hooked)
    expected = list(PHASES)
    expected.insert(expected.index(phase), "sometimes")
    assert fired == expected


@pytest.mark.parametrize("where", ["forward_pre", "forward"])
def test_recursion_without_end_is_pythons_error(
    hooked: fh.HookedModule[Failing], where: str
) -> None:
    handle = register(hooked, where, lambda module, *_: module(1) and None)
    with pytest.raises(RecursionError):
        hooked(1)
    handle.remove()
    assert hooked(1) == 1


# always_call


@pytest.fixture(params=[ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def error(request: pytest.FixtureRequest) -> BaseException:
    made = request.param("the original")
    assert isinstance(made, BaseException)
    return made


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
    first = failing.register_forward_hook(raising(RuntimeError("worse")), always_call=True)
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
    assert f"the forward hook raising.<locals>.raising_hook (id {first.id})" in texts[0]
    assert "RuntimeError('worse')" in texts[0]
    assert "KeyboardInterrupt('worst')" in texts[1]


def test_not_even_where_warnings_are_errors(
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


def test_always_call_hooks_see_none_where_the_module_did_not_return(
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


def test_always_call_hooks_see_the_output_that_there_is_and_pass_theirs_on(
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
    """What goes to the logger of the package."""
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


def test_disable_logs_once_disables_and_lets_the_call_go_on(
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
    assert record.getMessage() == (
        f"disabled the {phase} hook raising.<locals>.raising_hook (id {handle.id}) "
        "of HookedModule(Failing): it raised"
    )


def test_a_hook_disabled_by_its_error_can_be_enabled_again(
    hooked: fh.HookedModule[Failing], records: list[logging.LogRecord]
) -> None:
    handle = hooked.register_forward_hook(raising(ValueError("again")), on_error="disable")
    for times in (1, 2):
        hooked(1)
        hooked(1)
        assert (handle.enabled, handle.calls, len(records)) == (False, times, times)
        handle.enable()


def test_ignore_goes_on_in_silence_and_calls_again(
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
def test_what_is_no_fault_of_the_hook_always_reaches_the_caller(
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
def test_a_typed_hook_that_breaks_its_type_is_a_hook_that_fails(
    hooked: fh.HookedModule[Failing], phase: str, records: list[logging.LogRecord]
) -> None:
    handle = register(hooked, phase, TYPED[phase](lambda *_: "wrong"), on_error="disable")
    assert torch.equal(call(hooked), torch.ones(2))
    assert not handle.enabled
    (record,) = records
    assert record.exc_info is not None
    assert record.exc_info[0] is fh.HookTypeError


def test_an_always_call_hook_is_disabled_by_its_error_while_another_is_on_its_way(
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
def test_threads_that_fail_at_once_log_once(
    hooked: fh.HookedModule[Failing], attempt: int, records: list[logging.LogRecord]
) -> None:
    count = 8
    inside = threading.Barrier(count, timeout=LIMIT)
    finished: list[int] = []

    def fail(*_: Any) -> None:
        inside.wait()
        raise ValueError(attempt)

    handle = hooked.register_forward_hook(fail, on_error="disable")
    threads = [
        threading.Thread(target=lambda: finished.append(hooked(attempt))) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert finished == [attempt] * count
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


# The interpreter at its edges


def test_a_finaliser_may_register_whenever_the_collector_runs(
    hooked: fh.HookedModule[Failing],
) -> None:
    registered: list[fh.HookHandle] = []

    class Late:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            registered.append(hooked.register_forward_hook(ignore))
            registered.append(hooked.register_forward_pre_hook(ignore))

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(50):
            Late()
            handle = hooked.register_forward_hook(lambda *_: Late() and None)
            hooked(1)
            hooked.hooks()
            handle.remove()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(registered) >= 100
    listed = {row.id for row in hooked.hooks()}
    assert listed == {handle.id for handle in registered}


def run_python(code: str) -> str:
    """What a fresh interpreter prints; it must end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_interpreter_exits_with_hooks_alive() -> None:
    out = run_python(
        """
        import atexit, threading, torch, ferrohook as fh
        from torch import nn

        hooked = fh.HookedModule(nn.Linear(2, 2))

        class Hook:
            def __call__(self, *_):
                self.module = hooked
            def __del__(self):
                print("hook freed or left, no matter")

        handles = [
            hooked.register_forward_pre_hook(Hook()),
            hooked.register_forward_hook(Hook()),
            hooked.register_full_backward_hook(lambda *_: hooked and None),
        ]
        hooked(torch.ones(1, 2, requires_grad=True)).sum().backward()
        atexit.register(lambda: hooked(torch.ones(1, 2)))
        entered = threading.Event()

        def stuck(*_):
            entered.set()
            threading.Event().wait()

        other = fh.HookedModule(nn.Identity())
        other.register_forward_hook(stuck)
        threading.Thread(target=other, args=(1,), daemon=True).start()
        entered.wait(30)
        print("done")
        """
    )
    assert "done" in out


def test_fork_with_hooks_alive() -> None:
    out = run_python(
        """
        import os, torch, ferrohook as fh
        from torch import nn

        hooked = fh.HookedModule(nn.Identity())
        log = []

        def fork(*_):
            log.append(os.fork())

        handle = hooked.register_forward_pre_hook(fork)
        watch = hooked.register_forward_hook(lambda *_: log.append("forward"))
        hooked(torch.ones(1))
        child = log[0] == 0
        handle.remove(wait=True, timeout=10)
        hooked.register_forward_hook(lambda *_: log.append("new"))
        hooked(torch.ones(1))
        hooked.quiesce(timeout=10)
        assert log[1:] == ["forward", "forward", "new"], log
        if child:
            os._exit(7)
        _, status = os.waitpid(log[0], 0)
        print(os.waitstatus_to_exitcode(status))
        """
    )
    assert out.strip() == "7"
