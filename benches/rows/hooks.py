"""Calls with hooks, registering, threads and memory: `HookedModule` against `nn.Module`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

import ferrohook as fh
from ferrohook.benches.harness import Contest, Row, Sampler, expect, no_garbage_collection, timed

if TYPE_CHECKING:
    from collections.abc import Callable

    Hook: TypeAlias = Callable[..., Any]
    Wrap: TypeAlias = Callable[[Hook], Hook]
    Attach: TypeAlias = Callable[[nn.Module, Wrap], None]

X = torch.arange(3.0)
BURST = 100_000
LIVE_HOOKS = 200_000


class Trivial(nn.Module):
    """Does nothing, so that all the time is the call's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input."""
        return x


class TrivialWithKeyword(nn.Module):
    """As `Trivial`, with a keyword."""

    def forward(self, x: torch.Tensor, *, flag: bool) -> torch.Tensor:  # noqa: ARG002
        """Returns the input."""
        return x


def no_hooks(module: nn.Module, wrap: Wrap) -> None:
    """Attaches nothing."""


def forward_hooks(count: int) -> Attach:
    """Attaches forward hooks that observe."""

    def attach(module: nn.Module, wrap: Wrap) -> None:
        for _ in range(count):
            module.register_forward_hook(wrap(lambda module, args, output: None))  # noqa: ARG005

    return attach


def replacing_hooks(module: nn.Module, wrap: Wrap) -> None:
    """Attaches three pre- and three forward hooks that return a value each."""
    for _ in range(3):
        module.register_forward_pre_hook(wrap(lambda module, args: args))  # noqa: ARG005
        module.register_forward_hook(wrap(lambda module, args, output: output))  # noqa: ARG005


def keyword_hook(module: nn.Module, wrap: Wrap) -> None:
    """Attaches a forward hook that gets the keyword arguments."""
    hook = wrap(lambda module, args, kwargs, output: None)  # noqa: ARG005
    module.register_forward_hook(hook, with_kwargs=True)


def as_it_is(hook: Hook) -> Hook:
    """Wraps a hook in nothing."""
    return hook


class Recorder:
    """Wraps hooks so that what they see is written down, and what they return is changed.

    The change tells the hooks apart and does not commute: one that is skipped, called twice or
    called out of turn shows in the output.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._hooks = 0

    def __call__(self, hook: Hook) -> Hook:
        """Returns the hook that records."""
        index = self._hooks
        self._hooks += 1

        def recorded(module: object, *seen: object) -> object:
            self.log.append(f"{index}: {seen}")
            result = hook(module, *seen)
            if isinstance(result, torch.Tensor):
                return result * 2 + index
            if isinstance(result, tuple):
                return (result[0] * 2 + index, *result[1:])
            return result

        return recorded


def expect_as_pytorch(inner: type[nn.Module], attach: Attach, **kwargs: object) -> None:
    """Checks that the hooks do the same on a `HookedModule` as on the plain module."""
    outputs, logs = [], []
    for module in (fh.HookedModule(inner()), inner()):
        recorder = Recorder()
        attach(module, recorder)
        outputs.append(module(X, **kwargs))
        logs.append(recorder.log)
    ours, torchs = logs
    expect(torch.equal(*outputs), f"the output of PyTorch, {outputs[1]}, not {outputs[0]}")
    expect(ours == torchs, f"the calls of PyTorch, {torchs}, not {ours}")


def calls(module: nn.Module) -> Callable[[int], None]:
    """Calls `module` so many times."""

    def loop(count: int) -> None:
        # Local variables: the loop should cost as little as it can.
        call, x = module, X
        for _ in repeat(None, count):
            call(x)

    return loop


def keyword_calls(module: nn.Module) -> Callable[[int], None]:
    """Calls `module` with a keyword so many times."""

    def loop(count: int) -> None:
        call, x = module, X
        for _ in repeat(None, count):
            call(x, flag=True)

    return loop


def against_pytorch(attach: Attach, other: Attach | None = None) -> Contest:
    """A call with hooks on ours against one on PyTorch's, with the same or the `other` hooks."""
    expect_as_pytorch(Trivial, attach)
    ours, theirs = fh.HookedModule(Trivial()), Trivial()
    attach(ours, as_it_is)
    (other or attach)(theirs, as_it_is)
    return Contest(timed(calls(ours)), timed(calls(theirs)))


def with_keywords() -> Contest:
    """A call with keyword arguments and a hook that gets them."""
    expect_as_pytorch(TrivialWithKeyword, keyword_hook, flag=True)
    ours, theirs = fh.HookedModule(TrivialWithKeyword()), TrivialWithKeyword()
    keyword_hook(ours, as_it_is)
    keyword_hook(theirs, as_it_is)
    return Contest(timed(keyword_calls(ours)), timed(keyword_calls(theirs)))


def register_and_remove() -> Contest:
    """Registers a hook and removes it again."""
    fired: list[object] = []

    def loops(module: nn.Module) -> Callable[[int], None]:
        def loop(count: int) -> None:
            register, hook = module.register_forward_hook, lambda *seen: fired.append(seen)
            for _ in repeat(None, count):
                register(hook).remove()

        return loop

    ours, theirs = fh.HookedModule(Trivial()), Trivial()
    for module in (ours, theirs):
        handle = module.register_forward_hook(lambda *seen: fired.append(seen))
        module(X)
        handle.remove()
        loops(module)(10)
        module(X)
    expect(len(fired) == 2, f"two firings, one of each hook before its removal, not {len(fired)}")  # noqa: PLR2004
    expect(not ours.hooks(), "no hooks left")
    return Contest(timed(loops(ours)), timed(loops(theirs)))


