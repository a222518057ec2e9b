"""Scopes: hooks that fire for the calls of one context, and for no others."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch import nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator

LIMIT = 30.0
"""Seconds that a test waits at most for another thread."""
PHASES = {
    "forward_pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "backward_pre": "register_full_backward_pre_hook",
    "backward": "register_full_backward_hook",
}


@pytest.fixture(params=["wrapped", "instrumented"])
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    plain = nn.Linear(2, 2)
    if request.param == "wrapped":
        yield fh.HookedModule(plain)
        return
    with fh.instrument(plain):
        yield plain


@pytest.fixture
def hooked() -> fh.HookedModule[nn.Identity]:
    return fh.HookedModule(nn.Identity())


@pytest.fixture(params=PHASES)
def phase(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """A thread that was there before any scope was entered."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result(LIMIT)
        yield executor


def register(module: Any, phase: str, hook: Any, **options: Any) -> fh.HookHandle:
    handle = getattr(module, PHASES[phase])(hook, **options)
    assert isinstance(handle, fh.HookHandle)
    return handle


def call(module: nn.Module) -> None:
    """Runs all phases."""
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()


def add(amount: float) -> Callable[..., Any]:
    return lambda _module, _args, output: output + amount


class Counting:
    """A hook that counts its calls, and can be watched as it goes."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


# Where a scope's hooks fire


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


def test_scopes_nest_and_leaving_removes_exactly_its_own(module: Any, phase: str) -> None:
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


def test_a_hook_of_one_module_fires_for_that_module_alone() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with fh.instrument(model), fh.scope() as s:
        register(model[0], "forward", add(1), scope=s)
        assert model(torch.zeros(1)).item() == 1
        assert model[1](torch.zeros(1)).item() == 0


def test_removing_and_disabling_a_scoped_hook_keeps_the_others(module: Any, phase: str) -> None:
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


def test_on_error_and_always_call_hold_for_scoped_hooks(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    always = Counting()

    def fail(*_: Any) -> None:
        raise ValueError

    with fh.scope() as s:
        hooked.register_forward_hook(fail, scope=s, on_error="ignore")
        failing = hooked.register_forward_hook(fail, scope=s)
        hooked.register_forward_hook(always, scope=s, always_call=True)
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the note is what matters)
            hooked(1)
    assert always.count == 1
    assert any(f"id {failing.id}" in note for note in error.value.__notes__)


def test_hooks_lists_what_fires_here(hooked: fh.HookedModule[nn.Identity]) -> None:
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
                # Higher first, then those ahead of all, the latest first, then by registration.
                placed.append((-priority, -index if prepend else index + 1, index))
            hooked(1)
            assert fired == [index for *_, index in sorted(placed)]
            for handle in handles:
                handle.remove()


def test_a_scoped_hook_sees_what_global_hooks_before_it_returned(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    hooked.register_forward_hook(lambda _m, _a, output: output * 10)
    with fh.scope() as s:
        hooked.register_forward_hook(add(2), priority=1, scope=s)
        hooked.register_forward_hook(add(3), scope=s)
        assert hooked(1) == 33
    assert hooked(1) == 10


# Threads and tasks


def test_other_threads_calls_see_nothing(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        assert elsewhere.submit(hooked, 1).result(LIMIT) == 1
        assert hooked(1) == 2


def test_tasks_and_to_thread_inherit(hooked: fh.HookedModule[nn.Identity]) -> None:
    async def use(amount: float) -> list[Any]:
        with fh.scope() as s:
            hooked.register_forward_hook(add(amount), scope=s)
            await asyncio.sleep(0)

            async def child() -> Any:
                await asyncio.sleep(0)
                return hooked(0)

            return [
                hooked(0),
                await asyncio.create_task(child()),
                await asyncio.to_thread(hooked, 0),
            ]

    async def main() -> list[Any]:
        return [*await asyncio.gather(use(1), use(2), use(3)), hooked(0)]

    assert asyncio.run(main()) == [[1, 1, 1], [2, 2, 2], [3, 3, 3], 0]


def test_a_childs_scope_does_not_reach_its_parent(hooked: fh.HookedModule[nn.Identity]) -> None:
    async def child(entered: asyncio.Event, go_on: asyncio.Event) -> Any:
        with fh.scope() as s:
            hooked.register_forward_hook(add(1), scope=s)
            entered.set()
            await go_on.wait()
            return hooked(0)

    async def main() -> tuple[Any, Any]:
        entered, go_on = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(child(entered, go_on))
        await entered.wait()
        seen = hooked(0)
        go_on.set()
        return seen, await task

    assert asyncio.run(main()) == (0, 1)


def test_a_task_that_outlives_the_scope_calls_without_its_hooks(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    async def child(left: asyncio.Event) -> list[Any]:
        seen = [hooked(0)]
        await left.wait()
        seen.append(hooked(0))
        with fh.scope() as own:  # inside what it inherited
            hooked.register_forward_hook(add(10), scope=own)
            seen.append(hooked(0))
        return [*seen, hooked(0)]

    async def main() -> list[Any]:
        left = asyncio.Event()
        with fh.scope() as s:
            hooked.register_forward_hook(add(1), scope=s)
            task = asyncio.create_task(child(left))
            await asyncio.sleep(0)
        left.set()
        return await task

    assert asyncio.run(main()) == [1, 0, 10, 0]


def test_wrap_takes_the_scope_to_an_executor(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    with fh.scope() as outer, fh.scope() as s:
        hooked.register_forward_hook(add(10), scope=outer)
        hooked.register_forward_hook(add(1), scope=s)
        assert elsewhere.submit(s.wrap(hooked), 0).result(LIMIT) == 11
        # Those entered inside it do not come along.
        assert elsewhere.submit(outer.wrap(hooked), 0).result(LIMIT) == 10
        assert list(elsewhere.map(s.wrap(hooked), range(3))) == [11, 12, 13]
        assert elsewhere.submit(hooked, 0).result(LIMIT) == 0


def test_wrap_keeps_what_the_function_is() -> None:
    def twice(x: int, *, offset: int = 0) -> int:
        """Doubles."""
        return 2 * x + offset

    with fh.scope() as s:
        wrapped = s.wrap(twice)
        assert (wrapped.__name__, wrapped.__doc__) == ("twice", "Doubles.")
        assert wrapped(1, offset=5) == 7


def test_wrap_has_the_scope_active_while_a_coroutine_runs(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    async def later() -> Any:
        await asyncio.sleep(0)
        return hooked(0)

    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        wrapped = s.wrap(later)
        assert elsewhere.submit(lambda: asyncio.run(wrapped())).result(LIMIT) == 1


def test_wrap_refuses_what_runs_later_or_not_at_all() -> None:
    def generate() -> Iterator[int]:
        yield 1

    async def generate_async() -> AsyncIterator[int]:
        yield 1

    s = fh.scope()
    with pytest.raises(fh.HookTypeError, match="wrap takes a callable, got int"):
        s.wrap(3)  # type: ignore[arg-type]
    for function in (generate, generate_async):
        with pytest.raises(fh.HookTypeError, match="use activate"):
            s.wrap(function)


def test_activate_in_another_thread(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    with fh.scope() as outer, fh.scope() as s:
        hooked.register_forward_hook(add(10), scope=outer)
        hooked.register_forward_hook(add(1), scope=s)

        def work() -> list[Any]:
            seen = [hooked(0)]
            with fh.scope() as own, s.activate(), outer.activate():
                hooked.register_forward_hook(add(100), scope=own)
                seen.append(hooked(0))
            with pytest.raises(ZeroDivisionError), s.activate():
                seen.append(hooked(0) / 0)
            return [*seen, hooked(0)]

        assert elsewhere.submit(work).result(LIMIT) == [0, 111, 0]
        # Where it is active already it does not fire twice.
        with s.activate(), s.activate():
            assert hooked(0) == 11
        assert hooked(0) == 11


def test_leaving_ends_the_scope_for_threads_that_activated_it(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    active, left = threading.Event(), threading.Event()

    def work(s: fh.Scope) -> list[Any]:
        with s.activate():
            seen = [hooked(0)]
            active.set()
            assert left.wait(LIMIT)
            return [*seen, hooked(0)]

    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        working = elsewhere.submit(work, s)
        assert active.wait(LIMIT)
    left.set()
    assert working.result(LIMIT) == [1, 0]


def test_a_scope_that_is_not_entered_cannot_be_activated(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    s = fh.scope()
    wrapped = s.wrap(hooked)
    for _ in range(2):
        with pytest.raises(fh.HookError, match="only a scope that is entered can be activated"):
            wrapped(1)
        with pytest.raises(fh.HookError, match="only a scope that is entered"), s.activate():
            pytest.fail("it was activated")
        if not s.closed:
            with s:
                assert wrapped(1) == 1


@pytest.mark.usefixtures("switch_often")
def test_threads_with_a_scope_each_do_not_cross() -> None:
    threads, calls = 8, 60
    model = nn.Sequential(nn.Identity(), nn.Identity())
    start = threading.Barrier(threads, timeout=LIMIT)
    wrong: list[Any] = []
    counted: dict[int, int] = {}

    def work(number: int) -> None:
        start.wait()
        for turn in range(calls):
            with contextlib.suppress(ZeroDivisionError), fh.scope() as s:
                handle = register(model[0], "forward", add(number), scope=s)
                register(model[1], "forward", add(100 * number), scope=s)
                result = model(torch.zeros(1)).item()
                counted[number] = counted.get(number, 0) + handle.calls
                if result != 101 * number:
                    wrong.append((number, result))
                _ = 1 / (turn % 3)

    with fh.instrument(model):
        workers = [threading.Thread(target=work, args=(n,)) for n in range(1, threads + 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LIMIT)
        assert model(torch.zeros(1)).item() == 0
    assert wrong == []
    assert counted == dict.fromkeys(range(1, threads + 1), calls)


# Backward


def test_backward_after_the_with_line_of_the_forward_fires_while_the_scope_is_open(
    module: Any, elsewhere: ThreadPoolExecutor
) -> None:
    pre, full = Counting(), Counting()
    with fh.scope() as s:
        register(module, "backward_pre", pre, scope=s)
        register(module, "backward", full, scope=s)
        x = torch.ones(1, 2, requires_grad=True)
        with fh.scope() as later:
            not_recorded = register(module, "backward", Counting(), scope=later)
            # On a thread that is in none of the scopes.
            outputs = elsewhere.submit(s.wrap(module), x).result(LIMIT)
            elsewhere.submit(outputs.sum().backward).result(LIMIT)
            assert not_recorded.calls == 0
    assert (pre.count, full.count) == (1, 1)


def test_a_backward_after_leaving_fires_nothing(module: Any) -> None:
    hook = Counting()
    with fh.scope() as s:
        register(module, "backward", hook, scope=s)
        register(module, "backward_pre", hook, scope=s)
        x = torch.ones(1, 2, requires_grad=True)
        out = module(x)
    out.sum().backward()
    assert hook.count == 0
    assert x.grad is not None


def test_the_scope_of_the_thread_that_runs_backward_does_not_fire(
    module: Any, elsewhere: ThreadPoolExecutor
) -> None:
    mine, theirs = Counting(), Counting()

    def backward(out: torch.Tensor) -> None:
        with fh.scope() as other:
            register(module, "backward", theirs, scope=other)
            out.sum().backward()

    with fh.scope() as s:
        register(module, "backward", mine, scope=s)
        out = module(torch.ones(1, 2, requires_grad=True))
        elsewhere.submit(backward, out).result(LIMIT)
    assert (mine.count, theirs.count) == (1, 0)


def test_a_scoped_backward_hook_changes_the_gradient(module: Any) -> None:
    x = torch.ones(1, 2, requires_grad=True)
    with fh.scope() as s:
        register(module, "backward", lambda *_: (torch.full((1, 2), 7.0),), scope=s)
        module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[7, 7]]


def test_a_checkpointed_region_is_recomputed_with_the_scopes_hooks(module: Any) -> None:
    hook = Counting()
    x = torch.ones(1, 2, requires_grad=True)
    with fh.scope() as s:
        register(module, "forward_pre", hook, scope=s)
        out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        out.sum().backward()
    assert hook.count == 2


def test_checkpointing_takes_the_scope_to_the_thread_of_the_backward(
    module: Any, elsewhere: ThreadPoolExecutor
) -> None:
    hook = Counting()
    x = torch.ones(1, 2, requires_grad=True)
    with fh.scope() as s:
        register(module, "forward_pre", hook, scope=s)
        out = torch.utils.checkpoint.checkpoint(
            module,
            x,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), s.activate()),
        )
        elsewhere.submit(out.sum().backward).result(LIMIT)
    assert hook.count == 2


# Misuse


def test_registering_with_a_left_scope_is_refused(module: Any, phase: str) -> None:
    with fh.scope() as s:
        pass
    with pytest.raises(fh.HookError, match=r"this scope was left, and its hooks with it"):
        register(module, phase, Counting(), scope=s)
    assert module._modules == {}
    call(module)


@pytest.mark.parametrize("scope", [1, "s", fh.scope, fh.Scope, object()])
def test_scope_is_a_scope(hooked: fh.HookedModule[nn.Identity], scope: Any) -> None:
    with pytest.raises(fh.HookTypeError, match=r"scope is what scope\(\) returned, got"):
        hooked.register_forward_hook(add(1), scope=scope)
    assert hooked.hooks() == []


def test_entering_twice_is_refused(hooked: fh.HookedModule[nn.Identity]) -> None:
    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        with pytest.raises(fh.HookError, match="a scope is entered once"), s:
            pytest.fail("it was entered")
        assert hooked(0) == 1
    with pytest.raises(fh.HookError, match="a scope is entered once"), s:
        pytest.fail("it was entered")


@pytest.mark.usefixtures("switch_often")
def test_of_threads_that_enter_a_scope_at_once_one_does() -> None:
    for _ in range(50):
        s = fh.scope()
        start = threading.Barrier(4, timeout=LIMIT)
        entered: list[fh.Scope] = []

        def enter(
            s: fh.Scope = s,
            start: threading.Barrier = start,
            entered: list[fh.Scope] = entered,
        ) -> None:
            start.wait()
            try:
                entered.append(s.__enter__())
            except fh.HookError:
                return

        threads = [threading.Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert entered == [s]


def test_leaving_twice_or_before_entering_is_refused() -> None:
    s = fh.scope()
    for _ in range(2):
        with pytest.raises(fh.HookError, match="not entered, or was left before"):
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
            with pytest.raises(fh.HookError, match="left where it was entered"):
                elsewhere.submit(leave, None, None, None).result(LIMIT)
        assert hooked(0) == 1
    assert hooked(0) == 0


@pytest.mark.parametrize("how", ["task", "to_thread", "copied context"])
def test_leaving_in_a_context_that_inherited_is_refused_and_changes_nothing(
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


def test_leaving_out_of_order_is_told_and_leaves_that_one_alone(
    hooked: fh.HookedModule[nn.Identity],
) -> None:
    outer, inner = fh.scope(), fh.scope()
    for s, amount in ((outer, 1), (inner, 10)):
        s.__enter__()
        hooked.register_forward_hook(add(amount), scope=s)
    with pytest.raises(fh.HookError, match="it was left all the same, and they were not"):
        outer.__exit__(None, None, None)
    assert (outer.closed, inner.closed, hooked(0)) == (True, False, 10)
    inner.__exit__(None, None, None)
    assert hooked(0) == 0
    # Nothing of it is left in the context.
    freed = [weakref.ref(outer), weakref.ref(inner)]
    del outer, inner, s
    gc.collect()
    assert [each() for each in freed] == [None, None]


def test_the_error_about_the_order_does_not_hide_that_of_the_block() -> None:
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
    # As any context variable that a generator sets, it is seen by whoever resumed it.
    assert hooked(0) == 1
    generator.close()
    assert hooked(0) == 0
    assert list(generate()) == [1, 1]
    assert hooked(0) == 0


def test_a_generator_closed_out_of_order_leaves_no_hook_behind(
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
        with pytest.raises(fh.HookError, match="left all the same"):
            generator.close()
        assert hooked(0) == 10
    assert hooked(0) == 0


def test_what_was_activated_ends_where_it_began(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        activated = s.activate()
        activated.__enter__()
        with pytest.raises(fh.HookError, match="ends in the same thread and task"):
            elsewhere.submit(activated.__exit__, None, None, None).result(LIMIT)
        assert hooked(0) == 1


def test_repr_says_where_it_is_in_its_life() -> None:
    s = fh.scope()
    seen = [repr(s)]
    with s:
        seen.append(repr(s))
    assert [*seen, repr(s)] == ["<Scope new>", "<Scope entered>", "<Scope left>"]


# Lifetimes


def test_leaving_frees_the_hooks(module: Any, phase: str) -> None:
    hook = Counting()
    freed = weakref.ref(hook)
    with fh.scope() as s:
        register(module, phase, hook, scope=s)
        del hook
        assert freed() is not None
    assert freed() is None


def test_a_scope_that_was_dropped_ends_with_its_context(
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


def test_dropped_modules_do_not_leave_their_hooks_in_a_long_scope() -> None:
    hooks: list[weakref.ref[Any]] = []
    with fh.scope() as s:
        for _ in range(100):
            hook = Counting()
            hooks.append(weakref.ref(hook))
            fh.HookedModule(nn.Identity()).register_forward_hook(hook, scope=s)
        del hook
        gc.collect()
        # Some may wait for the next that registers.
        assert sum(hook() is not None for hook in hooks) < 50


def test_quiesce_waits_for_scoped_hooks_too(hooked: fh.HookedModule[nn.Identity]) -> None:
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


def resident() -> int:
    """Bytes of memory that the process has: what Rust allocates is not traced."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096


def test_registering_and_removing_in_a_long_scope_leaves_no_memory_behind() -> None:
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
