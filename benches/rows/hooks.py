"""Registering, threads and memory: `HookedModule` against `nn.Module`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import ferrohook as fh
from benches.harness import Group, Row, Sampler, expect, no_garbage_collection, timed
from benches.rows.calls import (
    Trivial,
    X,
    expect_as_pytorch,
    forward_hooks,
    observe,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

LIVE_HOOKS = 200_000


def register_and_remove() -> dict[str, Sampler]:
    """Registers a hook and removes it again."""
    fired: list[object] = []

    def loops(module: nn.Module) -> Callable[[int], None]:
        def loop(count: int) -> None:
            def hook(*arguments: object) -> None:
                fired.append(arguments)

            for _ in repeat(None, count):
                module.register_forward_hook(hook).remove()

        return loop

    ours, theirs = fh.HookedModule(Trivial()), Trivial()
    for module in (ours, theirs):
        handle = module.register_forward_hook(lambda *arguments: fired.append(arguments))
        module(X)
        handle.remove()
        loops(module)(10)
        module(X)
    expect(len(fired) == 2, f"two firings, one of each hook before its removal, not {len(fired)}")  # noqa: PLR2004
    expect(not ours.hooks(), "no hooks left")
    return {
        "HookedModule, register + remove": timed(loops(ours)),
        "nn.Module, register + remove": timed(loops(theirs)),
    }


def threads() -> dict[str, Sampler]:
    """Four threads call a module with a hook while a fifth registers and removes others."""
    expect_as_pytorch(Trivial, forward_hooks(1))
    ours, theirs = fh.HookedModule(Trivial()), Trivial()
    handle = ours.register_forward_hook(observe)
    theirs.register_forward_hook(observe)

    def sample_ours(seconds: float) -> float:
        before = handle.calls
        completed, failed, taken = call_and_register(ours, seconds)
        expect(not failed, f"every call to return, {len(failed)} raised, the first: {failed[:1]}")
        fired = handle.calls - before
        expect(fired == completed, f"a firing for each of {completed} calls, not {fired}")
        return completed / taken / 1000

    def sample_theirs(seconds: float) -> float:
        # PyTorch's calls may raise here (its dict of hooks changes under them): those don't count.
        completed, _, taken = call_and_register(theirs, seconds)
        return completed / taken / 1000

    return {"HookedModule in 4 threads": sample_ours, "nn.Module in 4 threads": sample_theirs}


def call_and_register(module: nn.Module, seconds: float) -> tuple[int, list[Exception], float]:
    """Counts the calls that returned, collects the exceptions of the others, and times them all."""
    callers = 4
    # The GIL changes hands every few milliseconds: a sample needs many of those.
    seconds *= 10
    barrier = threading.Barrier(callers + 2)
    stop = False
    completed = [0] * callers
    failed: list[Exception] = []

    def call(index: int) -> None:
        count = 0
        barrier.wait()
        while not stop:
            try:
                module(X)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is counted)
                failed.append(error)
            else:
                count += 1
        completed[index] = count

    def register() -> None:
        barrier.wait()
        while not stop:
            module.register_forward_hook(observe).remove()

    workers = [threading.Thread(target=call, args=(index,)) for index in range(callers)]
    workers.append(threading.Thread(target=register))
    with no_garbage_collection():
        for worker in workers:
            worker.start()
        barrier.wait()
        start = perf_counter()
        sleep(seconds)
        stop = True
        for worker in workers:
            worker.join()
        taken = perf_counter() - start
    return sum(completed), failed, taken


def memory() -> dict[str, Sampler]:
    """The memory of a live hook, its handle included and its callable not."""
    expect_as_pytorch(Trivial, forward_hooks(1))
    return {
        "HookedModule, memory per live hook": in_new_process(fh.HookedModule),
        "nn.Module, memory per live hook": in_new_process(None),
    }


def in_new_process(wrapper: Callable[[nn.Module], nn.Module] | None) -> Sampler:
    """Samples the bytes of a live hook, each time in a process where nothing was freed before."""

    def sample(_seconds: float) -> float:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(bytes_per_hook, wrapper).result()

    return sample


def bytes_per_hook(wrapper: Callable[[nn.Module], nn.Module] | None) -> float:
    """Measures the bytes of a live hook in this process."""
    module = wrapper(Trivial()) if wrapper else Trivial()
    fired = 0

    def hook(_module: object, _args: object, _output: object) -> None:
        nonlocal fired
        fired += 1

    # The first hook and the first call allocate once only.
    module.register_forward_hook(hook).remove()
    module(X)
    handles: list[object] = [None] * LIVE_HOOKS
    with no_garbage_collection():
        before = resident_bytes()
        for index in range(LIVE_HOOKS):
            handles[index] = module.register_forward_hook(hook)
        module(X)
        after = resident_bytes()
    expect(fired == LIVE_HOOKS, f"{LIVE_HOOKS} firings, not {fired}")
    return (after - before) / LIVE_HOOKS


def resident_bytes() -> int:
    """Physical memory of this process; Linux alone has it in a file."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


GROUPS = [
    Group(
        name="registering",
        setup=register_and_remove,
        rows=[
            Row(
                name="HookedModule, register + remove",
                over="nn.Module, register + remove",
                bar=0.30,
            )
        ],
    ),
    Group(
        name="calls in 4 threads while a fifth registers and removes",
        setup=threads,
        rows=[
            Row(
                name="HookedModule in 4 threads",
                over="nn.Module in 4 threads",
                bar=1.5,
                at_least=True,
            )
        ],
        unit="/ms",
    ),
]
if sys.platform == "linux":
    GROUPS.append(
        Group(
            name="memory",
            setup=memory,
            rows=[
                Row(
                    name="HookedModule, memory per live hook",
                    over="nn.Module, memory per live hook",
                    bar=200,
                    absolute=True,
                )
            ],
            unit="B",
            repeats=2,
        )
    )