def typed_observer() -> Contest:
    """A typed observer against a plain callable, both on ours."""
    expect_as_pytorch(Trivial, forward_hooks(1))
    seen: list[torch.Tensor] = []
    checked = fh.HookedModule(Trivial())
    checked.register_forward_hook(fh.ForwardHook(lambda x, y: seen.extend((x, y))))
    output = checked(X)
    expect(len(seen) == 2 and seen[0] is X and seen[1] is output, "input and output, once")  # noqa: PLR2004

    typed, plain = fh.HookedModule(Trivial()), fh.HookedModule(Trivial())
    typed.register_forward_hook(fh.ForwardHook(lambda x, y: None))  # noqa: ARG005
    plain.register_forward_hook(lambda module, args, output: None)  # noqa: ARG005
    return Contest(timed(calls(typed)), timed(calls(plain)))


def after_many() -> Contest:
    """A module that a million hooks have come and gone on against one that is new.

    Both have one hook. They are alike in all else, and can be measured in turn.
    """
    used, new = fh.HookedModule(Trivial()), fh.HookedModule(Trivial())
    live = used.register_forward_hook(lambda module, args, output: None)  # noqa: ARG005
    new.register_forward_hook(lambda module, args, output: None)  # noqa: ARG005
    fired: list[object] = []
    for _ in range(1_000_000 // BURST):
        handles = [
            used.register_forward_hook(lambda *seen: fired.append(seen)) for _ in range(BURST)
        ]
        for handle in handles:
            handle.remove()
        before = live.calls
        expect(torch.equal(used(X), X), "the input as output")
        expect(not fired, f"no removed hook to fire, {len(fired)} did")
        expect(live.calls == before + 1, "the hook that stayed to fire once")
    return Contest(timed(calls(used)), timed(calls(new)))


def many_per_hook() -> Contest:
    """The time per hook of a call with a thousand hooks against one with ten."""
    many, few = 1_000, 10
    for count in (many, few):
        expect_as_pytorch(Trivial, forward_hooks(count))
    modules = {}
    for count in (many, few):
        modules[count] = fh.HookedModule(Trivial())
        forward_hooks(count)(modules[count], as_it_is)
    return Contest(timed(calls(modules[many]), per=many), timed(calls(modules[few]), per=few))


def threads() -> Contest:
    """Four threads call a module with a hook while a fifth registers and removes others."""
    expect_as_pytorch(Trivial, forward_hooks(1))
    ours, theirs = fh.HookedModule(Trivial()), Trivial()
    handle = ours.register_forward_hook(lambda module, args, output: None)  # noqa: ARG005
    forward_hooks(1)(theirs, as_it_is)

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

    return Contest(sample_ours, sample_theirs)


def call_and_register(module: nn.Module, seconds: float) -> tuple[int, list[Exception], float]:
    """The calls that returned, what others raised, and the seconds they took in all."""
    callers = 4
    # Threads take turns of some milliseconds: a sample needs many of them.
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
            module.register_forward_hook(lambda module, args, output: None).remove()  # noqa: ARG005

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


def memory() -> Contest:
    """The memory of a live hook, its handle included and its callable not."""
    expect_as_pytorch(Trivial, forward_hooks(1))
    return Contest(in_new_process(fh.HookedModule), in_new_process(None))


def in_new_process(wrapper: Callable[[nn.Module], nn.Module] | None) -> Sampler:
    """Samples the bytes of a live hook, each time in a process where nothing was freed before."""

    def sample(_seconds: float) -> float:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(bytes_per_hook, wrapper).result()

    return sample


def bytes_per_hook(wrapper: Callable[[nn.Module], nn.Module] | None) -> float:
    """How many bytes a live hook takes in this process."""
    module = wrapper(Trivial()) if wrapper else Trivial()
    fired = 0

    def hook(_module: object, _args: object, _output: object) -> None:
        nonlocal fired
        fired += 1

    # The first hook and the first call also make what is there once only.
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
    """The physical memory that this process occupies; only Linux tells it without ado."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


ROWS = [
    Row(
        name="one forward hook / nn.Module with the same hook",
        bar=0.15,
        setup=partial(against_pytorch, forward_hooks(1)),
    ),
    Row(
        name="one forward hook / nn.Module without hooks",
        bar=0.35,
        setup=partial(against_pytorch, forward_hooks(1), no_hooks),
    ),
    Row(
        name="no hooks / nn.Module without hooks",
        bar=0.30,
        setup=partial(against_pytorch, no_hooks),
    ),
    Row(
        name="eight forward hooks / PyTorch",
        bar=0.15,
        setup=partial(against_pytorch, forward_hooks(8)),
    ),
    Row(
        name="three pre- and three forward hooks that return values / PyTorch",
        bar=0.20,
        setup=partial(against_pytorch, replacing_hooks),
    ),
    Row(
        name="a with_kwargs hook on a call with keywords / PyTorch",
        bar=0.30,
        setup=with_keywords,
    ),
    Row(name="register + remove / PyTorch", bar=0.30, setup=register_and_remove),
    Row(name="typed observer / plain callable", bar=1.3, setup=typed_observer),
    Row(name="a call after 10⁶ hooks came and went / before", bar=1.1, setup=after_many),
    Row(name="time per hook, call with 1,000 hooks / with 10", bar=1.1, setup=many_per_hook),
    Row(
        name="4 threads calling, one registering / PyTorch",
        bar=1.5,
        setup=threads,
        unit="calls/ms",
        at_least=True,
    ),
]
if sys.platform == "linux":
    ROWS.append(
        Row(
            name="memory per live hook (other: PyTorch)",
            bar=200,
            setup=memory,
            unit="bytes",
            absolute=True,
            repeats=2,
        )
    )
