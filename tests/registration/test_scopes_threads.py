"""Scopes across threads, tasks and backward."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.hooks import Counting, add, register
from support.limits import LIMIT
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from concurrent.futures import ThreadPoolExecutor

# Threads and tasks


def test_tasks_and_to_thread_inherit_the_scope(hooked: fh.HookedModule[nn.Identity]) -> None:
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
        with fh.scope() as own:  # nested in the inherited scope
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


def test_a_wrapped_function_runs_in_the_scope_on_an_executor(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    with fh.scope() as outer, fh.scope() as s:
        hooked.register_forward_hook(add(10), scope=outer)
        hooked.register_forward_hook(add(1), scope=s)
        assert elsewhere.submit(s.wrap(hooked), 0).result(LIMIT) == 11
        # Scopes entered inside `outer` are not taken along.
        assert elsewhere.submit(outer.wrap(hooked), 0).result(LIMIT) == 10
        assert list(elsewhere.map(s.wrap(hooked), range(3))) == [11, 12, 13]
        assert elsewhere.submit(hooked, 0).result(LIMIT) == 0


def test_wrap_preserves_name_docstring_and_arguments() -> None:
    def twice(x: int, *, offset: int = 0) -> int:
        """Doubles."""
        return 2 * x + offset

    with fh.scope() as s:
        wrapped = s.wrap(twice)
        assert (wrapped.__name__, wrapped.__doc__) == ("twice", "Doubles.")
        assert wrapped(1, offset=5) == 7


def test_a_wrapped_coroutine_function_runs_in_the_scope(
    hooked: fh.HookedModule[nn.Identity], elsewhere: ThreadPoolExecutor
) -> None:
    async def later() -> Any:
        await asyncio.sleep(0)
        return hooked(0)

    class Later:
        async def __call__(self) -> Any:
            return await later()

    with fh.scope() as s:
        hooked.register_forward_hook(add(1), scope=s)
        for function in (later, Later(), functools.partial(Later())):
            wrapped = s.wrap(function)
            assert elsewhere.submit(lambda it=wrapped: asyncio.run(it())).result(LIMIT) == 1


def test_wrap_refuses_generators_and_non_callables() -> None:
    def generate() -> Iterator[int]:
        yield 1

    async def generate_async() -> AsyncIterator[int]:
        yield 1

    class Generates:
        def __call__(self) -> Iterator[int]:
            yield 1

    s = fh.scope()
    with pytest.raises(fh.HookTypeError, match="wrap needs a callable, got int"):
        s.wrap(3)  # type: ignore[arg-type]
    for function in (generate, generate_async, Generates()):
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
        # In a context where the scope is already active its hooks fire once.
        with s.activate(), s.activate():
            assert hooked(0) == 11
        assert hooked(0) == 11


def test_leaving_ends_the_scope_in_threads_that_activated_it(
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
        with pytest.raises(fh.HookError, match="activate needs an entered scope: use it inside"):
            wrapped(1)
        with pytest.raises(fh.HookError, match="activate needs an entered scope"), s.activate():
            pytest.fail("it was activated")
        if not s.closed:
            with s:
                assert wrapped(1) == 1


@pytest.mark.usefixtures("switch_often")
def test_scopes_of_threads_are_isolated() -> None:
    threads, calls = 8, 60
    model = nn.Sequential(nn.Identity(), nn.Identity())
    wrong: list[Any] = []
    counted: dict[int, int] = {}

    def work(number: int) -> None:
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
        in_threads(threads, lambda number: work(number + 1))
        assert model(torch.zeros(1)).item() == 0
    assert wrong == []
    assert counted == dict.fromkeys(range(1, threads + 1), calls)


# Backward


def test_backward_hooks_of_an_open_scope_fire_on_any_thread(
    module: Any, elsewhere: ThreadPoolExecutor
) -> None:
    pre, full = Counting(), Counting()
    with fh.scope() as s:
        register(module, "backward_pre", pre, scope=s)
        register(module, "backward", full, scope=s)
        x = torch.ones(1, 2, requires_grad=True)
        with fh.scope() as later:
            not_recorded = register(module, "backward", Counting(), scope=later)
            # On a thread that has entered none of the scopes.
            outputs = elsewhere.submit(s.wrap(module), x).result(LIMIT)
            elsewhere.submit(outputs.sum().backward).result(LIMIT)
            assert not_recorded.calls == 0
    assert (pre.count, full.count) == (1, 1)


def test_backward_hooks_of_a_left_scope_do_not_fire(module: Any) -> None:
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


def test_checkpointing_recomputes_in_the_scope_on_the_thread_of_the_backward(
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
