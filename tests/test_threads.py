"""Threads: what a call, a registration and a removal promise each other.

Every test lets its threads start from one barrier, gives up after a time limit and counts exactly.
"""

from __future__ import annotations

import _thread
import copy
import faulthandler
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from torch import nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("switch_often")

THREADS = 8
LIMIT = 60.0
"""Seconds that any wait of these tests may take."""
NOTHING_HAPPENS = 0.1
"""Seconds after which something is taken to be waiting."""
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

Module: TypeAlias = fh.HookedModule[Any]


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    # A deadlock in native code may hold the GIL, and then nothing written in Python ends it.
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def _collect_cheaply() -> Iterator[None]:
    """Leaves what lives already (all of torch) out of the collections of a test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Together:
    """Threads that start from one barrier; `join` raises what any of them raised."""

    def __init__(self, *targets: Callable[[], object]) -> None:
        self._barrier = threading.Barrier(len(targets))
        self._raised: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(target,), daemon=True) for target in targets
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, target: Callable[[], object]) -> None:
        try:
            self._barrier.wait(LIMIT)
            target()
        except BaseException as error:  # noqa: BLE001 (join raises it)
            self._raised.append(error)

    def join(self) -> None:
        deadline = time.monotonic() + LIMIT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._raised:
            raise self._raised[0]
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        assert not stuck, f"still running after {LIMIT} s: {stuck}"


def run_together(*targets: Callable[[], object]) -> None:
    Together(*targets).join()


def wait(event: threading.Event) -> None:
    assert event.wait(LIMIT), f"nothing happened for {LIMIT} s"


class Blocking:
    """A hook that stays inside from `entered` until `release`, and then says that it left."""

    def __init__(self, threads: int = 1) -> None:
        self.entered = threading.Barrier(threads + 1)
        self.release = threading.Event()
        self.left: list[None] = []

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.entered.wait(LIMIT)
        wait(self.release)
        self.left.append(None)


class Echo(nn.Module):
    """Returns its argument without a tensor in sight: these tests are about the hooks."""

    def forward(self, value: Any = None) -> Any:
        return value


# --- The big mix --------------------------------------------------------------------------------


class Call:
    """One call of the mix, as its only positional argument: what its hooks saw so far."""

    __slots__ = ("fired", "kwargs", "last", "thread")

    def __init__(self, thread: int, scale: int) -> None:
        self.thread = thread
        self.kwargs = {"scale": scale}
        self.fired: list[Probe] = []
        self.last = time.perf_counter_ns()


class Probe:
    """A hook that checks each of its invocations and counts them by thread.

    `call.last` is when the hook before this one ended, or the phase began: whoever had been
    removed (or disabled) by then must not be invoked.
    """

    __slots__ = ("__weakref__", "calls", "gone")

    def __init__(self) -> None:
        self.calls = [0] * THREADS
        self.gone: int | None = None

    def note(self, call: Call) -> None:
        gone = self.gone
        assert gone is None or gone >= call.last, "invoked after it was gone"
        self.calls[call.thread] += 1
        call.fired.append(self)
        call.last = time.perf_counter_ns()

    def plain_pre(self, module: Any, args: tuple[Any, ...]) -> Any:
        assert isinstance(module, fh.HookedModule)
        (call,) = args
        self.note(call)

    def kwargs_pre(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(module, fh.HookedModule)
        (call,) = args
        assert kwargs == call.kwargs
        self.note(call)

    def typed_pre(self, call: Any) -> Any:
        self.note(call)
        return (call,)

    def plain(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        assert isinstance(module, fh.HookedModule)
        (call,) = args
        assert type(output) is int
        self.note(call)

    def kwargs(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        assert isinstance(module, fh.HookedModule)
        (call,) = args
        assert kwargs == call.kwargs
        assert type(output) is int
        self.note(call)

    def typed(self, call: Any, output: Any) -> None:
        assert type(output) is int
        self.note(call)

    def adding(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        self.plain(module, args, output)
        return output + 1

    def scaling(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (call,) = args
        self.kwargs_pre(module, args, kwargs)
        # What the hooks behind this one are to see.
        call.kwargs = {"scale": 2 * kwargs["scale"]}
        return args, call.kwargs

    def register(self, hooked: Module, kind: str, **options: Any) -> fh.HookHandle:
        # A bound method: the registry alone keeps the probe alive.
        body = getattr(self, kind)
        if kind in {"kwargs", "kwargs_pre", "scaling"}:
            options["with_kwargs"] = True
        if kind.startswith("typed"):
            body = fh.ForwardPreHook(body) if kind == "typed_pre" else fh.ForwardHook(body)
        if kind == "scaling" or kind.endswith("_pre"):
            return hooked.register_forward_pre_hook(body, **options)
        return hooked.register_forward_hook(body, **options)


KINDS = ("plain_pre", "kwargs_pre", "typed_pre", "plain", "kwargs", "typed")


class Scaled(nn.Module):
    def forward(self, call: Call, *, scale: int) -> int:
        # A new phase begins after this.
        call.last = time.perf_counter_ns()
        return scale


class Mix:
    """One module, what the threads do to it, and what they counted."""

    CALLS, PAIRS, SWITCHES = 50_000, 125_000, 100_000
    """What each calling, each registering and the one switching thread do."""

    def __init__(self) -> None:
        self.hooked: Module = fh.HookedModule(Scaled())
        # Hooks that stay: some change what is passed on; first and last of both phases.
        self.stay = [Probe() for _ in range(4)]
        self.stay_handles = [
            self.stay[0].register(self.hooked, "scaling", priority=2),
            self.stay[1].register(self.hooked, "plain_pre", priority=-2),
            self.stay[2].register(self.hooked, "adding", priority=2),
            self.stay[3].register(self.hooked, "adding", priority=-2),
        ]
        self.switched = [Probe() for _ in range(3)]
        self.switched_handles = [
            probe.register(self.hooked, kind, priority=1)
            for probe, kind in zip(self.switched, ("typed_pre", "kwargs", "typed"), strict=True)
        ]
        self.removed: list[tuple[fh.HookHandle, list[int]]] = []
        self.sampled: list[weakref.ref[Probe]] = []

    def call(self, thread: int) -> None:
        order = {probe: place for place, probe in enumerate(self.stay)}
        for scale in range(self.CALLS):
            call = Call(thread, scale)
            assert self.hooked(call, scale=scale) == 2 * scale + 2
            fired = call.fired
            assert len(set(fired)) == len(fired), "fired twice in one phase"
            assert [order[probe] for probe in fired if probe in order] == [0, 1, 2, 3]

    def register(self, seed: int) -> None:
        choose = random.Random(seed)  # noqa: S311 (not for cryptography)
        mine: list[tuple[fh.HookHandle, Probe]] = []

        def remove_one() -> None:
            handle, probe = mine.pop(choose.randrange(len(mine)))
            handle.remove()
            probe.gone = time.perf_counter_ns()

        for done in range(self.PAIRS):
            probe = Probe()
            kind, prepend = choose.choice(KINDS), choose.random() < 0.5
            handle = probe.register(self.hooked, kind, prepend=prepend)
            mine.append((handle, probe))
            self.removed.append((handle, probe.calls))
            if done % 64 == 0:
                self.sampled.append(weakref.ref(probe))
            if done % 4096 == 0:
                gc.collect()
                self.check_list()
            while len(mine) > choose.randrange(3):
                remove_one()
        while mine:
            remove_one()

    def check_list(self) -> None:
        ids = [hook.id for hook in self.hooked.hooks("forward")]
        assert len(set(ids)) == len(ids)
        assert (ids[0], ids[-1]) == (self.stay_handles[2].id, self.stay_handles[3].id)

    def switch(self) -> None:
        choose = random.Random(0)  # noqa: S311 (not for cryptography)
        for _ in range(self.SWITCHES):
            place = choose.randrange(len(self.switched))
            handle, probe = self.switched_handles[place], self.switched[place]
            if handle.enabled:
                handle.disable()
                probe.gone = time.perf_counter_ns()
            else:
                probe.gone = None
                handle.enable()


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.usefixtures("_collect_cheaply")
def test_a_million_operations_of_all_kinds() -> None:
    assert THREADS * Mix.CALLS + 2 * 2 * Mix.PAIRS + Mix.SWITCHES >= 10**6
    mix = Mix()

    run_together(
        *(lambda thread=thread: mix.call(thread) for thread in range(THREADS)),
        *(lambda seed=seed: mix.register(seed) for seed in range(2)),
        mix.switch,
    )

    calls = THREADS * Mix.CALLS
    assert [handle.calls for handle in mix.stay_handles] == [calls] * 4
    assert [sum(probe.calls) for probe in mix.stay] == [calls] * 4
    assert len(mix.removed) == 2 * Mix.PAIRS
    assert all(handle.removed for handle, _ in mix.removed)
    assert [handle.calls for handle, _ in mix.removed] == [sum(each) for _, each in mix.removed]
    assert sum(handle.calls for handle, _ in mix.removed) > 0, "the threads never met"
    switched = [handle.calls for handle in mix.switched_handles]
    assert switched == [sum(probe.calls) for probe in mix.switched]
    assert 0 < min(switched) <= max(switched) < calls
    live = sorted(handle.id for handle in (*mix.stay_handles, *mix.switched_handles))
    assert sorted(hook.id for hook in mix.hooked.hooks()) == live
    gc.collect()
    assert [ref for ref in mix.sampled if ref() is not None] == []


# --- Registering and removing -------------------------------------------------------------------


def test_hooks_of_all_threads_stand_in_one_total_order() -> None:
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


def test_clearing_and_registering_at_once_lose_no_hook() -> None:
    each = 5_000
    hooked: Module = fh.HookedModule(Echo())
    handles: list[fh.HookHandle] = []
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


def test_changing_priorities_never_drops_or_doubles_a_hook_of_a_call() -> None:
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


def test_copies_made_while_others_register_are_whole() -> None:
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


def test_giving_the_module_back_during_calls_ends_them_cleanly() -> None:
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


# --- Waiting for a hook to be left --------------------------------------------------------------


def test_removing_with_wait_returns_when_the_last_thread_has_left() -> None:
    hooked: Module = fh.HookedModule(Echo())
    blocking = Blocking(THREADS)
    handle = hooked.register_forward_hook(blocking)
    callers = Together(*(hooked for _ in range(THREADS)))
    blocking.entered.wait(LIMIT)

    with pytest.raises(TimeoutError, match="still inside"):
        handle.remove(wait=True, timeout=0.01)
    assert handle.removed
    returned = threading.Event()
    seen: list[int] = []

    def remove() -> None:
        handle.remove(wait=True)
        seen.append(len(blocking.left))
        returned.set()

    removers = Together(remove, remove)
    assert not returned.wait(NOTHING_HAPPENS)
    hooked(None)  # not invoked any more, and not held up
    blocking.release.set()
    removers.join()
    callers.join()

    assert seen == [THREADS, THREADS]
    assert handle.calls == THREADS


@pytest.mark.parametrize("removed_before", [False, True])
def test_quiesce_returns_when_nobody_is_inside_any_hook(*, removed_before: bool) -> None:
    hooked: Module = fh.HookedModule(Echo())
    blocking = [Blocking(), Blocking()]

    def only(place: int) -> Callable[[Any, Any, Any], None]:
        return lambda module, args, output: (
            blocking[place](module, args, output) if output == place else None
        )

    handles = [hooked.register_forward_hook(only(place)) for place in range(2)]
    other = hooked.register_forward_hook(lambda *_: None)
    callers = Together(lambda: hooked(0), lambda: hooked(1))
    for hook in blocking:
        hook.entered.wait(LIMIT)
    if removed_before:
        for handle in (*handles, other):
            handle.remove()
        assert hooked.hooks() == []
    with pytest.raises(TimeoutError, match="still inside"):
        hooked.quiesce(0.01)
    returned = threading.Event()
    seen: list[list[int]] = []

    def quiesce() -> None:
        hooked.quiesce(LIMIT)
        seen.append([len(hook.left) for hook in blocking])
        returned.set()

    waiters = Together(quiesce, quiesce)
    assert not returned.wait(NOTHING_HAPPENS)
    blocking[1].release.set()
    assert not returned.wait(NOTHING_HAPPENS)
    blocking[0].release.set()
    waiters.join()
    callers.join()

    assert seen == [[1, 1], [1, 1]]
    hooked.quiesce()


def test_waiting_from_inside_the_hook_raises_and_leaves_it_registered() -> None:
    hooked: Module = fh.HookedModule(Echo())
    idle = hooked.register_forward_hook(lambda *_: None, priority=-1)

    def waiting(module: Any, args: Any, output: Any) -> None:
        # Also when the hook is not the innermost that this thread is inside of.
        with hooked.register_forward_pre_hook(nested):
            hooked.inner_call = hooked(None)
        with pytest.raises(fh.HookError, match="from inside that hook"):
            handle.remove(wait=True)
        idle.remove(wait=True)

    def nested(module: Any, args: Any) -> None:
        handle.disable()
        with pytest.raises(fh.HookError, match="from inside that hook"):
            handle.remove(wait=True, timeout=LIMIT)
        with pytest.raises(fh.HookError, match="from inside that hook"):
            hooked.quiesce()
        handle_of_other_module.remove(wait=True)

    handle_of_other_module = fh.HookedModule(Echo()).register_forward_hook(lambda *_: None)
    handle = hooked.register_forward_hook(waiting)
    run_together(lambda: hooked(None))

    assert not handle.removed
    assert idle.removed
    handle.remove(wait=True)
    assert handle.removed
    assert handle.calls == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"timeout": 1.0}, ValueError),
        ({"wait": True, "timeout": -1.0}, ValueError),
        ({"wait": True, "timeout": float("nan")}, ValueError),
        ({"wait": True, "timeout": "soon"}, fh.HookTypeError),
    ],
)
def test_a_timeout_that_makes_no_sense_is_refused(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    handle = fh.HookedModule(Echo()).register_forward_hook(lambda *_: None)
    refused: list[None] = []

    def removing() -> None:
        with pytest.raises(error, match="timeout"):
            handle.remove(**arguments)
        refused.append(None)

    run_together(*(removing for _ in range(THREADS)))
    assert len(refused) == THREADS
    assert not handle.removed


def test_what_a_hook_uses_can_be_freed_after_waiting() -> None:
    rounds, callers = 1_000, 4
    hooked: Module = fh.HookedModule(Echo())
    working = threading.Semaphore(callers)
    calls = [0] * callers

    class Resource:
        freed = False

        def use(self, module: Any, args: Any, output: Any) -> None:
            assert not self.freed
            calls[output] += 1
            assert not self.freed

    done = threading.Event()

    def calling(thread: int) -> None:
        while not done.is_set():
            hooked(thread)
        working.acquire()

    handles: list[fh.HookHandle] = []

    def freeing() -> None:
        try:
            for turn in range(rounds):
                resource = Resource()
                handle = hooked.register_forward_hook(resource.use)
                handles.append(handle)
                other = hooked.register_forward_pre_hook(lambda module, args: None)
                if turn % 2:
                    handle.remove(wait=True, timeout=LIMIT)
                else:
                    handle.remove()
                    hooked.quiesce(LIMIT)
                resource.freed = True
                other.remove()
        finally:
            done.set()

    run_together(*(lambda thread=thread: calling(thread) for thread in range(callers)), freeing)

    assert hooked.hooks() == []
    assert sum(handle.calls for handle in handles) == sum(calls)


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Has Ctrl-C raise, also where a shell started this in the background and has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize("how", ["remove", "quiesce"])
def test_ctrl_c_gets_through_a_wait(how: str) -> None:
    hooked: Module = fh.HookedModule(Echo())
    blocking = Blocking()
    handle = hooked.register_forward_hook(blocking)
    caller = Together(hooked)
    blocking.entered.wait(LIMIT)
    starting = threading.Barrier(2)

    def interrupt() -> None:
        starting.wait(LIMIT)
        # Most likely the main thread waits by now; the test holds as well if it does not yet.
        threading.Event().wait(NOTHING_HAPPENS)
        _thread.interrupt_main()

    interrupter = Together(interrupt)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the barrier belongs to the wait)
        starting.wait(LIMIT)
        if how == "remove":
            handle.remove(wait=True, timeout=LIMIT)
        else:
            hooked.quiesce(LIMIT)

    interrupter.join()
    assert handle.removed == (how == "remove")
    assert blocking.left == []
    blocking.release.set()
    caller.join()
    hooked.quiesce(LIMIT)
    handle.remove(wait=True)


# --- No lock while user code runs ---------------------------------------------------------------


def test_a_hook_is_entered_by_all_threads_at_once() -> None:
    hooked: Module = fh.HookedModule(Echo())
    inside = threading.Barrier(THREADS)

    def meeting(*_: Any) -> None:
        inside.wait(LIMIT)

    handles = [
        hooked.register_forward_pre_hook(meeting),
        hooked.register_forward_hook(meeting),
    ]
    run_together(*(hooked for _ in range(THREADS)))

    assert [handle.calls for handle in handles] == [THREADS, THREADS]


def test_a_blocked_hook_holds_up_nobody_else() -> None:
    hooked: Module = fh.HookedModule(Echo())
    blocking = Blocking()
    handle = hooked.register_forward_hook(blocking)
    caller = Together(hooked)
    blocking.entered.wait(LIMIT)
    handle.disable()

    def others() -> None:
        for _ in range(100):
            added = hooked.register_forward_hook(lambda module, args, output: 5)
            assert hooked(4) == 5
            added.priority = 3
            assert len(hooked.hooks("forward")) >= 2
            added.remove()
        copy.deepcopy(hooked.inner)
        repr(hooked)

    run_together(*(others for _ in range(THREADS)))
    handle.enable()
    handle.remove()
    hooked.clear_hooks()
    assert hooked(4) == 4
    assert blocking.left == []
    blocking.release.set()
    caller.join()
    assert handle.calls == 1


def deeds(hooked: Module) -> dict[str, Callable[[], object]]:
    """What hooks may do, each of which takes locks somewhere."""

    def nothing(*_: Any) -> None: ...

    def in_a_thread() -> None:
        run_together(lambda: register(remove=True), lambda: hooked("nested"), lambda: None)

    def register(*, remove: bool) -> None:
        handle = hooked.register_forward_hook(nothing)
        hooked.register_forward_pre_hook(nothing).remove()
        if remove:
            handle.remove()

    return {
        "call the module": lambda: hooked("nested"),
        "register": lambda: register(remove=False),
        "register and remove": lambda: register(remove=True),
        "clear": lambda: hooked.clear_hooks("backward"),
        "list": lambda: (hooked.hooks(), repr(hooked)),
        "collect garbage": gc.collect,
        "start and join threads": in_a_thread,
        "wait for another hook": lambda: hooked.register_forward_hook(nothing).remove(wait=True),
    }


@pytest.mark.parametrize("phase", ["forward_pre", "forward"])
@pytest.mark.parametrize("deed", list(deeds(fh.HookedModule(Echo()))))
@pytest.mark.usefixtures("_collect_cheaply")
def test_hooks_may_do_anything(deed: str, phase: str) -> None:
    hooked: Module = fh.HookedModule(Echo())
    each = 2 if deed == "start and join threads" else 10
    do = deeds(hooked)[deed]
    done = [0] * THREADS

    def hook(module: Any, args: Any, output: Any = None) -> None:
        (thread,) = args
        if thread != "nested":
            do()
            done[thread] += 1

    if phase == "forward":
        handle = hooked.register_forward_hook(hook)
    else:
        handle = hooked.register_forward_pre_hook(hook)

    def calling(thread: int) -> None:
        for _ in range(each):
            assert hooked(thread) == thread

    run_together(*(lambda thread=thread: calling(thread) for thread in range(THREADS)))

    assert done == [each] * THREADS
    nested = {"call the module", "start and join threads"}
    assert handle.calls == THREADS * each * (2 if deed in nested else 1)
    registered = THREADS * each if deed == "register" else 0
    assert len(hooked.hooks()) == 1 + registered


def test_hooks_that_remove_each_other_do_so_once() -> None:
    rounds = 500
    for _ in range(rounds // 10):
        hooked: Module = fh.HookedModule(Echo())
        handles: list[fh.HookHandle] = []
        bodies: list[int] = []

        def remove_all(
            module: Any,
            args: Any,
            output: Any,
            handles: list[fh.HookHandle] = handles,
            bodies: list[int] = bodies,
        ) -> None:
            for handle in handles:
                handle.remove()
            bodies.append(output)

        handles += [hooked.register_forward_hook(remove_all) for _ in range(10)]
        run_together(*(lambda thread=thread, h=hooked: h(thread) for thread in range(THREADS)))

        # The first to run keeps everybody else out, its own successors in the same call included.
        assert len(set(bodies)) == len(bodies)
        assert sum(handle.calls for handle in handles) == len(bodies) >= 1
        assert hooked.hooks() == []


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


def test_always_call_hooks_see_every_failing_call_whoever_registers_meanwhile() -> None:
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


# --- Autograd -----------------------------------------------------------------------------------


def test_backward_hooks_fire_exactly_once_for_each_backward_of_each_thread() -> None:
    each = 100
    hooked = fh.HookedModule(nn.Linear(3, 2))
    counts = [Counter[str]() for _ in range(THREADS)]
    ident: dict[int, int] = {}

    def note(kind: str) -> None:
        counts[ident[threading.get_ident()]][kind] += 1

    def backward_pre(module: Any, grad_output: Any) -> None:
        assert grad_output[0].shape == (1, 2)
        note("backward_pre")

    def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
        assert (grad_input[0].shape, grad_output[0].shape) == ((1, 3), (1, 2))
        note("backward")

    def typed(grad_input: Any, grad_output: Any) -> None:
        assert (grad_input[0].shape, grad_output[0].shape) == ((1, 3), (1, 2))
        note("typed")

    handles = [
        hooked.register_full_backward_pre_hook(backward_pre),
        hooked.register_full_backward_hook(backward),
        hooked.register_full_backward_hook(fh.BackwardHook(typed)),
    ]
    weight = hooked.inner.weight.detach()
    working = threading.Semaphore(THREADS)

    def training(thread: int) -> None:
        ident[threading.get_ident()] = thread
        for _ in range(each):
            x = torch.full((1, 3), float(thread), requires_grad=True)
            (grad,) = torch.autograd.grad(hooked(x).sum(), x)
            assert torch.equal(grad, weight.sum(0, keepdim=True))
        working.acquire()

    def churning() -> None:
        while working.acquire(blocking=False):
            working.release()
            once = hooked.register_full_backward_hook(lambda *_: None, prepend=True)
            once.remove()

    run_together(*(lambda thread=thread: training(thread) for thread in range(THREADS)), churning)

    assert counts == [Counter(backward_pre=each, backward=each, typed=each)] * THREADS
    assert [handle.calls for handle in handles] == [THREADS * each] * 3
    assert len(hooked.hooks()) == 3


def test_backward_on_other_threads_than_the_forward() -> None:
    each = 25
    hooked = fh.HookedModule(nn.Linear(3, 2))
    threads: Counter[int] = Counter()

    def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
        threads[threading.get_ident()] += 1
        # A hook may call the module on autograd's thread too.
        with torch.no_grad():
            hooked(torch.ones(1, 3))

    handle = hooked.register_full_backward_hook(backward)
    inputs = [torch.ones(1, 3, requires_grad=True) for _ in range(THREADS * each)]
    outputs = [hooked(x).sum() for x in inputs]

    def run_backward(thread: int) -> None:
        for output in outputs[thread::THREADS]:
            output.backward()

    run_together(*(lambda thread=thread: run_backward(thread) for thread in range(THREADS)))

    assert threads[threading.get_ident()] == 0
    assert sum(threads.values()) == handle.calls == THREADS * each
    assert all(x.grad is not None for x in inputs)


def test_removing_a_backward_hook_waits_for_the_thread_in_backward() -> None:
    hooked = fh.HookedModule(nn.Linear(3, 2))
    inside, release = threading.Event(), threading.Event()
    left: list[None] = []

    def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
        with pytest.raises(fh.HookError, match="from inside that hook"):
            handle.remove(wait=True)
        inside.set()
        wait(release)
        left.append(None)

    handle = hooked.register_full_backward_hook(backward)
    output = hooked(torch.ones(1, 3, requires_grad=True)).sum()
    caller = Together(output.backward)
    wait(inside)
    with pytest.raises(TimeoutError):
        handle.remove(wait=True, timeout=0.01)
    assert left == []
    release.set()
    handle.remove(wait=True, timeout=LIMIT)
    assert len(left) == 1
    caller.join()


# --- The interpreter ----------------------------------------------------------------------------


@pytest.mark.skipif(not FREE_THREADED, reason="needs an interpreter built without the GIL")
def test_importing_ferrohook_does_not_turn_the_gil_on() -> None:
    # PYTHON_GIL decides whatever is imported: without it the import does.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    code = "import sys; import ferrohook._core; print(sys._is_gil_enabled())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.skipif(not FREE_THREADED, reason="needs an interpreter built without the GIL")
@pytest.mark.skipif(os.environ.get("PYTHON_GIL") == "1", reason="PYTHON_GIL=1 asks for the GIL")
def test_these_tests_ran_without_the_gil() -> None:
    enabled: Callable[[], bool] = vars(sys)["_is_gil_enabled"]
    assert not enabled()
