"""Hooks that block, register, remove and call: no lock while user code runs."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ferrohook as fh
from support.interpreters import assert_ends_well, run_with_torch
from support.limits import LIMIT
from support.modules import Echo, Module
from support.threads import THREADS, Blocking, Together, run_together

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("switch_often")


def test_all_threads_may_be_inside_a_hook_at_once() -> None:
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


def test_a_blocked_hook_blocks_no_other_thread() -> None:
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
    """Operations allowed in hooks, each of which takes a lock somewhere."""

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
@pytest.mark.usefixtures("collect_cheaply")
def test_hooks_may_call_register_remove_and_start_threads(deed: str, phase: str) -> None:
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


def test_hooks_that_remove_each_other_fire_once() -> None:
    rounds = 500
    for _ in range(rounds // 10):
        hooked: Module = fh.HookedModule(Echo())
        handles: list[fh.typing.HookHandle] = []
        bodies: list[int] = []

        def remove_all(
            module: Any,
            args: Any,
            output: Any,
            handles: list[fh.typing.HookHandle] = handles,
            bodies: list[int] = bodies,
        ) -> None:
            for handle in handles:
                handle.remove()
            bodies.append(output)

        handles += [hooked.register_forward_hook(remove_all) for _ in range(10)]
        run_together(*(lambda thread=thread, h=hooked: h(thread) for thread in range(THREADS)))

        # The first to run removes all others, also later ones of the same call.
        assert len(set(bodies)) == len(bodies)
        assert sum(handle.calls for handle in handles) == len(bodies) >= 1
        assert hooked.hooks() == []


class Litter:
    """A cycle whose finaliser acts, and leaves another one for the next collection."""

    def __init__(self, act: Callable[[], bool]) -> None:
        self.me, self.act = self, act

    def __del__(self) -> None:
        if self.act():
            Litter(self.act)


def wait_in_finalisers(theirs: int) -> None:
    """Instruments a model while finalisers wait for a thread that instruments it, or another."""
    threshold = gc.get_threshold()
    models = [Echo() for _ in range(2)]
    with fh.instrument(models[0]), fh.instrument(models[1]):
        pass  # makes the classes
    stuck: list[bool] = []
    wanted = left = 0
    while left == 0:
        wanted += 1
        left = wanted

        def instrument_elsewhere() -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                other = threading.Thread(target=lambda: fh.instrument(models[theirs]).restore())
                other.start()
                other.join(LIMIT)
                stuck.append(other.is_alive())
            return left > 0

        gc.collect()
        Litter(instrument_elsewhere)
        gc.set_threshold(1)
        try:
            instrumentation = fh.instrument(models[0])
            instrumentation.restore()
        finally:
            gc.set_threshold(*threshold)
        assert not any(stuck)
    assert wanted > 1
    left = 0
    gc.collect()  # the last litter


AUDIT_HOOK = "sys.addaudithook(lambda *_: [[], [[]], [], []] and None)"


@pytest.mark.collects_at_once
@pytest.mark.parametrize(
    ("theirs", "before"),
    [(0, ""), (1, ""), (1, AUDIT_HOOK)],
    ids=["this model", "another model", "another model, with an audit hook"],
)
def test_a_finaliser_may_wait_for_a_thread_that_instruments(theirs: int, before: str) -> None:
    # In a separate process, as audit hooks stay. filelock registers one from CPython 3.12 on.
    code = f"""
gc.freeze()
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import threads.test_threads_reentry as tests
{before}
tests.wait_in_finalisers({theirs})
"""
    assert_ends_well(run_with_torch(code))
