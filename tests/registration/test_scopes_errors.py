"""Refused ways to enter, leave and activate scopes."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import ferrohook as fh
from support.hooks import Counting, add, call, register
from support.limits import LIMIT
from support.threads import run_together

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import ThreadPoolExecutor

    from torch import nn


def test_registering_with_a_left_scope_is_refused(module: Any, phase: str) -> None:
    with fh.scope() as s:
        pass
    with pytest.raises(fh.HookError, match=r"this scope was left, and its hooks were removed"):
        register(module, phase, Counting(), scope=s)
    assert module._modules == {}
    call(module)


@pytest.mark.parametrize("scope", [1, "s", fh.scope, fh.Scope, object()])
def test_the_scope_option_takes_only_a_scope(
    hooked: fh.HookedModule[nn.Identity], scope: Any
) -> None:
    with pytest.raises(fh.HookTypeError, match=r"scope must be the result of scope\(\), got"):
        hooked.register_forward_hook(add(1), scope=scope)
    assert hooked.hooks() == []


def test_entering_twice_is_refused(hooked: fh.HookedModule[nn.Identity]) -> None:
    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        with pytest.raises(fh.HookError, match="a scope can be entered only once"), s:
            pytest.fail("it was entered")
        assert hooked(0) == 1
    with pytest.raises(fh.HookError, match="a scope can be entered only once"), s:
        pytest.fail("it was entered")


@pytest.mark.usefixtures("switch_often")
def test_exactly_one_of_concurrent_enters_succeeds() -> None:
    for _ in range(50):
        s = fh.scope()

        def enter(s: fh.Scope = s) -> fh.Scope | None:
            try:
                return s.__enter__()
            except fh.HookError:
                return None

        assert [entered for entered in run_together(*[enter] * 4) if entered] == [s]


def test_leaving_twice_or_before_entering_is_refused() -> None:
    s = fh.scope()
    for _ in range(2):
        with pytest.raises(fh.HookError, match="not entered, or was already left"):
            s.__exit__(None, None, None)
        if not s.closed:
            with s:
                pass


def test_leaving_from_another_thread_is_refused_and_changes_nothing(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        for leave in (s.__exit__, s.wrap(s.__exit__)):
            with pytest.raises(
                fh.HookError, match="must be left in the thread and task that entered it"
            ):
                elsewhere.submit(leave, None, None, None).result(LIMIT)
        assert hooked(0) == 1
    assert hooked(0) == 0


@pytest.mark.parametrize("how", ["task", "to_thread", "copied context"])
def test_leaving_in_an_inheriting_context_is_refused_and_changes_nothing(
    hooked: fh.HookedModule[nn.Identity], how: str
) -> None:
    async def main() -> None:
        with fh.scope() as s:
            hooked.register_forward_hook(add(1), scope=s)

            def leave() -> None:
                with pytest.raises(fh.HookError, match="still entered there"):
                    s.__exit__(None, None, None)
                assert hooked(0) == 1

            async def leave_later() -> None:
                leave()

            if how == "task":
                await asyncio.create_task(leave_later())
            elif how == "to_thread":
                await asyncio.to_thread(leave)
            else:
                contextvars.copy_context().run(leave)
            assert hooked(0) == 1
        assert hooked(0) == 0

    asyncio.run(main())


def test_leaving_out_of_order_raises_and_leaves_only_that_scope(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    outer, inner = fh.scope(), fh.scope()
    for s, amount in ((outer, 1), (inner, 10)):
        s.__enter__()
        hooked.register_forward_hook(add(amount), scope=s)
    with pytest.raises(fh.HookError, match="it was left anyway, but they are still entered"):
        outer.__exit__(None, None, None)
    assert (outer.closed, inner.closed, hooked(0)) == (True, False, 10)
    inner.__exit__(None, None, None)
    assert hooked(0) == 0
    # The context holds no reference to either scope.
    freed = [weakref.ref(outer), weakref.ref(inner)]
    del outer, inner, s
    gc.collect()
    assert [each() for each in freed] == [None, None]


def test_the_error_about_the_order_is_chained_to_the_error_of_the_block() -> None:
    def fail() -> None:
        inner.__enter__()
        raise ZeroDivisionError

    inner = fh.scope()
    with pytest.raises(fh.HookError) as error, fh.scope():
        fail()
    assert isinstance(error.value.__context__, ZeroDivisionError)
    inner.__exit__(None, None, None)


def test_a_generator_keeps_its_scope_entered_until_it_ends(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    def generate() -> Generator[Any]:
        with fh.scope() as s:
            hooked.register_forward_hook(add(1), scope=s)
            yield hooked(0)
            yield hooked(0)

    generator = generate()
    assert next(generator) == 1
    # The caller sees it, like any context variable that a generator sets.
    assert hooked(0) == 1
    generator.close()
    assert hooked(0) == 0
    assert list(generate()) == [1, 1]
    assert hooked(0) == 0


def test_a_generator_closed_out_of_order_leaves_no_hooks(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    def generate() -> Generator[None]:
        with fh.scope() as s:
            hooked.register_forward_hook(add(1), scope=s)
            yield

    generator = generate()
    next(generator)
    with fh.scope() as s:
        hooked.register_forward_hook(add(10), scope=s)
        with pytest.raises(fh.HookError, match="left anyway"):
            generator.close()
        assert hooked(0) == 10
    assert hooked(0) == 0


def test_an_activation_ends_in_the_context_where_it_began(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        activated = s.activate()
        activated.__enter__()
        with pytest.raises(fh.HookError, match="left in another thread or task"):
            elsewhere.submit(activated.__exit__, None, None, None).result(LIMIT)
        assert hooked(0) == 1
        with pytest.raises(fh.HookError, match=r"entered: call activate\(\) again"), activated:
            pytest.fail("it was entered")
        activated.__exit__(None, None, None)
        with pytest.raises(fh.HookError, match="not entered, or was already left"):
            activated.__exit__(None, None, None)
        assert hooked(0) == 1


def test_repr_shows_the_state() -> None:
    s = fh.scope()
    seen = [repr(s)]
    with s:
        seen.append(repr(s))
    assert [*seen, repr(s)] == ["<Scope new>", "<Scope entered>", "<Scope left>"]
