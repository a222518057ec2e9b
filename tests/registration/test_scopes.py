"""Scopes: when their hooks fire, order and lifetimes."""

from __future__ import annotations

import contextvars
import gc
import random
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.hooks import Counting, add, call, register
from support.limits import LIMIT
from support.memory import resident

if TYPE_CHECKING:
    from collections.abc import Callable

# Firing


def test_hooks_fire_between_entering_and_leaving(module: Any, phase: str) -> None:
    hook = Counting()
    s = fh.scope()
    handle = register(module, phase, hook, scope=s)
    call(module)
    assert hook.count == 0
    with s:
        call(module)
        assert (hook.count, handle.calls, handle.removed) == (1, 1, False)
    call(module)
    assert (hook.count, handle.removed) == (1, True)


def test_a_hook_may_be_registered_before_entering_or_after(module: Any) -> None:
    fired: list[str] = []
    s = fh.scope()
    register(module, "forward", lambda *_: fired.append("before"), scope=s)
    with s:
        register(module, "forward", lambda *_: fired.append("after"), scope=s)
        call(module)
    assert fired == ["before", "after"]


def test_scopes_nest_and_leaving_removes_exactly_the_scopes_own_hooks(
    module: Any, phase: str
) -> None:
    fired: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: fired.append(name)

    register(module, phase, note("global"))
    with fh.scope() as outer:
        register(module, phase, note("outer"), scope=outer)
        with fh.scope() as inner:
            register(module, phase, note("inner"), scope=inner)
            register(module, phase, note("outer, late"), scope=outer)
            call(module)
        assert fired == ["global", "outer", "inner", "outer, late"]
        fired.clear()
        call(module)
        assert fired == ["global", "outer", "outer, late"]
    fired.clear()
    call(module)
    assert fired == ["global"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_behind(module: Any, error: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise error

    s = fh.scope()
    handles = [register(module, "forward", fail, scope=s) for _ in range(3)]
    with pytest.raises(error), s:
        call(module)
    assert s.closed
    assert all(handle.removed for handle in handles)
    call(module)


def test_a_scope_without_hooks_changes_nothing(hooked: fh.HookedModule[nn.Identity]) -> None:
    x = torch.ones(1)
    with fh.scope(), fh.scope():
        assert hooked(x) is x


def test_a_scoped_hook_fires_only_for_its_module() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with fh.instrument(model), fh.scope() as s:
        register(model[0], "forward", add(1), scope=s)
        assert model(torch.zeros(1)).item() == 1
        assert model[1](torch.zeros(1)).item() == 0


def test_removing_and_disabling_a_scoped_hook_leaves_the_others(module: Any, phase: str) -> None:
    fired: list[str] = []
    with fh.scope() as s:
        handles = {
            name: register(module, phase, lambda *_, name=name: fired.append(name), scope=s)
            for name in "abc"
        }
        handles["a"].remove()
        handles["b"].disable()
        call(module)
        assert fired == ["c"]
        handles["b"].enable()
        fired.clear()
        call(module)
        assert fired == ["b", "c"]


def test_a_hook_may_register_with_its_scope_and_leave_it(module: Any) -> None:
    fired: list[str] = []
    s = fh.scope()

    def leave(*_: Any) -> None:
        fired.append("leave")
        register(module, "forward", lambda *_: fired.append("late"), scope=s)
        s.__exit__(None, None, None)

    register(module, "forward_pre", leave, scope=s)
    register(module, "forward", lambda *_: fired.append("left"), scope=s)
    s.__enter__()
    call(module)
    call(module)
    assert fired == ["leave"]
    assert s.closed


def test_typed_hooks_may_be_scoped(module: Any) -> None:
    with fh.scope() as s:
        module.register_forward_pre_hook(fh.ForwardPreHook(lambda x: x * 0), scope=s)
        seen: list[torch.Tensor] = []
        module.register_forward_hook(fh.ForwardHook(lambda x, _: seen.append(x)), scope=s)
        module(torch.ones(1, 2))
    assert seen[0].tolist() == [[0, 0]]


def test_on_error_and_always_call_apply_to_scoped_hooks(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    always = Counting()

    def fail(*_: Any) -> None:
        raise ValueError

    with fh.scope() as s:
        hooked.register_forward_hook(fail, scope=s, on_error="ignore")
        hooked.register_forward_hook(fail, scope=s)
        hooked.register_forward_hook(always, scope=s, always_call=True)
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the note is what matters)
            hooked(1)
    assert always.count == 1
    (note,) = error.value.__notes__
    assert note.endswith(f"registered at {__file__}:{fail.__code__.co_firstlineno + 5}")


def test_hooks_lists_the_hooks_that_fire_in_this_context(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    hooked.register_forward_hook(add(0))
    with fh.scope() as s:
        handle = hooked.register_forward_hook(add(1), scope=s, priority=1)
        first, _ = hooked.hooks()
        assert first.id == handle.id
    assert len(hooked.hooks()) == 1


# Order


def test_priority_is_one_total_order_across_scopes(hooked: fh.HookedModule[nn.Identity]) -> None:
    chance = random.Random(0)  # noqa: S311
    with fh.scope() as outer, fh.scope() as inner:
        for _ in range(20):
            fired: list[int] = []
            placed: list[tuple[int, int, int]] = []
            handles = []
            for index in range(12):
                priority, prepend = chance.randint(-1, 1), chance.random() < 0.3
                handles.append(
                    hooked.register_forward_hook(
                        lambda *_, index=index, fired=fired: fired.append(index),
                        priority=priority,
                        prepend=prepend,
                        scope=chance.choice([None, outer, inner]),
                    )
                )
                # By priority, then prepended hooks (latest first), then registration order.
                placed.append((-priority, -index if prepend else index + 1, index))
            hooked(1)
            assert fired == [index for *_, index in sorted(placed)]
            for handle in handles:
                handle.remove()


def test_a_scoped_hook_gets_the_output_of_earlier_global_hooks(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    hooked.register_forward_hook(lambda _m, _a, output: output * 10)
    with fh.scope() as s:
        hooked.register_forward_hook(add(2), priority=1, scope=s)
        hooked.register_forward_hook(add(3), scope=s)
        assert hooked(1) == 33
    assert hooked(1) == 10


# Lifetimes


def test_leaving_frees_the_hooks(module: Any, phase: str) -> None:
    hook = Counting()
    freed = weakref.ref(hook)
    with fh.scope() as s:
        register(module, phase, hook, scope=s)
        del hook
        assert freed() is not None
    assert freed() is None


def test_a_dropped_entered_scope_is_freed_with_its_context(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    def enter() -> weakref.ref[Any]:
        hook = Counting()
        hooked.register_forward_hook(hook, scope=fh.scope().__enter__())
        return weakref.ref(hook)

    context = contextvars.copy_context()
    hook = context.run(enter)
    context.run(hooked, 1)
    hooked(1)
    gc.collect()
    kept = hook()
    assert kept is not None
    assert kept.count == 1
    del kept, context
    gc.collect()
    assert hook() is None


def test_a_scope_that_was_never_entered_frees_its_hooks(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    class Holding(Counting):
        def holding(self, s: fh.Scope) -> Self:
            self.scope = s
            return self

    s = fh.scope()
    hook = Holding().holding(s)
    freed = weakref.ref(hook)
    hooked.register_forward_hook(hook, scope=s)
    del s, hook
    gc.collect()
    assert freed() is None


def test_a_long_scope_frees_hooks_of_dropped_modules() -> None:
    hooks: list[weakref.ref[Any]] = []
    with fh.scope() as s:
        for _ in range(100):
            hook = Counting()
            hooks.append(weakref.ref(hook))
            fh.HookedModule(nn.Identity()).register_forward_hook(hook, scope=s)
        del hook
        gc.collect()
        # Some are freed only at the next registration.
        assert sum(hook() is not None for hook in hooks) < 50


def test_quiesce_waits_for_scoped_hooks(hooked: fh.HookedModule[nn.Identity]) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def block(*_: Any) -> None:
        inside.set()
        assert go_on.wait(LIMIT)

    with fh.scope() as s:
        handle = hooked.register_forward_hook(block, scope=s)
        thread = threading.Thread(target=s.wrap(hooked), args=(1,))
        thread.start()
        assert inside.wait(LIMIT)
    try:
        with pytest.raises(TimeoutError):
            handle.remove(wait=True, timeout=0.01)
        with pytest.raises(TimeoutError):
            hooked.quiesce(timeout=0.01)
    finally:
        go_on.set()
        thread.join(LIMIT)
    hooked.quiesce(timeout=LIMIT)


def test_registering_and_removing_in_a_long_scope_frees_its_memory() -> None:
    model = nn.Identity()

    def churn(count: int, s: fh.Scope) -> None:
        for _ in range(count):
            fh.register(model, "", add(1), scope=s).remove()

    with fh.scope() as s:
        churn(2_000, s)
        gc.collect()
        before = resident()
        churn(30_000, s)
        gc.collect()
        assert resident() - before < 30_000 * 100
