"""Waiting until no thread is inside a hook."""

from __future__ import annotations

import _thread
import threading
from typing import TYPE_CHECKING, Any

import pytest

import ferrohook as fh
from support.limits import LIMIT
from support.modules import Echo, Module
from support.threads import THREADS, Blocking, Together, run_together

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("switch_often")
NOTHING_HAPPENS = 0.1
"""Seconds after which a blocked operation counts as waiting."""


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
    hooked(None)  # neither invokes the removed hook nor blocks
    blocking.release.set()
    removers.join()
    callers.join()

    assert seen == [THREADS, THREADS]
    assert handle.calls == THREADS


@pytest.mark.parametrize("removed_before", [False, True])
def test_quiesce_returns_when_no_thread_is_inside_any_hook(*, removed_before: bool) -> None:
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
        # Raises even if the hook is not the innermost one of this thread.
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
def test_an_invalid_timeout_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    handle = fh.HookedModule(Echo()).register_forward_hook(lambda *_: None)
    refused: list[None] = []

    def removing() -> None:
        with pytest.raises(error, match="timeout"):
            handle.remove(**arguments)
        refused.append(None)

    run_together(*(removing for _ in range(THREADS)))
    assert len(refused) == THREADS
    assert not handle.removed


def test_resources_of_a_hook_can_be_freed_after_waiting() -> None:
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

    handles: list[fh.typing.HookHandle] = []

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


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("how", ["remove", "quiesce"])
def test_ctrl_c_interrupts_a_wait(how: str) -> None:
    hooked: Module = fh.HookedModule(Echo())
    blocking = Blocking()
    handle = hooked.register_forward_hook(blocking)
    caller = Together(hooked)
    blocking.entered.wait(LIMIT)
    starting = threading.Barrier(2)

    def interrupt() -> None:
        starting.wait(LIMIT)
        # The main thread most likely waits by now; the test is valid even if not.
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
