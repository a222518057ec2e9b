"""Handles: removing, disabling and describing one hook, from anywhere."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import tracemalloc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.hooks import PHASES, call, ignore, register
from support.limits import LIMIT
from support.numbers import close

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def hooked() -> fh.HookedModule[nn.Linear]:
    return fh.HookedModule(nn.Linear(2, 2))


# remove


def test_after_remove_the_hook_does_not_fire(
    hooked: fh.HookedModule[nn.Linear], phase: str
) -> None:
    fired: list[str] = []
    handle = register(hooked, phase, lambda *_: fired.append("x"))
    call(hooked)
    handle.remove()
    call(hooked)
    assert fired == ["x"]
    assert handle.removed
    assert hooked.hooks() == []


def test_removing_again_does_nothing(hooked: fh.HookedModule[nn.Linear], phase: str) -> None:
    fired: list[str] = []
    handle = register(hooked, phase, ignore)
    other = register(hooked, phase, lambda *_: fired.append("other"))
    for _ in range(3):
        handle.remove()
    handle.remove(wait=True)
    call(hooked)
    assert fired == ["other"]
    assert (handle.removed, other.removed) == (True, False)


def test_a_hook_may_remove_itself(hooked: fh.HookedModule[nn.Linear], phase: str) -> None:
    fired: list[str] = []

    def once(*_: Any) -> None:
        fired.append("once")
        handle.remove()
        handle.remove()
        assert handle.removed

    register(hooked, phase, lambda *_: fired.append("before"))
    handle = register(hooked, phase, once)
    register(hooked, phase, lambda *_: fired.append("after"))
    call(hooked)
    call(hooked)
    assert fired == ["before", "once", "after", "before", "after"]
    assert handle.calls == 1


def test_a_hook_may_remove_those_before_and_behind_it(
    hooked: fh.HookedModule[nn.Linear], phase: str
) -> None:
    fired: list[str] = []

    def remove_both(*_: Any) -> None:
        fired.append("middle")
        before.remove()
        behind.remove()

    before = register(hooked, phase, lambda *_: fired.append("before"))
    register(hooked, phase, remove_both)
    behind = register(hooked, phase, lambda *_: fired.append("behind"))
    register(hooked, phase, lambda *_: fired.append("last"))
    call(hooked)
    assert fired == ["before", "middle", "last"]
    fired.clear()
    call(hooked)
    assert fired == ["middle", "last"]


def test_a_hook_may_remove_a_hook_of_a_later_phase(hooked: fh.HookedModule[nn.Linear]) -> None:
    fired: list[str] = []
    handles = [
        register(hooked, phase, lambda *_, phase=phase: fired.append(phase)) for phase in PHASES
    ]
    order = list(PHASES)
    hooked.register_forward_pre_hook(lambda *_: handles[order.index("forward")].remove())
    hooked.register_forward_hook(lambda *_: handles[order.index("backward_pre")].remove())
    hooked.register_full_backward_pre_hook(lambda *_: handles[order.index("backward")].remove())
    call(hooked)
    assert fired == ["forward_pre"]


def test_a_backward_hook_removed_after_the_forward_does_not_fire(
    hooked: fh.HookedModule[nn.Linear],
) -> None:
    handles = [
        hooked.register_full_backward_hook(lambda *_: pytest.fail("a removed hook fired")),
        hooked.register_full_backward_pre_hook(lambda *_: pytest.fail("a removed hook fired")),
    ]
    x = torch.ones(1, 2, requires_grad=True)
    out = hooked(x)
    for handle in handles:
        handle.remove()
    out.sum().backward()
    assert x.grad is not None
    assert close(x.grad[0], hooked.weight.sum(0))


def test_a_hook_may_clear_all_hooks(hooked: fh.HookedModule[nn.Linear], phase: str) -> None:
    fired: list[str] = []

    def clear(*_: Any) -> None:
        fired.append("clear")
        hooked.clear_hooks()

    register(hooked, phase, clear)
    register(hooked, phase, lambda *_: fired.append("behind"))
    call(hooked)
    call(hooked)
    assert fired == ["clear"]


def test_clear_hooks_of_one_phase_leaves_the_others(
    hooked: fh.HookedModule[nn.Linear], phase: str
) -> None:
    handles = {each: register(hooked, each, ignore) for each in PHASES}
    hooked.clear_hooks(phase)
    assert [row.phase for row in hooked.hooks()] == [each for each in PHASES if each != phase]
    assert [each for each in PHASES if handles[each].removed] == [phase]
    hooked.clear_hooks()
    assert hooked.hooks() == []


def test_a_finaliser_may_remove_a_hook(hooked: fh.HookedModule[nn.Linear]) -> None:
    class Owner:
        def __init__(self) -> None:
            self.handle = hooked.register_forward_hook(ignore)
            self.cycle = self

        def __del__(self) -> None:
            self.handle.remove()

    owner = Owner()
    handle = owner.handle
    hooked.register_forward_pre_hook(lambda *_: gc.collect() and None)
    del owner
    call(hooked)
    assert handle.removed
    assert handle.calls == 0


def test_the_hook_is_freed_when_removed(hooked: fh.HookedModule[nn.Linear], phase: str) -> None:
    class Hook:
        def __call__(self, *_: Any) -> None:
            pass

    hook = Hook()
    freed = weakref.ref(hook)
    handle = register(hooked, phase, hook)
    del hook
    assert freed() is not None
    handle.remove()
    assert freed() is None


def test_remove_takes_constant_time() -> None:
    def time_each(count: int) -> float:
        module = fh.HookedModule(nn.Identity())
        handles = [module.register_forward_hook(ignore) for _ in range(count)]
        start = time.thread_time()
        for handle in handles:
            handle.remove()
        return (time.thread_time() - start) / count

    few = min(time_each(1_000) for _ in range(5))
    many = min(time_each(30_000) for _ in range(3))
    # A linear search would take thirty times as long among many.
    assert many < 8 * few


def test_many_registered_and_removed_hooks_leave_no_memory_behind(
    hooked: fh.HookedModule[nn.Linear],
) -> None:
    def churn(count: int) -> None:
        for _ in range(count):
            hooked.register_forward_hook(lambda *_: None).remove()

    churn(1_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        churn(20_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    assert hooked.hooks() == []


# Waiting until no thread is inside


class Blocking:
    """A hook that blocks another thread until released."""

    def __init__(self, module: fh.HookedModule[Any]) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()
        self.left = False
        self.handle = module.register_forward_hook(self)
        self.thread = threading.Thread(target=module, args=(torch.ones(2),))
        self.thread.start()
        assert self.entered.wait(LIMIT)

    def __call__(self, *_: Any) -> None:
        self.entered.set()
        assert self.release.wait(LIMIT)
        self.left = True

    def finish(self) -> None:
        self.release.set()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()


def test_waiting_for_a_removed_hook_ends_when_no_thread_is_inside(
    hooked: fh.HookedModule[nn.Linear],
) -> None:
    blocking = Blocking(hooked)
    threading.Timer(0.1, blocking.release.set).start()
    blocking.handle.remove(wait=True, timeout=LIMIT)
    assert blocking.left
    blocking.finish()


def test_remove_without_wait_returns_at_once(hooked: fh.HookedModule[nn.Linear]) -> None:
    blocking = Blocking(hooked)
    blocking.handle.remove()
    assert not blocking.left
    assert blocking.handle.removed
    blocking.finish()


def test_waiting_has_a_time_limit(hooked: fh.HookedModule[nn.Linear]) -> None:
    blocking = Blocking(hooked)
    waits: list[Callable[[], None]] = [
        lambda: blocking.handle.remove(wait=True, timeout=0.02),
        lambda: blocking.handle.remove(wait=True, timeout=0),
        lambda: hooked.quiesce(0.02),
        lambda: hooked.quiesce(timeout=0),
    ]
    for wait in waits:
        with pytest.raises(TimeoutError):
            wait()
    assert blocking.handle.removed
    blocking.finish()
    blocking.handle.remove(wait=True, timeout=0)
    hooked.quiesce(timeout=0)


def test_waiting_from_inside_the_hook_raises_and_removes_nothing(
    hooked: fh.HookedModule[nn.Linear], phase: str
) -> None:
    caught: list[str] = []

    waits: list[Callable[[], None]] = [
        lambda: handle.remove(wait=True),
        lambda: hooked.quiesce(timeout=1),
    ]

    def wait(*_: Any) -> None:
        for act in waits:
            with pytest.raises(fh.HookError) as error:
                act()
            caught.append(str(error.value))

    handle = register(hooked, phase, wait)
    call(hooked)
    assert len(caught) == 2
    assert all("inside" in text for text in caught)
    assert not handle.removed


def test_quiesce_without_hooks_returns() -> None:
    fh.HookedModule(nn.Identity()).quiesce()


@pytest.mark.parametrize("timeout", [-1, float("nan"), -0.001])
def test_a_timeout_below_zero_is_refused(
    hooked: fh.HookedModule[nn.Linear], timeout: float
) -> None:
    handle = hooked.register_forward_hook(ignore)
    with pytest.raises(ValueError, match="timeout must be at least 0 seconds, got"):
        handle.remove(wait=True, timeout=timeout)
    with pytest.raises(ValueError, match="timeout must be at least 0 seconds, got"):
        hooked.quiesce(timeout)
    assert not handle.removed


def test_a_timeout_of_the_wrong_kind_is_refused(hooked: fh.HookedModule[nn.Linear]) -> None:
    handle = hooked.register_forward_hook(ignore)
    with pytest.raises(fh.HookTypeError, match="timeout must be a number of seconds, got str"):
        handle.remove(wait=True, timeout="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout= only works with remove\(wait=True\)"):
        handle.remove(timeout=1)
    assert not handle.removed


# disable and enable


def test_a_disabled_hook_keeps_its_place(hooked: fh.HookedModule[nn.Linear], phase: str) -> None:
    fired: list[str] = []
    handles = {
        name: register(hooked, phase, lambda *_, name=name: fired.append(name)) for name in "abc"
    }
    handles["b"].disable()
    handles["b"].disable()
    call(hooked)
    assert fired == ["a", "c"]
    assert [row.enabled for row in hooked.hooks()] == [True, False, True]
    register(hooked, phase, lambda *_: fired.append("d"))
    handles["b"].enable()
    handles["b"].enable()
    fired.clear()
    call(hooked)
    assert fired == ["a", "b", "c", "d"]


def test_a_hook_may_disable_itself_and_others(
    hooked: fh.HookedModule[nn.Linear], phase: str
) -> None:
    fired: list[str] = []

    def switch(*_: Any) -> None:
        fired.append("switch")
        first.disable()
        behind.disable()
        asleep.enable()

    first = register(hooked, phase, switch)
    behind = register(hooked, phase, lambda *_: fired.append("behind"))
    asleep = register(hooked, phase, lambda *_: fired.append("asleep"))
    asleep.disable()
    call(hooked)
    assert fired == ["switch", "asleep"]
    fired.clear()
    call(hooked)
    assert fired == ["asleep"]


def test_enabling_does_not_bring_a_removed_hook_back(
    hooked: fh.HookedModule[nn.Linear], phase: str
) -> None:
    handle = register(hooked, phase, lambda *_: pytest.fail("a removed hook fired"))
    handle.disable()
    handle.remove()
    handle.enable()
    call(hooked)
    assert handle.removed


def test_a_module_with_only_disabled_hooks_returns_its_own_object() -> None:
    hooked = fh.HookedModule(nn.Identity())
    handles = [register(hooked, phase, lambda *_: (None,) * 9) for phase in PHASES]
    for handle in handles:
        handle.disable()
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(hooked(x), x)
    hooked(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]


# with handle


def test_with_removes_at_exit(hooked: fh.HookedModule[nn.Linear], phase: str) -> None:
    fired: list[str] = []
    with register(hooked, phase, lambda *_: fired.append("x")) as handle:
        call(hooked)
        assert not handle.removed
    call(hooked)
    assert fired == ["x"]
    assert handle.removed


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_with_removes_on_an_exception_and_propagates_it(
    hooked: fh.HookedModule[nn.Linear], error: type[BaseException]
) -> None:
    handle = hooked.register_forward_hook(ignore)
    with pytest.raises(error), handle:
        raise error
    assert handle.removed
    assert hooked.hooks() == []


def test_a_handle_may_be_removed_inside_its_with_block(hooked: fh.HookedModule[nn.Linear]) -> None:
    with hooked.register_forward_hook(ignore) as handle:
        handle.remove()
    assert handle.removed


# Attributes of a handle


def test_a_handle_describes_its_hook(hooked: fh.HookedModule[nn.Linear], phase: str) -> None:
    handle = register(hooked, phase, ignore, priority=3)
    (row,) = hooked.hooks()
    assert tuple(row) == (handle.id, phase, ignore, 3, True, 0, None)
    assert row._fields == ("id", "phase", "hook", "priority", "enabled", "calls", "failure")
    assert (handle.phase, handle.removed, handle.enabled) == (phase, False, True)
    assert (handle.calls, handle.priority) == (0, 3)
    handle.disable()
    assert (handle.enabled, hooked.hooks()[0].enabled) == (False, False)
    handle.enable()
    assert handle.enabled
    handle.remove()
    assert (handle.phase, handle.removed, handle.priority) == (phase, True, 3)


def test_calls_counts_returns_and_raises_but_not_skipped_invocations(
    hooked: fh.HookedModule[nn.Linear], phase: str
) -> None:
    def fail_at_last(*_: Any) -> None:
        inside.append(handle.calls)
        if len(inside) == 3:
            msg = "enough"
            raise ValueError(msg)

    inside: list[int] = []
    handle = register(hooked, phase, fail_at_last)
    call(hooked)
    call(hooked)
    with pytest.raises(ValueError, match="enough"):
        call(hooked)
    handle.disable()
    call(hooked)
    handle.remove()
    call(hooked)
    # A call is counted when it ends.
    assert inside == [0, 1, 2]
    assert handle.calls == 3


def test_repr_shows_the_state(hooked: fh.HookedModule[nn.Linear], phase: str) -> None:
    handle = register(hooked, phase, ignore)
    start = f"<HookHandle id={handle.id} phase={phase}"
    assert repr(handle) == f"{start} enabled, calls=0>"
    call(hooked)
    handle.disable()
    assert repr(handle) == f"{start} disabled, calls=1>"
    handle.remove()
    assert repr(handle) == f"{start} removed, calls=1>"


@pytest.mark.parametrize("name", ["id", "phase", "removed", "enabled", "calls"])
def test_attributes_of_a_handle_are_read_only(
    hooked: fh.HookedModule[nn.Linear], name: str
) -> None:
    handle = hooked.register_forward_hook(ignore)
    with pytest.raises(AttributeError):
        setattr(handle, name, 1)


def test_a_handle_cannot_be_constructed() -> None:
    with pytest.raises(TypeError):
        fh.typing.HookHandle()


def test_a_handle_hashes_by_identity_and_supports_weak_references(
    hooked: fh.HookedModule[nn.Linear],
) -> None:
    one, two = (hooked.register_forward_hook(ignore) for _ in range(2))
    assert one != two
    assert len({one, two, one}) == 2
    assert weakref.ref(one)() is one


# Lifetimes of handle, hook and module


def test_dropping_the_handle_leaves_the_hook(hooked: fh.HookedModule[nn.Linear]) -> None:
    fired: list[str] = []
    hooked.register_forward_hook(lambda *_: fired.append("x"))
    gc.collect()
    call(hooked)
    assert fired == ["x"]


def test_dropping_the_module_frees_a_hook_that_closes_over_it() -> None:
    module = fh.HookedModule(nn.Linear(2, 2))
    handles = [
        register(module, phase, lambda *_, module=module: module and None) for phase in PHASES
    ]
    call(module)
    freed = weakref.ref(module)
    del module
    gc.collect()
    assert freed() is None
    # The handles outlive the module without effect.
    for handle in handles:
        handle.disable()
        handle.priority = 3
        handle.remove()
        assert (handle.removed, handle.priority, handle.calls) == (True, 3, 1)


def test_a_handle_keeps_neither_the_hook_nor_the_module_alive() -> None:
    class Hook:
        def __call__(self, *_: Any) -> None:
            pass

    hook = Hook()
    module = fh.HookedModule(nn.Linear(2, 2))
    handle = module.register_forward_hook(hook)
    freed = weakref.ref(hook), weakref.ref(module)
    del hook, module
    gc.collect()
    assert [each() for each in freed] == [None, None]
    assert not handle.removed


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda handle: pickle.loads(pickle.dumps(handle))]
)
def test_a_copied_or_unpickled_handle_is_removed(
    hooked: fh.HookedModule[nn.Linear], phase: str, duplicate: Any
) -> None:
    fired: list[str] = []
    handle = register(hooked, phase, lambda *_: fired.append("x"))
    other = duplicate(handle)
    assert isinstance(other, fh.typing.HookHandle)
    assert other.removed
    assert other.phase == phase
    assert other.id != handle.id
    other.remove()
    other.enable()
    call(hooked)
    assert fired == ["x"]
    assert not handle.removed


def test_a_module_that_keeps_its_handle_can_be_copied() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = fh.HookedModule(nn.Linear(2, 2))
            self.handle = self.linear.register_forward_hook(ignore)

    original = Watched()
    duplicate = copy.deepcopy(original)
    duplicate.handle.remove()
    assert duplicate.handle.removed
    assert len(duplicate.linear.hooks()) == 1
    original.handle.remove()
    assert (len(original.linear.hooks()), len(duplicate.linear.hooks())) == (0, 1)


def test_a_copy_preserves_order_and_disabled_hooks_and_resets_counts() -> None:
    original = fh.HookedModule(nn.Linear(2, 2))
    fired: list[str] = []

    def add(name: str, **options: Any) -> fh.typing.HookHandle:
        return original.register_forward_hook(lambda *_: fired.append(name), **options)

    add("c")
    add("b", prepend=True)
    add("d", priority=-1)
    add("a", prepend=True)
    add("never").disable()
    add("removed").remove()
    call(original)
    duplicate = copy.deepcopy(original)
    assert [(row.priority, row.enabled, row.calls) for row in duplicate.hooks()] == [
        (0, True, 0),
        (0, True, 0),
        (0, True, 0),
        (0, False, 0),
        (-1, True, 0),
    ]
    fired.clear()
    call(duplicate)
    assert fired == ["a", "b", "c", "d"]
    duplicate.register_forward_hook(lambda *_: fired.append("first"), prepend=True)
    fired.clear()
    call(duplicate)
    assert fired == ["first", "a", "b", "c", "d"]


# into_inner


def test_into_inner_returns_the_module_and_removes_every_hook() -> None:
    module = nn.Linear(2, 2)
    torch_hook = module.register_forward_hook(ignore)
    hooked = fh.HookedModule(module)
    handles = [
        register(hooked, phase, lambda *_: pytest.fail("a removed hook fired")) for phase in PHASES
    ]
    assert hooked.into_inner() is module
    assert all(handle.removed for handle in handles)
    assert torch_hook.id in module._forward_hooks
    call(module)


def test_a_hook_may_call_into_inner() -> None:
    hooked = fh.HookedModule(nn.Identity())
    fired: list[str] = []

    def give_back(*_: Any) -> None:
        fired.append("give back")
        hooked.into_inner()

    hooked.register_forward_pre_hook(give_back)
    hooked.register_forward_pre_hook(lambda *_: fired.append("behind"))
    hooked.register_forward_hook(lambda *_: fired.append("forward"))
    assert hooked(5) == 5
    assert fired == ["give back"]
    with pytest.raises(fh.HookError):
        hooked(5)
