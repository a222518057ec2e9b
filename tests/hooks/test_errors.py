"""Hooks that are refused, and hooks that raise."""

from __future__ import annotations

import gc
import sys
import textwrap
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.hooks import PHASES, TYPED, call, ignore, raising, register
from support.interpreters import run_with_torch
from support.modules import Failing

if TYPE_CHECKING:
    from collections.abc import Callable

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
    with pytest.raises(fh.HookTypeError, match=f"a {phase} hook must be a callable, got {kind}"):
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
    text = f"{type(hook).__name__} only works in {kind}: it cannot be registered for {phase}"
    with pytest.raises(fh.HookTypeError, match=text):
        register(hooked, phase, hook)
    assert hooked.hooks() == []


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_a_typed_hook_fixes_its_arguments(hooked: fh.HookedModule[Failing], kind: str) -> None:
    with pytest.raises(fh.HookTypeError, match="with_kwargs only works with plain callables"):
        register(hooked, kind, TYPED[kind](ignore), with_kwargs=True)
    assert hooked.hooks() == []


@pytest.mark.parametrize(
    ("option", "phases"),
    [
        ("with_kwargs", ["backward_pre", "backward"]),
        ("always_call", ["forward_pre", "backward_pre", "backward"]),
    ],
)
def test_an_option_that_a_phase_would_ignore_is_refused(option: str, phases: list[Any]) -> None:
    model = torch.nn.Sequential(torch.nn.ReLU())
    options: dict[str, Any] = {option: True}
    for phase in phases:
        for refused in (
            lambda phase=phase: fh.register(model, "0", ignore, phase=phase, **options),
            lambda phase=phase: fh.on("0", ignore, phase=phase, **options),
            lambda phase=phase: fh.HookedModule(model)._registry.register(phase, ignore, **options),
            lambda phase=phase: register(fh.HookedModule(model), phase, ignore, **options),
        ):
            with pytest.raises(
                fh.HookTypeError, match=f"{option} does not work with {phase} hooks"
            ):
                refused()
    for phase, kind in (("forward_pre", fh.ForwardPreHook), ("backward", fh.BackwardHook)):
        with pytest.raises(fh.HookTypeError, match=f"always_call does not work with {phase} hooks"):
            fh.register(model, "0", kind(ignore), always_call=True)
    assert fh.hooks(model) == []


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
        ({"priority": 1.5}, fh.HookTypeError, "priority must be an int, got float"),
        ({"priority": "1"}, fh.HookTypeError, "priority must be an int, got str"),
        ({"priority": None}, fh.HookTypeError, "priority must be an int, got NoneType"),
        ({"priority": True}, fh.HookTypeError, "priority must be an int, got bool"),
        ({"priority": 2**63}, ValueError, f"priority must be between .*, got {2**63}"),
        ({"priority": -(2**63) - 1}, ValueError, "priority must be between"),
        ({"on_error": "explode"}, ValueError, '"explode": expected one of raise, disable, ignore'),
        ({"on_error": ""}, ValueError, "expected one of raise, disable, ignore"),
        ({"on_error": None}, fh.HookTypeError, "on_error must be a str, got NoneType"),
        ({"on_error": 3}, fh.HookTypeError, "on_error must be a str, got int"),
        ({"prepend": "yes"}, TypeError, "'prepend': 'str' .* 'bool'"),
        ({"unknown": 1}, TypeError, "unexpected keyword argument 'unknown'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_with_the_expected_type(
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


def test_a_refused_hook_is_released(hooked: fh.HookedModule[Failing]) -> None:
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
def test_wrapping_anything_but_a_module_is_refused(wrong: Any, got: str) -> None:
    with pytest.raises(fh.HookTypeError, match=f"needs an instance of nn.Module, got {got}$"):
        fh.HookedModule(wrong)


def test_a_wrapper_without_init_raises_a_clear_error() -> None:
    hooked: fh.HookedModule[Any] = fh.HookedModule.__new__(fh.HookedModule)
    acts: list[Callable[[], object]] = [
        lambda: hooked(1),
        lambda: hooked.inner,
        lambda: hooked.register_forward_hook(ignore),
    ]
    for act in acts:
        with pytest.raises(fh.HookError, match="__init__ was not called"):
            act()


def test_the_error_classes_derive_from_the_builtin_ones() -> None:
    assert issubclass(fh.HookTypeError, TypeError)
    assert issubclass(fh.HookTypeError, fh.HookError)
    assert not issubclass(fh.HookError, TypeError)


# A hook that raises


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_a_hooks_exception_reaches_the_caller_unchanged(
    hooked: fh.HookedModule[Failing], phase: str, position: str, error: type[BaseException]
) -> None:
    raised = error("x")
    fired: list[str] = []
    for name in ("first", "middle", "last"):
        if name == position:
            register(hooked, phase, raising(raised))
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
    place = note.removeprefix(
        f"ferrohook: raised by the {phase} hook `raising.<locals>.raising_hook` of "
        f"HookedModule(Failing), registered at {register.__code__.co_filename}:"
    )
    assert place.isdecimal()
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
    assert "Broken object>` of HookedModule(Failing)" in caught.value.__notes__[0]


def test_an_exception_that_refuses_notes_still_propagates(hooked: fh.HookedModule[Failing]) -> None:
    class NoNotes(Exception):  # noqa: N818 (not the point)
        def add_note(self, _note: str) -> None:
            raise RuntimeError

    hooked.register_forward_hook(raising(NoNotes()))
    with pytest.raises(NoNotes):
        hooked(1)


def test_each_failing_hook_of_nested_modules_adds_its_note() -> None:
    inner = fh.HookedModule(Failing())
    outer = fh.HookedModule(nn.Sequential(inner))
    inner.register_forward_hook(raising(ValueError("deep")))
    with pytest.raises(ValueError, match="deep") as caught:
        outer(1)
    # The outer module has no hooks, so it adds no note.
    (note,) = caught.value.__notes__
    assert " of HookedModule(Failing), " in note


def test_an_exception_of_the_module_gets_no_note(hooked: fh.HookedModule[Failing]) -> None:
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
def test_infinite_recursion_raises_pythons_recursion_error(
    hooked: fh.HookedModule[Failing], where: str
) -> None:
    handle = register(hooked, where, lambda module, *_: module(1) and None)
    with pytest.raises(RecursionError):
        hooked(1)
    handle.remove()
    assert hooked(1) == 1


# Finalisers, exit and fork


def test_a_finaliser_may_register_during_any_collection(
    hooked: fh.HookedModule[Failing],
) -> None:
    registered: list[fh.typing.HookHandle] = []

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
    """Runs `code`, which must exit with 0 and an empty stderr; returns its stdout."""
    done = run_with_torch('warnings.simplefilter("error")\n' + textwrap.dedent(code))
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


def test_an_exception_that_is_raised_again_has_one_note() -> None:
    error, module = ValueError("mine"), fh.HookedModule(nn.Identity())

    def fail(*_: Any) -> None:
        raise error

    module.register_forward_hook(fail, on_error="ignore")
    for _ in range(3):
        module(torch.ones(1))
    assert len(error.__notes__) == 1
