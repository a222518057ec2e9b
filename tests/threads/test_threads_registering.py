"""Registering, removing and failing in many threads."""

from __future__ import annotations

import copy
import gc
import logging
import random
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import ferrohook as fh
from support.limits import LIMIT
from support.modules import Echo, Module
from support.probes import Probe
from support.threads import THREADS, Together, run_together

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("switch_often")


# --- Registering and removing -------------------------------------------------------------------


def test_hooks_of_all_threads_have_one_total_order() -> None:
    hooked: Module = fh.HookedModule(Echo())
    each = 250
    registered: list[tuple[int, int, int]] = []

    def registering(seed: int) -> None:
        choose = random.Random(seed)  # noqa: S311 (not for cryptography)
        for _ in range(each):
            priority, prepend = choose.randrange(-2, 3), choose.random() < 0.5

            def hook(module: Any, args: Any, output: Any, _seed: int = seed) -> None: ...

            handle = hooked.register_forward_hook(hook, priority=priority, prepend=prepend)
            rank = -handle.id if prepend else handle.id
            registered.append((-priority, rank, handle.id))

    run_together(*(lambda seed=seed: registering(seed) for seed in range(THREADS)))

    expected = [hook_id for _, _, hook_id in sorted(registered)]
    assert len(set(expected)) == THREADS * each
    seen: list[list[int]] = []
    run_together(
        *(lambda: seen.append([hook.id for hook in hooked.hooks()]) for _ in range(THREADS))
    )
    assert seen == [expected] * THREADS


def test_ids_are_unique_across_modules_and_increase_in_each_thread() -> None:
    each = 5_000
    modules = [fh.HookedModule(Echo()) for _ in range(THREADS)]
    ids: list[list[int]] = [[] for _ in range(THREADS)]

    def registering(thread: int) -> None:
        for done in range(each):
            handle = modules[(thread + done) % THREADS].register_forward_hook(lambda *_: None)
            ids[thread].append(handle.id)

    run_together(*(lambda thread=thread: registering(thread) for thread in range(THREADS)))

    assert all(mine == sorted(mine) for mine in ids)
    assert len({hook_id for mine in ids for hook_id in mine}) == THREADS * each
    assert sum(len(module.hooks()) for module in modules) == THREADS * each


def test_a_handle_removed_by_all_threads_at_once_is_removed_once() -> None:
    rounds = 500
    hooked: Module = fh.HookedModule(Echo())
    handles = [hooked.register_forward_hook(lambda *_: None) for _ in range(2 * rounds)]
    barrier = threading.Barrier(THREADS)

    def removing() -> None:
        for handle in handles[::2]:
            barrier.wait(LIMIT)
            handle.remove()
            assert handle.removed

    run_together(*(removing for _ in range(THREADS)))

    assert [hook.id for hook in hooked.hooks()] == [handle.id for handle in handles[1::2]]
    hooked(None)
    assert [handle.calls for handle in handles] == [0, 1] * rounds


def test_concurrent_clearing_and_registering_lose_no_hook() -> None:
    each = 5_000
    hooked: Module = fh.HookedModule(Echo())
    handles: list[fh.typing.HookHandle] = []
    probes: list[weakref.ref[Probe]] = []

    def registering() -> None:
        for _ in range(each):
            probe = Probe()
            handles.append(probe.register(hooked, "plain"))
            probes.append(weakref.ref(probe))

    def clearing() -> None:
        for _ in range(each // 10):
            hooked.clear_hooks("forward")

    run_together(*(registering for _ in range(4)), clearing, clearing)

    assert len(handles) == 4 * each
    live = {handle.id for handle in handles if not handle.removed}
    assert {hook.id for hook in hooked.hooks()} == live
    hooked.clear_hooks()
    gc.collect()
    assert all(handle.removed for handle in handles)
    assert [ref for ref in probes if ref() is not None] == []


def test_changing_priorities_never_skips_or_repeats_a_hook_in_a_call() -> None:
    calls_each, hooks = 2_000, 6
    hooked: Module = fh.HookedModule(Echo())

    def noting(place: int) -> Callable[[Any, Any, Any], None]:
        return lambda module, args, output: output.append(place)

    handles = [hooked.register_forward_hook(noting(place)) for place in range(hooks)]
    calling = threading.Semaphore(THREADS)

    def call() -> None:
        for _ in range(calls_each):
            assert sorted(hooked([])) == list(range(hooks))
        calling.acquire()

    def move() -> None:
        choose = random.Random(0)  # noqa: S311 (not for cryptography)
        while calling.acquire(blocking=False):
            calling.release()
            for _ in range(20):
                choose.choice(handles).priority = choose.randrange(3)

    run_together(*(call for _ in range(THREADS)), move)

    assert [handle.calls for handle in handles] == [THREADS * calls_each] * hooks
    listed = [(-hook.priority, hook.id) for hook in hooked.hooks()]
    assert listed == sorted(listed)
    assert {hook.id: hook.priority for hook in hooked.hooks()} == {
        handle.id: handle.priority for handle in handles
    }


def test_handles_as_context_managers_leave_nothing_behind_when_calls_raise() -> None:
    each = 1_000
    hooked: Module = fh.HookedModule(Echo())
    calls = [0] * THREADS

    def using(thread: int) -> None:
        def counting(module: Any, args: Any, output: Any) -> None:
            if output == thread:
                calls[thread] += 1
                raise ZeroDivisionError

        for _ in range(each):
            with (
                pytest.raises(ZeroDivisionError),
                hooked.register_forward_hook(counting) as handle,
            ):
                hooked(thread)
            assert handle.removed

    run_together(*(lambda thread=thread: using(thread) for thread in range(THREADS)))

    assert calls == [each] * THREADS
    assert hooked.hooks() == []


def test_copies_made_during_registering_are_consistent() -> None:
    hooked: Module = fh.HookedModule(Echo())
    kept = 5
    for _ in range(kept):
        hooked.register_forward_hook(lambda module, args, output: output + 1)
    copying = threading.Semaphore(2)

    def copies() -> None:
        for _ in range(200):
            duplicate = copy.deepcopy(hooked)
            assert duplicate(0) == kept
            assert kept <= len(duplicate.hooks()) <= kept + THREADS
        copying.acquire()

    def churning() -> None:
        while copying.acquire(blocking=False):
            copying.release()
            with hooked.register_forward_hook(lambda *_: None):
                assert hooked(0) == kept

    run_together(copies, copies, *(churning for _ in range(THREADS)))

    assert len(hooked.hooks()) == kept


def test_into_inner_during_calls_ends_them_cleanly() -> None:
    for _ in range(50):
        inner = Echo()
        hooked: Module = fh.HookedModule(inner)
        handle = hooked.register_forward_hook(lambda *_: None)
        refused: list[None] = []

        def calling(hooked: Module = hooked, refused: list[None] = refused) -> None:
            try:
                while True:
                    assert hooked(3) == 3
            except fh.HookError:
                refused.append(None)

        together = Together(*(calling for _ in range(4)), hooked.into_inner)
        together.join()
        assert len(refused) == 4
        assert handle.removed
        assert hooked._registry.list() == []
        assert inner(4) == 4


# --- Failing hooks ------------------------------------------------------------------------------


def test_a_hook_that_fails_in_all_threads_is_disabled_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooked: Module = fh.HookedModule(Echo())
    inside = threading.Barrier(THREADS)

    def failing(module: Any, args: Any, output: Any) -> None:
        inside.wait(LIMIT)
        raise ZeroDivisionError

    handle = hooked.register_forward_hook(failing, on_error="disable")
    with caplog.at_level(logging.ERROR, logger="ferrohook"):
        run_together(*(hooked for _ in range(THREADS)))

    assert len(caplog.records) == 1
    assert handle.calls == THREADS
    assert not handle.enabled


def test_always_call_hooks_run_in_every_failing_call_during_registering() -> None:
    each = 1_000
    hooked: Module = fh.HookedModule(Echo())
    seen = [0] * THREADS
    failing = threading.Semaphore(THREADS)

    def raising(module: Any, args: Any) -> None:
        raise ZeroDivisionError(args[0])

    def always(module: Any, args: Any, output: Any) -> None:
        seen[args[0]] += 1

    hooked.register_forward_pre_hook(raising)
    handle = hooked.register_forward_hook(always, always_call=True)

    def calling(thread: int) -> None:
        for _ in range(each):
            with pytest.raises(ZeroDivisionError, match=str(thread)):
                hooked(thread)
        failing.acquire()

    def churning() -> None:
        while failing.acquire(blocking=False):
            failing.release()
            once = hooked.register_forward_hook(lambda *_: None, always_call=True, prepend=True)
            once.remove()

    run_together(
        *(lambda thread=thread: calling(thread) for thread in range(THREADS)), churning, churning
    )

    assert seen == [each] * THREADS
    assert handle.calls == THREADS * each
